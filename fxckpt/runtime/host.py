"""Host memory for activations of a CPU model: plain copies, which save nothing there and keep the graph's form."""

from __future__ import annotations

import torch

from fxckpt.runtime.stats import Account
from fxckpt.runtime.tier import Back, Stored, Tier, empty_packed, fill


class HostTier(Tier):
    """Copies on the computing thread."""

    overlaps = False

    def offload(self, activation: torch.Tensor, account: Account) -> Stored:
        """Copy `activation`; there is nothing to wait for."""
        with account.timing("offload", "stall"):
            host = empty_packed(activation).copy_(activation)
        return _Copy(host, account)


class _Copy(Stored):
    def __init__(self, host: torch.Tensor, account: Account) -> None:
        self._host = host
        self._account = account
        self._held = account.meter.hold("host", account.nbytes)

    def wait(self) -> None:
        """Nothing is under way."""

    def reload(self, out: torch.Tensor) -> Back:
        with self._account.timing("reload", "stall"):
            fill(out, self._host)
        return _Done(out)


class _Done(Back):
    def __init__(self, out: torch.Tensor) -> None:
        self.out = out

    def wait(self) -> None:
        """Nothing is under way."""
