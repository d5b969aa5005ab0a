"""The operators of rewritten graphs, ``torch.ops.fxckpt``: four nodes for each boundary activation that is offloaded.

    forward:   handle = offload(activation, ...)            begins the copy to the place
               wait_offload(handle, activation)             the activation's memory is free from here on
               return ..., handle
    backward:  device = reload(handle, ...)                 begins the copy back
               wait_reload(device, handle)                  ``device`` may be read from here on

Rules, which the passes keep (``rewrite/offload.py``, ``rewrite/overlap.py``) and the verifier checks:

* A handle is read by its own three other nodes only, and is the only thing that is saved for backward.
* Nothing reads the activation, or what shares its memory, behind its ``wait_offload``. (A compiler may move a reader
  behind it: that reads what is still there, and the memory goes after it. To claim that the wait changes the activation
  would forbid this, and with it the fusion of what makes an activation with what reads it.)
* Nothing but ``wait_reload`` reads ``device`` before it: that claims to fill it, so every reader comes behind.
* ``first``, in each of them, is not looked at. It is there to be read: what makes it comes before, in any order that a
  compiler may choose. ``after(value, first)`` does nothing else: whoever reads ``value`` behind it comes after `first`.
  So a copy is begun and waited for where the graph says, and not all at its beginning or all at its end.

What happens when they run is the tiers' business (``runtime/tier.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fxckpt.runtime import store

_library = torch.library.Library("fxckpt", "FRAGMENT")
_library.define("boundary(Tensor activation) -> Tensor")  # stands in graphs being rewritten, and is never run
_library.define("after(Tensor(a!) value, Tensor[] first) -> ()")
_library.define("offload(Tensor activation, str name, str region, str place, bool given, Tensor[] first) -> Tensor")
_library.define("wait_offload(Tensor(a!) handle, Tensor activation, Tensor[] first) -> ()")
_library.define(
    "reload(Tensor handle, Device device, str name, int[]? order, SymInt[]? stride, Tensor[] first) -> Tensor"
)
_library.define("wait_reload(Tensor(a!) device, Tensor handle, Tensor[] first) -> ()")


def _offload(
    activation: torch.Tensor, name: str, region: str, place: str, given: bool, first: Sequence[torch.Tensor]
) -> torch.Tensor:
    return store.current(place).offload(activation, name, region, place, given)


def _offload_fake(activation: torch.Tensor, *rest: Any) -> torch.Tensor:
    return torch.empty_strided(activation.size(), [0] * activation.dim(), dtype=activation.dtype, device="cpu")


def _wait_offload(handle: torch.Tensor, activation: torch.Tensor, first: Sequence[torch.Tensor]) -> None:
    store.wait_offload(handle)


def _reload_with(make: Callable[[torch.Tensor, torch.device, Sequence[int]], torch.Tensor]) -> Callable[..., Any]:
    """The operator, `make` giving the tensor for a handle, a device and strides."""

    def reload(
        handle: torch.Tensor,
        device: torch.device,
        name: str,
        order: Sequence[int] | None,
        stride: Sequence[int] | None,
        first: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        return make(handle, device, _strides(handle, order, stride))

    return reload


def _wait_reload(device: torch.Tensor, handle: torch.Tensor, first: Sequence[torch.Tensor]) -> None:
    store.wait_reload(device, handle)


def _nothing(*args: Any) -> None:
    """Waits need no values to be traced, and ``after`` none to run: it orders a compiler's schedule."""


def _strides(handle: torch.Tensor, order: Sequence[int] | None, stride: Sequence[int] | None) -> list[int]:
    """`stride` if given, else strides without gaps, the dimension `order` names last being the innermost."""
    if stride is not None:
        return list(stride)
    made = [1] * handle.dim()
    step = 1
    for dim in reversed(range(handle.dim()) if order is None else order):
        made[dim] = step
        step = step * max(handle.size(dim), 1) if isinstance(handle.size(dim), int) else step * handle.size(dim)
    return made


for _name, _run, _fake in (
    ("after", _nothing, _nothing),
    ("offload", _offload, _offload_fake),
    ("wait_offload", _wait_offload, _nothing),
    ("reload", _reload_with(store.reload), _reload_with(store.empty)),
    ("wait_reload", _wait_reload, _nothing),
):
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fxckpt::{_name}", _fake, lib=_library)
torch.library.register_fake("fxckpt::boundary", torch.empty_like, lib=_library)
