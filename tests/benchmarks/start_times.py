"""Cold and warm start of a compiled training step: ``torch.compile(fxckpt.transform(model, ...))`` and transformers'
own checkpointing under ``torch.compile``, which recomputes the same layers, against ``torch.compile(model)``.

    python -m tests.benchmarks.start_times --rounds 3
    python -m tests.benchmarks.start_times --rounds 3 --every-n 1

Each figure is the time of the first step (forward and backward) in a process of its own: cold with an empty compile
cache, warm with the cache that the cold process left. The kinds take turns, and the medians are compared as ratios.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

KINDS = ("plain", "checkpointing", "fxckpt")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--every-n", type=int, default=2)
    parser.add_argument("--child", choices=KINDS)
    options = parser.parse_args()
    if options.child:
        print("RESULT" + json.dumps(first_step(options.child, options.layers, options.every_n)))
        return
    times: dict[tuple[str, str], list[float]] = {(k, c): [] for k in KINDS for c in ("cold", "warm")}
    for _ in range(options.rounds):
        with contextlib.ExitStack() as stack:
            caches = {kind: stack.enter_context(tempfile.TemporaryDirectory()) for kind in KINDS}
            for start in ("cold", "warm"):
                for kind, folder in caches.items():
                    times[kind, start].append(run(kind, folder, options))
    for start in ("cold", "warm"):
        plain = statistics.median(times["plain", start])
        for kind in KINDS:
            seconds = times[kind, start]
            middle = statistics.median(seconds)
            spread = f"{min(seconds):.1f}-{max(seconds):.1f}"
            print(f"{start} {kind:13} {middle:5.1f} s ({spread} s), ratio {middle / plain:.2f}", flush=True)


def run(kind: str, folder: str, options: argparse.Namespace) -> float:
    """Seconds of the first step in a new process with `folder` as its compile cache."""
    numbers = ["--layers", str(options.layers), "--every-n", str(options.every_n)]
    command = [sys.executable, "-m", "tests.benchmarks.start_times", "--child", kind, *numbers]
    env = dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder)
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{kind}: {done.stderr[-4000:]}")
    return float(json.loads(done.stdout.split("RESULT")[1].splitlines()[0]))


def first_step(kind: str, layers: int, every_n: int) -> float:
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
    if kind == "checkpointing":
        model.gradient_checkpointing_enable(every_n_layers=every_n)
    target = fxckpt.transform(model, every_n=every_n, offload=True) if kind == "fxckpt" else model
    start = time.perf_counter()
    torch.compile(target)(input_ids=ids, labels=ids).loss.backward()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
