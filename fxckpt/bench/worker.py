"""One variant's own process: it does what the benchmark asks, a JSON line for a JSON line, and waits otherwise.

    load     {spec, threads}      build the model and its batch
    start    {variant, gradients} make the variant, run its first step, write the gradients to a file
    warm     {steps}              steps that are not timed
    memory   {}                   the memory of one step
    time     {steps}              timed steps
    figures  {}                   what the captured graphs tell; FLOPs of eager steps

An answer is ``{"ok": ...}`` or ``{"error": ..., "told": ...}``; `told` says that the error is fxckpt's own and
tells by itself what to do.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fxckpt
from fxckpt.bench.step import TrainingStep
from fxckpt.bench.variants import KINDS, Variant, parse_variant
from fxckpt.errors import FxckptError
from fxckpt.models.load import load
from fxckpt.models.spec import ModelSpec
from fxckpt.models.tasks import Batch
from fxckpt.torch_private import captured_graphs


class Worker:
    """The state of one variant between the parent's requests."""

    spec: ModelSpec
    model: nn.Module
    batch: Batch
    variant: Variant
    run: Any
    step: TrainingStep

    def load(self, spec: dict[str, Any], threads: int | None) -> dict[str, Any]:
        """Build the model and its batch."""
        if threads is not None:
            torch.set_num_threads(threads)
        self.spec = ModelSpec.from_dict(spec)
        self.model, self.batch = load(self.spec)
        parameters = list(self.model.parameters())
        return {
            "model": type(self.model).__name__,
            "parameters": sum(p.numel() for p in parameters),
            "parameter_bytes": sum(p.numel() * p.element_size() for p in parameters),
            "batch": {k: list(v.shape) if isinstance(v, torch.Tensor) else str(v) for k, v in self.batch.items()},
            "facts": machine_facts(self.spec.device),
        }

    def start(self, variant: str, gradients: str) -> dict[str, Any]:
        """Make the variant and run its first step, in which it compiles."""
        self.variant = parse_variant(variant)
        self.run = KINDS[self.variant.kind].make(self.model, self.variant, self.spec)
        self.step = TrainingStep(self.model, self.run, self.batch, self.spec.seed)
        self.step.prepare()
        start = time.perf_counter()
        loss = self.step.forward()
        loss.backward()
        self.step.synchronize()
        seconds = time.perf_counter() - start
        torch.save(self.step.gradients(), gradients)
        return {"seconds": seconds, "loss": float(loss.detach())}

    def warm(self, steps: int) -> dict[str, Any]:
        """Steps that nobody times."""
        for _ in range(steps):
            self.step.timed()
        self.step.model.zero_grad(set_to_none=True)
        return {}

    def memory(self) -> dict[str, Any]:
        """Bytes held after the forward and at the peak of one step."""
        held, peak = self.step.memory()
        self.step.model.zero_grad(set_to_none=True)
        return {"held_bytes": held, "peak_bytes": peak}

    def time(self, steps: int) -> dict[str, Any]:
        """Seconds of a step, the mean of `steps`."""
        seconds = sum(self.step.timed() for _ in range(steps)) / steps
        self.step.model.zero_grad(set_to_none=True)  # the others have their turn: leave them the memory
        return {"seconds": seconds}

    def figures(self) -> dict[str, Any]:
        """What the captured graphs tell, or for eager steps their FLOPs."""
        if self.variant.ours:
            records, report = fxckpt.graphs(self.run), fxckpt.explain(self.run)
            moved = fxckpt.stats(self.run)
            partition = sum(r.seconds.get("partition", 0.0) for r in records)
            return {
                "graphs": len(records),
                "saved_bytes": report.saved_bytes,
                "offloaded_bytes": report.offloaded_bytes,
                "transfers": moved.to_dict() if moved.offloads else None,
                "recomputed_flops": report.recomputed_flops,
                "pass_seconds": sum(sum(r.seconds.values()) for r in records) - partition,
                "partition_seconds": partition,
            }
        if self.variant.compiled:
            return {"graphs": captured_graphs()}
        try:
            return {"step_flops": self.step.flops()}
        except Exception:  # not every model runs under the counter, and nothing else depends on it
            traceback.print_exc()
            return {}


def machine_facts(device: str) -> dict[str, Any]:
    """What a benchmark's figures depend on beside the code."""
    packages: dict[str, str | None] = {}
    for name in ("torch", "transformers"):
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            packages[name] = None
    name = torch.cuda.get_device_name(device) if device != "cpu" else _processor()
    return {
        **packages,
        "fxckpt": fxckpt.__version__,
        "python": platform.python_version(),
        "device": f"{device}: {name}",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def serve(requests: Any, answers: Any) -> None:
    """Answer each line of `requests` on `answers` until there is none."""
    worker = Worker()
    for line in requests:
        request = json.loads(line)
        method: Callable[..., dict[str, Any]] = getattr(worker, request.pop("do"))
        try:
            answer: dict[str, Any] = {"ok": method(**request)}
        except Exception as error:
            traceback.print_exc()
            told = isinstance(error, FxckptError)
            text = " ".join(str(error).split())
            answer = {"error": text if told else f"{type(error).__name__}: {text}", "told": told}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def main() -> None:
    """Serve standard input; what models print goes to standard error, so that the answers stay readable."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing comes from a model hub
    serve(sys.stdin, answers)


if __name__ == "__main__":
    main()
