"""Time of each pass against the number of layers: a Qwen3 of 9, 18, 36 and 72 layers, whose 36 are those of the 8B.

    python -m tests.benchmarks.pass_times
    python -m tests.benchmarks.pass_times --layers 9 18 --runs 3

Widths do not matter to a pass, so they are small. The graph is captured once for each number of layers and run, with
the passes that only graphs for a fusing compiler get. "partition" is PyTorch's partitioner and not ours.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from typing import Any

import torch

import fxckpt
from fxckpt import pipeline
from fxckpt.record import GraphRecord
from fxckpt.use import hook


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[9, 18, 36, 72])
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    hook.rewrite = _as_for_inductor  # type: ignore[assignment]
    found = {n: [record(n) for _ in range(options.runs)] for n in options.layers}
    print("| layers |", " | ".join(map(str, found)), "|")
    print("|---" * (len(found) + 1) + "|")
    print("| nodes of the joint graph |", " | ".join(str(len(r[0].joint.graph.nodes)) for r in found.values()), "|")
    names = [name for name, _ in pipeline.PASSES]
    for name in names:
        print(f"| `{name}` |", " | ".join(f"{median(r, name):.3f} s" for r in found.values()), "|")
    ours = [sum(median(r, name) for name in names if name != "partition") for r in found.values()]
    print("| all but `partition` |", " | ".join(f"{s:.2f} s" for s in ours), "|")


def _as_for_inductor(partition: Any, joint: Any, inputs: Any, kwargs: Any, request: pipeline.Request) -> Any:
    return pipeline.rewrite(partition, joint, inputs, kwargs, dataclasses.replace(request, fuses=True))


def record(layers: int) -> GraphRecord:
    """The record of one capture."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch._dynamo.reset()
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        use_cache=False,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).train()
    ids = torch.randint(0, 64, (2, 32))
    t = fxckpt.transform(model, every_n=1, offload=True)
    t(input_ids=ids, labels=ids)
    (found,) = fxckpt.graphs(t)
    return found


def median(records: list[GraphRecord], name: str) -> float:
    return statistics.median(r.seconds[name] for r in records)


if __name__ == "__main__":
    main()
