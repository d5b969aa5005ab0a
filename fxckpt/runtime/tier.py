"""What a place for activations has to offer.

A tier takes activations one by one. Both ways are begun and waited for apart, so that computation goes on between:

    stored = tier.offload(activation, account)    begins the copy; the activation is left unchanged until
    stored.wait()                                 returns: now its memory may go
    back = stored.reload(out)                     begins the copy back into `out`, once or more often
    back.wait()                                   returns: now `out` may be read

Each object keeps what its copy reads or writes alive until the copy is done, whatever becomes of the objects around it.
What an activation takes up in its place is free again when nothing refers to `stored` any more.
"""

from __future__ import annotations

import abc

import torch

from fxckpt.runtime.stats import Account


class Back(abc.ABC):
    """An activation on its way back."""

    out: torch.Tensor

    @abc.abstractmethod
    def wait(self) -> None:
        """Return when the computation that follows may read ``out``.

        Raises:
            OSError, RuntimeError: the copy failed; ``out`` holds no activation.
        """


class Stored(abc.ABC):
    """An activation in a tier, or on its way there."""

    @abc.abstractmethod
    def wait(self) -> None:
        """Return when the activation that was offloaded may be overwritten or freed by the computation that follows.

        Raises:
            OSError, RuntimeError: the copy failed.
        """

    @abc.abstractmethod
    def reload(self, out: torch.Tensor) -> Back:
        """Begin to copy the activation into `out`, of its shape and dtype on its device, in any strides."""


class Tier(abc.ABC):
    """A place for activations.

    Attributes:
        overlaps: whether copies run while the device computes, so that there is a point in beginning them early.
    """

    overlaps = True

    @abc.abstractmethod
    def offload(self, activation: torch.Tensor, account: Account) -> Stored:
        """Begin to copy `activation`, whose figures count in `account`.

        Raises:
            OSError, RuntimeError: there is no room.
        """


def packed_strides(shown: torch.Tensor) -> tuple[int, ...]:
    """Strides of a tensor of the same shape without gaps, in the same order of dimensions where `shown` has none."""
    return torch.empty_like(shown, device="meta", memory_format=torch.preserve_format).stride()


def empty_packed(shown: torch.Tensor, strides: tuple[int, ...] | None = None) -> torch.Tensor:
    """Host memory for the elements of `shown`, without gaps; in `strides` that have none, or in packed ones."""
    chosen = packed_strides(shown) if strides is None else strides
    return torch.empty_strided(shown.size(), chosen, dtype=shown.dtype, device="cpu")


def is_packed(shown: torch.Tensor) -> bool:
    """Whether the elements of `shown` are one run of memory."""
    return packed_strides(shown) == shown.stride()


def own_elements(shown: torch.Tensor) -> torch.Tensor:
    """A view of `shown` with each element once where it was expanded."""
    sizes = [1 if stride == 0 else size for size, stride in zip(shown.size(), shown.stride(), strict=True)]
    return shown if sizes == list(shown.size()) else shown.as_strided(sizes, shown.stride())


def fill(out: torch.Tensor, source: torch.Tensor) -> None:
    """Copy `source` into `out`, also where elements of `out` lie over each other (and so have equal values)."""
    reach = 1
    for stride, size in sorted(zip(out.stride(), out.size(), strict=True)):
        if size > 1 and stride < reach:
            break
        reach += (size - 1) * stride
    else:
        out.copy_(source, non_blocking=True)
        return
    length = 1 + sum((size - 1) * stride for size, stride in zip(out.size(), out.stride(), strict=True))
    places = torch.arange(length, device=out.device).as_strided(out.size(), out.stride())
    values = source.to(out.device, non_blocking=True)
    out.as_strided((length,), (1,)).scatter_(0, places.reshape(-1), values.reshape(-1))
