"""How long computing and copying take, at least, on a known device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from fxckpt import graph as G
from fxckpt.decide.cost import flops
from fxckpt.decide.device import DeviceSpec, find_device


@dataclass(frozen=True)
class Clock:
    """Seconds on one device, whose activations go to one place.

    Attributes:
        device: how fast it is.
        reload_rate: bytes per second of what comes back from the place.
    """

    device: DeviceSpec
    reload_rate: float

    def least_compute(self, node: fx.Node) -> float:
        """Seconds that `node` takes at least: its FLOPs at the device's best rate. 0.0 where either is unknown."""
        count = flops(node)
        rate = self.device.flops.get(_dtype_name(node)) if count else None
        if rate is None:
            return 0.0
        return count / rate / (2 if _is_causal(node) else 1)  # PyTorch counts what a causal kernel leaves out

    def reload(self, nbytes: int) -> float:
        """Seconds that `nbytes` need to come back."""
        return nbytes / self.reload_rate


def find_clock(device: torch.device, place: str) -> Clock | None:
    """The clock of `device` whose activations go to `place`, as transfer operators name it.

    None where a rate is not known, or where nothing is copied beside the computation (a CPU's own memory).
    """
    if place == "cpu" and device.type == "cpu":
        return None
    spec = find_device(device)
    if spec is None or not spec.flops:
        return None
    ways = [] if device.type == "cpu" else [spec.from_host]
    if place != "cpu":
        disk = spec.disk(place.removeprefix("disk:"))
        ways.append(disk.read if disk is not None else None)
    known = [way for way in ways if way is not None]
    return Clock(spec, min(known)) if len(known) == len(ways) else None


def _dtype_name(node: fx.Node) -> str:
    """The dtype of what `node` gives first, such as ``bfloat16``."""
    val = G.value(node)
    first = val[0] if isinstance(val, list | tuple) and val else val
    return str(first.dtype).removeprefix("torch.") if isinstance(first, torch.Tensor) else ""


def _is_causal(node: fx.Node) -> bool:
    """Whether `node` is attention of each token to those before it alone."""
    return isinstance(node.target, torch._ops.OpOverload) and G.argument(node, "is_causal") is True
