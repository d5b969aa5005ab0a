"""``run_bench``: every variant in its own process, and all of them in turn.

All processes stay alive. In each round every variant does one turn of timed steps while the others wait, in an order
that is drawn anew; so what the machine does in the meantime meets all of them alike, and the ratio of a round compares
times that lie close together.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from fxckpt.bench.process import WorkerError, WorkerProcess
from fxckpt.bench.result import BenchResult, VariantResult, median_ratio
from fxckpt.bench.step import gradient_difference
from fxckpt.bench.variants import Variant, parse_variants
from fxckpt.errors import SettingsError
from fxckpt.models.spec import ModelSpec

Progress = Callable[[int, int, str], None]
"""``progress(done, total, what is done now)``."""
EAGER = Variant("eager")
FIGURES: tuple[str, ...] = (
    "graphs",
    "saved_bytes",
    "offloaded_bytes",
    "transfers",
    "recomputed_flops",
    "pass_seconds",
    "partition_seconds",
)
"""What a process tells at its end."""
PEAK_CPU = "profiler memory events over one step, gradients included"
PEAK_CUDA = "max_memory_allocated over one step, less what was allocated before, gradients included"


def run_bench(
    spec: ModelSpec,
    variants: Iterable[str],
    *,
    steps: int = 1,
    rounds: int = 5,
    warmup: int = 2,
    threads: int | None = None,
    on_progress: Progress | None = None,
) -> BenchResult:
    """Measure memory, time and gradients of one training step, run in several ways.

    A variant that fails is in the result with its reason. Gradients are compared with those of ``eager``, which is run
    once for that where it is not among the variants.

    Args:
        spec: the model and its batch.
        variants: such as ``["eager", "hf-compile@2", "fxckpt@2+offload"]``.
        steps: timed steps of each variant in a round; their mean is the round's time.
        rounds: how often each variant has its turn.
        warmup: steps of each variant before the first round, beside the one that compiles.
        threads: of PyTorch's kernels in each process; None for PyTorch's own choice.
        on_progress: called before each piece of work.

    Raises:
        SettingsError: a setting means nothing, or the model cannot be built.
    """
    parsed = parse_variants(variants)
    for name, value, least in (("steps", steps, 1), ("rounds", rounds, 1), ("warmup", warmup, 0)):
        if value < least:
            raise SettingsError(f"{name}={value}: it must be at least {least}.")
    if threads is not None and threads < 1:
        raise SettingsError(f"threads={threads}: it must be at least 1.")
    with tempfile.TemporaryDirectory(prefix="fxckpt-bench-") as folder, contextlib.ExitStack() as stack:
        bench = _Bench(spec, parsed, Path(folder), stack, threads, on_progress)
        bench.total = len(bench.order) * 3 + len(parsed) * rounds
        bench.prepare(warmup)
        bench.rounds(steps, rounds)
        bench.finish()
        bench.compare_gradients()
    settings = {
        "steps": steps,
        "rounds": rounds,
        "warmup": warmup,
        "date": datetime.date.today().isoformat(),
        "peak": PEAK_CPU if spec.device == "cpu" else PEAK_CUDA,
    }
    return BenchResult(spec, tuple(bench.results[v] for v in parsed), bench.model, bench.machine, settings)


class _Bench:
    """The processes and what they have told so far."""

    def __init__(
        self,
        spec: ModelSpec,
        variants: list[Variant],
        folder: Path,
        stack: contextlib.ExitStack,
        threads: int | None,
        on_progress: Progress | None,
    ) -> None:
        self.spec, self.variants, self.folder, self.stack, self.threads = spec, variants, folder, stack, threads
        self.order = variants if EAGER in variants else [EAGER, *variants]
        self.results = {v: VariantResult(str(v), v.ours) for v in self.order}
        self.workers: dict[Variant, WorkerProcess] = {}
        self.step_flops: dict[Variant, int] = {}
        self.model: dict[str, Any] = {}
        self.machine: dict[str, Any] = {}
        self.on_progress = on_progress
        self.done = self.total = 0

    def say(self, text: str) -> None:
        if self.on_progress is not None:
            self.on_progress(self.done, self.total, text)
        self.done += 1

    @contextlib.contextmanager
    def working(self, variant: Variant) -> Iterator[None]:
        """What fails here fails this variant alone, and ends its process."""
        try:
            yield
        except WorkerError as error:
            self.results[variant].error = str(error)
            worker = self.workers.pop(variant, None)
            if worker is not None:
                worker.close()

    def gradients(self, variant: Variant) -> Path:
        return self.folder / f"{self.order.index(variant)}.gradients.pt"

    def prepare(self, warmup: int) -> None:
        """Start the processes one after the other: build, compile, warm up, and read the memory of a step."""
        for i, variant in enumerate(self.order):
            result = self.results[variant]
            self.say(f"{variant}: build")
            worker = WorkerProcess(self.folder / str(i), self.threads)
            self.stack.callback(worker.close)
            try:
                loaded = worker.ask("load", spec=self.spec.to_dict(), threads=self.threads)
            except WorkerError as error:
                if i == 0:  # the model is the same for all
                    reason = str(error) if error.told else f"{self.spec.model} cannot be built: {error}"
                    raise SettingsError(reason) from error
                result.error = str(error)
                worker.close()
                continue
            self.machine = loaded.pop("facts")
            self.model = loaded
            self.workers[variant] = worker
            with self.working(variant):
                self.say(f"{variant}: first step")
                started = worker.ask("start", variant=str(variant), gradients=str(self.gradients(variant)))
                result.first_step_seconds, result.loss = started["seconds"], started["loss"]
                if variant in self.variants:
                    worker.ask("warm", steps=warmup)
                    memory = worker.ask("memory")
                    result.held_bytes, result.peak_bytes = memory["held_bytes"], memory["peak_bytes"]
                else:
                    self.finish_one(variant)
                    self.workers.pop(variant).close()

    def rounds(self, steps: int, rounds: int) -> None:
        """Timed steps of one variant at a time, all of them in each round."""
        draw = random.Random(self.spec.seed)
        for number in range(1, rounds + 1):
            gc.collect()
            alive = list(self.workers)
            for variant in draw.sample(alive, len(alive)):
                self.say(f"round {number} of {rounds}: {variant}")
                with self.working(variant):
                    seconds = self.workers[variant].ask("time", steps=steps)["seconds"]
                    self.results[variant].round_seconds.append(seconds)
        baseline = next((self.results[v] for v in self.variants if self.results[v].round_seconds), None)
        if baseline is not None:
            for result in self.results.values():
                result.ratio = median_ratio(result.round_seconds, baseline.round_seconds)

    def finish(self) -> None:
        """What the graphs tell, after all times are taken; then the processes end."""
        for variant in list(self.workers):
            self.say(f"{variant}: figures")
            with self.working(variant):
                self.finish_one(variant)
        for variant, flops in self.step_flops.items():
            plain = self.step_flops.get(EAGER)
            if plain is not None:
                self.results[variant].recomputed_flops = max(0, flops - plain)

    def finish_one(self, variant: Variant) -> None:
        figures = self.workers[variant].ask("figures")
        if "step_flops" in figures:
            self.step_flops[variant] = figures["step_flops"]
        for name in FIGURES:
            setattr(self.results[variant], name, figures.get(name))

    def compare_gradients(self) -> None:
        """Each variant's gradients of the first step against eager's."""
        reference = self.gradients(EAGER)
        if not reference.is_file():
            return
        wanted = torch.load(reference, weights_only=True, mmap=True)
        for variant in self.variants:
            if self.gradients(variant).is_file():
                found = torch.load(self.gradients(variant), weights_only=True, mmap=True)
                result = self.results[variant]
                result.gradient_difference, result.gradient_worst = gradient_difference(found, wanted)
