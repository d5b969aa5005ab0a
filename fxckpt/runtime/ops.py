"""The operators of rewritten graphs: ``torch.ops.fxckpt.offload``, ``reload`` and ``after``.

Transfers, one pair for each boundary activation::

    forward:   host   = fxckpt.offload(activation, name)            # the activation's memory is free after its last use
    backward:  device = fxckpt.reload(host, device, name)           # right before the first use

Rules: a host tensor is read by its reload only. From a CUDA device the host tensor is pinned and both copies run on the
stream that computes, so that they are ordered with what writes and reads the activation; the pinned memory comes from
PyTorch's caching host allocator, which reuses a block only after the copies that read or write it are done. On a CPU
the copy is a plain one: it saves no memory there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fxckpt.errors import TransferError

_library = torch.library.Library("fxckpt", "FRAGMENT")
_library.define("boundary(Tensor activation) -> Tensor")  # stands in graphs being rewritten, and is never run
_library.define("after(Tensor(a!) value, Tensor[] first) -> ()")
_library.define("offload(Tensor activation, str name) -> Tensor")
_library.define("reload(Tensor host, Device device, str name, SymInt[]? stride=None) -> Tensor")


def _host_like(activation: torch.Tensor, pin: bool) -> torch.Tensor:
    # The activation's own elements only, in its own order of dimensions where it is dense.
    layout = torch.empty_like(activation, device="meta", memory_format=torch.preserve_format)
    return torch.empty_strided(layout.size(), layout.stride(), dtype=activation.dtype, device="cpu", pin_memory=pin)


def _offload(activation: torch.Tensor, name: str) -> torch.Tensor:
    try:
        host = _host_like(activation, pin=activation.is_cuda)
    except RuntimeError as error:
        raise TransferError(
            f"offload of {name}: no host memory for {activation.numel() * activation.element_size()} bytes. "
            "Use offload=False, a larger every_n, or a smaller batch."
        ) from error
    return host.copy_(activation, non_blocking=activation.is_cuda)


def _reload(host: torch.Tensor, device: torch.device, name: str, stride: Sequence[int] | None = None) -> torch.Tensor:
    if stride is None:
        made = torch.empty_strided(host.size(), host.stride(), dtype=host.dtype, device=device)
    else:
        made = torch.empty_strided(host.size(), stride, dtype=host.dtype, device=device)
    return made.copy_(host, non_blocking=made.is_cuda)


def _after(value: torch.Tensor, first: Sequence[torch.Tensor]) -> None:
    """Order the compiler's schedule (``rewrite/schedule.py``); nothing is done or changed."""


def _offload_fake(activation: torch.Tensor, name: str) -> torch.Tensor:
    layout = torch.empty_like(activation, memory_format=torch.preserve_format)
    return torch.empty_strided(layout.size(), layout.stride(), dtype=activation.dtype, device="cpu")


def _reload_fake(
    host: torch.Tensor, device: torch.device, name: str, stride: Sequence[int] | None = None
) -> torch.Tensor:
    chosen = host.stride() if stride is None else stride
    return torch.empty_strided(host.size(), chosen, dtype=host.dtype, device=device)


_library.impl("after", _after, "CompositeExplicitAutograd")
_library.impl("offload", _offload, "CompositeExplicitAutograd")
_library.impl("reload", _reload, "CompositeExplicitAutograd")
torch.library.register_fake("fxckpt::boundary", torch.empty_like, lib=_library)
torch.library.register_fake("fxckpt::after", _after, lib=_library)
torch.library.register_fake("fxckpt::offload", _offload_fake, lib=_library)
torch.library.register_fake("fxckpt::reload", _reload_fake, lib=_library)
