"""One activation's way out and back, and the handle that stands for it in a graph.

Between forward and backward a graph holds a *handle*: a CPU tensor with the activation's shape and dtype, so that sizes
which vary from step to step are known from it, over 32 bytes of memory, in which stands the transfer's number. The
memory belongs to a Python object that refers to the :class:`Transfer`. So a transfer lives exactly as long as the graph
holds its handle: through a second backward with ``retain_graph=True``, and no longer than a loss that is dropped.
"""

from __future__ import annotations

import array
import itertools
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from fxckpt.errors import FxckptError, TransferError
from fxckpt.runtime.stats import Account, Held
from fxckpt.runtime.tier import Back, Stored, own_elements

_numbers = itertools.count(1)


class Like(NamedTuple):
    """What memory a tensor needs."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Like:
        """What `tensor` needs."""
        return cls(tuple(tensor.size()), tensor.stride(), tensor.dtype, tensor.device)

    def empty(self) -> torch.Tensor:
        """Such memory, with nothing in it yet."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)


@dataclass(eq=False)
class Transfer:
    """One activation's way out and back.

    Attributes:
        region: the region that starts from the activation, such as ``layers.3``.
        account: where its figures count.
        like: the memory that it needs; None once it was asked for.
        stored: the activation in its tier, once it has been sent.
        in_flight: set while the device still has to keep the activation.
        backs: reloads begun and not yet waited for.
        before: where this is the activation that a graph was given, what earlier graphs sent last.
        prefetch: how many of these begin their way back with this one.
        ahead: the memory of a reload that was begun before a graph asked for it.
    """

    region: str
    account: Account
    like: Like | None
    stored: Stored | None = None
    in_flight: Held | None = None
    backs: list[Back] = field(default_factory=list)
    before: weakref.ref[Transfer] | None = None
    prefetch: int = 0
    ahead: torch.Tensor | None = None
    number: int = field(default_factory=lambda: next(_numbers))

    def begin(self) -> None:
        """The activation is on its way out."""
        self.account.meter.watch(self)
        self.in_flight = self.account.meter.hold("in_flight", self.account.nbytes)

    def end(self) -> None:
        """The device may let the activation go."""
        self.in_flight = None

    def bring_back(self, like: Like) -> torch.Tensor:
        """Begin to copy the activation into memory `like` that, unless it is on its way already: where it will be.

        Raises:
            TransferError: the copy cannot be begun.
        """
        ahead, self.ahead, self.like = self.ahead, None, None
        if ahead is not None and Like.of(ahead) == like:
            return ahead
        if ahead is not None:
            self.take(ahead)
        assert self.stored is not None
        with self.telling("reload"):
            out = like.empty()
            self.backs.append(self.stored.reload(own_elements(out)))
        self.account.moved("reload")
        return out

    def take(self, out: torch.Tensor) -> Back:
        """The reload into `out`, which is no longer one not waited for."""
        where = out.untyped_storage().data_ptr()  # unique among these, which keep their memory
        back, *_ = [b for b in self.backs if b.out.untyped_storage().data_ptr() == where]
        self.backs.remove(back)
        return back

    def follows(self, last: weakref.ref[Transfer] | None, prefetch: int) -> None:
        """This is the activation that a graph was given, and `last` is what was sent before it."""
        found = None if last is None else last()
        if found is not None and found.account.step == self.account.step:
            self.before, self.prefetch = last, prefetch

    def bring_ahead(self) -> None:
        """Begin the reloads of earlier graphs, whose backwards come next."""
        found: Transfer | None = self
        for _ in range(self.prefetch):
            found = None if found is None or found.before is None else found.before()
            if found is not None and found.like is not None:  # else it came back before
                found.ahead = found.bring_back(found.like)

    @contextmanager
    def telling(self, verb: str) -> Iterator[None]:
        """What fails in this context is told as a :class:`TransferError` that names transfer, region and bytes."""
        try:
            yield
        except FxckptError:
            raise
        except (OSError, RuntimeError, MemoryError) as error:
            where = f" (region {self.region})" if self.region else ""
            raise TransferError(
                f"{verb} of {self.account.name}{where}, {self.account.nbytes} bytes, failed: {str(error).rstrip('.')}. "
                "The step has no result. Make room, or use offload=False, a larger every_n, a smaller batch, or "
                'another folder, fxckpt.Offload(to="disk", dir=...).'
            ) from error


_live: weakref.WeakValueDictionary[int, Transfer] = weakref.WeakValueDictionary()
_MARK = 0x66786B_7074  # "fxkpt"


class _Memory(array.array):  # type: ignore[type-arg]
    """The memory of a handle."""

    transfer: Transfer


def make_handle(transfer: Transfer, activation: torch.Tensor) -> torch.Tensor:
    """A handle of `transfer`, which it keeps alive, in the shape of `activation`."""
    # The elements have all bits set, which no computation gives.
    memory = _Memory("q", (-1, -1, transfer.number, _MARK))
    memory.transfer = transfer
    _live[transfer.number] = transfer
    storage = torch.frombuffer(memory, dtype=torch.int64).untyped_storage()
    return torch.empty(0, dtype=activation.dtype).set_(storage, 0, activation.size(), (0,) * activation.dim())


def transfer_of(handle: torch.Tensor) -> Transfer | None:
    """The transfer that `handle` stands for; None where `handle` is the activation itself (:func:`carry`).

    Raises:
        TransferError: `handle` is a copy of a handle's elements, or its transfer is over.
    """
    storage = handle.untyped_storage()
    if storage.nbytes() == 32:
        _, _, number, mark = torch.empty(0, dtype=torch.int64).set_(storage, 0, (4,), (1,)).tolist()
        found = _live.get(number) if mark == _MARK else None
        if found is not None:
            return found
    if handle.numel() and bool((handle.flatten()[:1].view(torch.uint8) == 255).all()):
        raise TransferError(
            "An offloaded activation was asked for by a copy of its handle. Something copied what autograd saves, "
            "without being a hook on saved tensors around the call of the model. Use either that or offload=."
        )
    return None


class Gone:
    """Transfers by the activation that went out, for as long as both are there and the activation is unchanged.

    An activation is known by its memory, and that by a weak reference: another one may come to lie at its address.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[tuple[Any, ...], tuple[StorageWeakRef, weakref.ref[Transfer]]] = {}

    def find(self, activation: torch.Tensor) -> Transfer | None:
        """The transfer of `activation`, if it has gone out already."""
        with self._lock:
            storage, transfer = self._found.get(_identity(activation), (None, None))
        return None if storage is None or transfer is None or storage.expired() else transfer()

    def add(self, activation: torch.Tensor, transfer: Transfer) -> None:
        """`activation` goes out."""
        with self._lock:
            self._found = {k: v for k, v in self._found.items() if not v[0].expired() and v[1]() is not None}
            self._found[_identity(activation)] = StorageWeakRef(activation.untyped_storage()), weakref.ref(transfer)


def _identity(activation: torch.Tensor) -> tuple[Any, ...]:
    where = activation.untyped_storage().data_ptr(), activation.storage_offset(), activation.device
    return (*where, activation.dtype, tuple(activation.size()), activation.stride(), activation._version)


def carry(activation: torch.Tensor) -> torch.Tensor:
    """In place of a handle a copy of `activation` in host memory: for hooks on saved tensors, which keep copies."""
    return torch.empty_like(activation, device="cpu", memory_format=torch.contiguous_format).copy_(activation)
