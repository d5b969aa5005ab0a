"""Cold and warm start of a compiled training step: ``torch.compile(fxckpt.transform(model))`` against
``torch.compile(model)``.

    python -m tests.benchmarks.start_times --rounds 3

Each figure is the time of the first step (forward and backward) in a process of its own: cold with an empty compile
cache, warm with the cache that the cold process left. The two kinds take turns, and the medians are compared as a
ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

KINDS = ("plain", "fxckpt")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--child", choices=KINDS)
    options = parser.parse_args()
    if options.child:
        print("RESULT" + json.dumps(first_step(options.child, options.layers)))
        return
    times: dict[tuple[str, str], list[float]] = {(k, c): [] for k in KINDS for c in ("cold", "warm")}
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as plain, tempfile.TemporaryDirectory() as ours:
            for start in ("cold", "warm"):
                for kind, folder in zip(KINDS, (plain, ours), strict=True):
                    times[kind, start].append(run(kind, folder, options.layers))
    for start in ("cold", "warm"):
        a, b = (statistics.median(times[k, start]) for k in KINDS)
        spread = " ".join(f"{k}: {min(times[k, start]):.1f}-{max(times[k, start]):.1f} s" for k in KINDS)
        print(f"{start}: plain {a:.1f} s, fxckpt {b:.1f} s, ratio {b / a:.2f}   ({spread})")


def run(kind: str, folder: str, layers: int) -> float:
    """Seconds of the first step in a new process with `folder` as its compile cache."""
    command = [sys.executable, "-m", "tests.benchmarks.start_times", "--child", kind, "--layers", str(layers)]
    env = dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder)
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout.split("RESULT")[1].splitlines()[0]))


def first_step(kind: str, layers: int) -> float:
    """Seconds of the first compiled step of a Llama."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import fxckpt

    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).train()
    ids = torch.randint(0, 512, (2, 64))
    target = model if kind == "plain" else fxckpt.transform(model, every_n=2, offload=True)
    start = time.perf_counter()
    torch.compile(target)(input_ids=ids, labels=ids).loss.backward()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
