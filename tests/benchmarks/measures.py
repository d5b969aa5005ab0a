"""What each measure against memory brings: the peak of a compiled step without it, relative to that with all of them.

    python -m tests.benchmarks.measures                               # the bench set, some hours on two cores
    python -m tests.benchmarks.measures --only llama,vit --every-n 1

Each cell is a compilation. Rows are measures, described in docs/how-it-works.md; above 1, the measure saves memory.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
import torch._inductor.config

import fxckpt
from fxckpt import pipeline
from fxckpt.bench.step import TrainingStep
from fxckpt.decide import plan
from fxckpt.models.load import load
from fxckpt.use import backend
from tests.benchmarks.bench_set import SPECS


def _nothing(*args: Any, **kwargs: Any) -> int:
    return 0


def _unpatched(wanted: bool) -> AbstractContextManager[object]:
    return contextlib.nullcontext()


WITHOUT: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "known masks are dropped": lambda: mock.patch.object(pipeline, "drop_known_masks", _nothing),
    "kept layers save the least": lambda: mock.patch.object(pipeline, "saving_least", _unpatched),
    "each region makes its own mask": lambda: mock.patch.object(pipeline, "for_each_region", _nothing),
    "gradients make cheap values anew": lambda: mock.patch.object(pipeline, "for_gradients", _nothing),
    "a recompute waits for its gradient": lambda: mock.patch.object(pipeline, "start_recomputes", _nothing),
    "a weight's gradient first": lambda: mock.patch.object(pipeline, "weights_first", _nothing),
    "regions start from what is saved anyway": lambda: mock.patch.object(plan, "_start_from_what_is_saved", _nothing),
    "no horizontal fusion": lambda: mock.patch.dict(backend.INDUCTOR_OPTIONS, clear=True),
    "inputs of convolutions are not copied": lambda: mock.patch.object(backend, "_convolves_inputs_only", _nothing),
}
"""How each measure is left out."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SPECS), help="models of the bench set, with commas between")
    parser.add_argument("--every-n", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    columns = [(name, n) for name in options.only.split(",") for n in options.every_n]
    print("| without |", " | ".join(f"{name} @{n}" for name, n in columns), "|")
    print("|---" * (len(columns) + 1) + "|")
    whole = [peak(name, n) for name, n in columns]
    print("| all there |", " | ".join(f"{p / 2**20:.1f} MiB" for p in whole), "|", flush=True)
    for measure, left_out in WITHOUT.items():
        with left_out():
            ratios = [peak(name, n) / all_there for (name, n), all_there in zip(columns, whole, strict=True)]
        print(f"| {measure} |", " | ".join(f"{r:.3f}" for r in ratios), "|", flush=True)


def peak(name: str, every_n: int) -> int:
    """Peak bytes of a step of a model of the bench set; compiled anew, as the caches' keys do not know what is off."""
    torch.compiler.reset()
    model, batch = load(SPECS[name])
    with torch._inductor.config.patch(force_disable_caches=True):
        step = TrainingStep(model, torch.compile(fxckpt.transform(model, every_n=every_n)), batch, seed=0)
        step.timed()
        step.timed()
    return step.memory()[1]


if __name__ == "__main__":
    main()
