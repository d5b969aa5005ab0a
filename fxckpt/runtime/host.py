"""Host memory for activations of a CPU model: plain copies, which save nothing there and keep the graph's form."""

from __future__ import annotations

import weakref

import torch

from fxckpt.runtime.tier import Back, Stored, Tier, fill, packed_strides
from fxckpt.runtime.transfer import Transfer


class HostTier(Tier):
    """Copies on the computing thread."""

    def offload(self, activation: torch.Tensor, transfer: Transfer) -> Stored:
        """Copy `activation`; there is nothing to wait for."""
        with transfer.meter.timing(transfer.step, "offload", "stall"):
            host = empty_packed(activation).copy_(activation)
        return _Copy(host, transfer)


def empty_packed(shown: torch.Tensor, pin: bool = False) -> torch.Tensor:
    """Host memory for the elements of `shown`, without gaps."""
    return torch.empty_strided(shown.size(), packed_strides(shown), dtype=shown.dtype, device="cpu", pin_memory=pin)


class _Copy(Stored):
    def __init__(self, host: torch.Tensor, transfer: Transfer) -> None:
        self._host = host
        self._meter, self._step = transfer.meter, transfer.step
        self._meter.rise("host", transfer.nbytes)
        weakref.finalize(self, self._meter.fall, "host", transfer.nbytes).atexit = False

    def wait(self) -> None:
        """Nothing is under way."""

    def reload(self, out: torch.Tensor) -> Back:
        with self._meter.timing(self._step, "reload", "stall"):
            fill(out, self._host)
        return _Done(out)


class _Done(Back):
    def __init__(self, out: torch.Tensor) -> None:
        self.out = out

    def wait(self) -> None:
        """Nothing is under way."""
