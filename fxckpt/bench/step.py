"""One training step of a variant: forward and backward, without an optimizer, and what is read from it.

Every step starts without gradients, from the same state of the random streams.
"""

from __future__ import annotations

import gc
import math
import random
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fxckpt.decide.cost import formulas_of_ours
from fxckpt.errors import SettingsError
from fxckpt.models.tasks import Batch
from fxckpt.torch_private import memory_after

FORWARD = "fxckpt.bench.forward"
"""Name of the profiler range around the forward."""
FLOOR = 1e-3
"""Gradients are compared relative to the parameter's largest, or to this fraction of the model's where that is more:
some gradients are zero but for rounding, such as those of the key biases of attention."""


class TrainingStep:
    """A variant's training step.

    Args:
        model: the original model, whose parameters get the gradients.
        run: the variant's forward.
        batch: keyword arguments for it.
        seed: of the random streams before each step.
    """

    def __init__(self, model: nn.Module, run: Callable[..., Any], batch: Batch, seed: int) -> None:
        self.model, self.run, self.batch, self.seed = model, run, batch, seed
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))

    def prepare(self) -> None:
        """Drop the gradients, collect garbage, seed the random streams."""
        self.model.zero_grad(set_to_none=True)
        gc.collect()
        random.seed(self.seed)
        torch.manual_seed(self.seed)
        if "numpy" in sys.modules:  # SpecAugment draws from numpy's stream
            sys.modules["numpy"].random.seed(self.seed)
        self.synchronize()

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def forward(self) -> torch.Tensor:
        """The loss. The model's other outputs are dropped here, as a training loop drops them."""
        return loss_of(self.run(**self.batch))

    def timed(self) -> float:
        """Seconds of one step."""
        self.prepare()
        start = time.perf_counter()
        self.forward().backward()
        self.synchronize()
        return time.perf_counter() - start

    def memory(self) -> tuple[int, int]:
        """Bytes on the device, relative to the start of a step: held after the forward, and at the peak.

        On CUDA from the caching allocator; on the CPU from the profiler's memory events, which see Inductor's buffers
        too. The gradients are in the peak.
        """
        self.prepare()
        if self.device.type == "cuda":
            base = torch.cuda.memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            loss = self.forward()
            held = torch.cuda.memory_allocated(self.device) - base
            loss.backward()
            self.synchronize()
            return held, torch.cuda.max_memory_allocated(self.device) - base
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
            with torch.profiler.record_function(FORWARD):
                loss = self.forward()
            loss.backward()
            del loss
        return memory_after(profile, FORWARD)

    def flops(self) -> int:
        """Floating point operations of one step that runs without compiled graphs; a multiply-add counts as two."""
        self.prepare()
        with FlopCounterMode(display=False, custom_mapping=formulas_of_ours()) as counter:
            self.forward().backward()
        return int(counter.get_total_flops())

    def gradients(self) -> dict[str, torch.Tensor]:
        """A copy of every gradient in host memory, by the parameter's name."""
        named = self.model.named_parameters()
        return {name: p.grad.detach().to("cpu", copy=True) for name, p in named if p.grad is not None}


def loss_of(output: Any) -> torch.Tensor:
    """The loss in what a model returns: ``.loss``, ``["loss"]``, the first of a sequence, or the output itself.

    Raises:
        SettingsError: there is none.
    """
    loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, Mapping):
        loss = output.get("loss")
    if loss is None and isinstance(output, tuple | list) and output:
        loss = output[0]
    if loss is None:
        loss = output
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise SettingsError(
            f"The model's output, a {type(output).__name__}, has no loss: it must be a scalar tensor, have it as .loss "
            "or as its first element. Are labels in the batch?"
        )
    return loss.squeeze() if loss.dim() else loss


def gradient_difference(
    found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], floor: float = FLOOR
) -> tuple[float, str]:
    """The largest relative difference of a parameter's gradient, and the parameter.

    It is ``max|g - w| / max|w|`` for each parameter; see ``FLOOR``. A missing gradient counts as zeros.
    """
    largest = max((float(w.abs().max()) for w in wanted.values() if w.numel()), default=0.0)
    worst, where = 0.0, ""
    for name in sorted(wanted.keys() | found.keys()):
        given = [side[name].double() for side in (found, wanted) if name in side]
        if not given[0].numel():
            continue
        difference = float((given[0] - given[1] if len(given) == 2 else given[0]).abs().max())
        scale = float(wanted[name].abs().max()) if name in wanted else 0.0
        relative = difference / max(scale, floor * largest) if difference else 0.0
        if math.isnan(relative):
            return relative, name
        if relative > worst:
            worst, where = relative, name
    return worst, where
