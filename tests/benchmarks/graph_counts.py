"""Graphs and compiled frames of ``torch.compile(t)`` against ``torch.compile(model)`` on one sequence of calls.

python -m tests.benchmarks.graph_counts
"""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import fxckpt
from tests.zoo import build

STATIC = [(2, 16)] * 4
CHANGING = [(2, 16), (2, 16), (2, 12), (3, 20), (1, 16), (4, 9), (2, 16)]
CASES: list[tuple[str, str, list[tuple[int, int]], dict[str, Any]]] = [
    ("llama", "static shapes", STATIC, {}),
    ("llama", "changing shapes", CHANGING, {}),
    ("llama", "changing shapes, dynamic=True", CHANGING, {"dynamic": True}),
    ("gpt2", "changing shapes; the model breaks the graph", CHANGING, {}),
]


def main() -> None:
    torch.set_num_threads(1)
    print("model, calls | graphs, model | graphs, t | frames, model | frames, t")
    for name, title, shapes, options in CASES:
        plain, ours = (count(name, shapes, options, transformed=t) for t in (False, True))
        print(f"{name}, {title} | {plain[0]} | {ours[0]} | {plain[1]} | {ours[1]}", flush=True)


def count(name: str, shapes: list[tuple[int, int]], options: dict[str, Any], *, transformed: bool) -> tuple[int, int]:
    """Graphs handed to the backend, and frames that Dynamo compiled, over training and evaluation calls."""
    torch._dynamo.reset()
    counters.clear()
    model, _ = build(name)
    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(
        fxckpt.transform(model, every_n=2, offload=True) if transformed else model, backend=counter, **options
    )
    for batch, length in shapes:
        ids = torch.randint(5, 100, (batch, length))
        call = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
        step(**call).loss.backward()
        with torch.no_grad():
            step(**call)
    return counter.frame_count, counters["frames"]["ok"]


if __name__ == "__main__":
    main()
