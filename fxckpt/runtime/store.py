"""What one transformed model has under way: where its activations go, and what that costs.

The operators of a graph find the store of the model that is being called; where a transformed model was compiled into
somebody else's function, nobody says which that is, and all such models share one store for each place.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch

from fxckpt.errors import TransferError, UnsupportedError
from fxckpt.runtime.cuda import CudaDiskTier, CudaTier
from fxckpt.runtime.disk import DiskTier
from fxckpt.runtime.host import HostTier
from fxckpt.runtime.stats import Account, Meter, TransferStats
from fxckpt.runtime.tier import Tier, fill, own_elements
from fxckpt.runtime.transfer import Gone, Like, Transfer, carry, make_handle, transfer_of
from fxckpt.torch_private import hooks_on_saved_tensors

MakeTier = Callable[[str, torch.device, Meter], Tier]
"""``make(place, device, meter)``: the tier for activations of a device that go to a place."""


class Store:
    """The transfers of one transformed model, and their tiers, which are made at the first need.

    Args:
        checksum: whether what comes back from a disk is compared with what went there.
        told: whether :meth:`begin_step` is called; else a step begins where no activation waits for its backward.
        prefetch: how many of the activations that earlier graphs sent last are on their way back while the backward of
            a graph runs that starts from an activation; within a graph its order says that.
    """

    def __init__(self, checksum: bool = False, told: bool = True, prefetch: int = 1) -> None:
        self._meter = Meter()
        self._prefetch = prefetch
        self._last: weakref.ref[Transfer] | None = None
        self._checksum = checksum
        self._told = told
        self._lock = threading.Lock()
        self._disks: dict[str, DiskTier] = {}
        self._tiers: dict[tuple[str, str], Tier] = {}
        self._given = Gone()
        _stores.add(self)

    def begin_step(self) -> None:
        """The model is called with gradients on: figures start anew."""
        self._meter.begin()

    def stats(self) -> TransferStats:
        """Figures of the last step."""
        return self._meter.read()

    def reserve(self, place: str, nbytes: int) -> None:
        """Make sure, before a step runs, that `nbytes` can be held at `place`, as far as that can be known.

        Raises:
            TransferError: the disk has no room for them, or the folder is not to be written to.
        """
        if place == "cpu" or _replacement is not None:
            return
        try:
            with self._lock:
                disk = self._disk(_folder(place))
            disk.reserve(nbytes)
        except OSError as error:
            raise TransferError(
                f"offload to disk: {_folder(place)} cannot take the {nbytes} bytes that a step offloads: {error}. Make "
                'room, or choose another folder, fxckpt.Offload(to="disk", dir=...), or a larger every_n.'
            ) from error

    def offload(
        self, activation: torch.Tensor, name: str, region: str, place: str, given: bool = False
    ) -> torch.Tensor:
        """Begin to move `activation` out; its handle.

        What is `given` by an earlier graph and went out from another graph already, as what a whole decoder reads does,
        does not go once more.
        """
        if hooks_on_saved_tensors():
            return carry(activation)
        gone = self._given.find(activation) if given else None
        if gone is not None:
            return make_handle(gone, activation)
        if not self._told and self._meter.idle():
            self.begin_step()
        own = own_elements(activation)
        nbytes = own.numel() * own.element_size()
        account = Account(name, nbytes, self._meter, self._meter.step)
        transfer = Transfer(region, account, Like.of(activation))
        tier = self._tier(place, own.device)
        with transfer.telling("offload"):
            transfer.stored = tier.offload(own, account)
        account.moved("offload")
        transfer.begin()
        if given:
            transfer.follows(self._last, self._prefetch if tier.overlaps else 0)
            self._given.add(activation, transfer)
        self._last = weakref.ref(transfer)
        return make_handle(transfer, activation)

    def _tier(self, place: str, device: torch.device) -> Tier:
        if _replacement is not None:
            return _replacement(place, device, self._meter)
        with self._lock:
            key = (place, device.type)
            if key not in self._tiers:
                self._tiers[key] = self._make_tier(place, device)
            return self._tiers[key]

    def _make_tier(self, place: str, device: torch.device) -> Tier:
        if device.type not in ("cpu", "cuda"):
            raise UnsupportedError(f"offload from a {device.type} device is not there yet: use offload=False.")
        if place == "cpu":
            return HostTier() if device.type == "cpu" else CudaTier(self._meter)
        disk = self._disk(_folder(place))
        return disk if device.type == "cpu" else CudaDiskTier(CudaTier(self._meter), disk)

    def _disk(self, folder: str) -> DiskTier:
        """With the lock held."""
        if folder not in self._disks:
            self._disks[folder] = DiskTier(folder, self._meter, self._checksum)
        return self._disks[folder]

    def after_fork(self) -> None:
        """In a child process, where a thread of the parent may have held a lock."""
        self._lock = threading.Lock()
        self._meter.after_fork()
        self._given = Gone()
        for disk in self._disks.values():
            disk.after_fork()


def wait_offload(handle: torch.Tensor) -> None:
    """Return when the activation may go from the device.

    Raises:
        TransferError: it was not copied.
    """
    transfer = transfer_of(handle)
    if transfer is None:
        return
    assert transfer.stored is not None
    with transfer.telling("offload"):
        transfer.stored.wait()
    transfer.end()


def reload(handle: torch.Tensor, device: torch.device, strides: Sequence[int]) -> torch.Tensor:
    """Begin to bring an activation back to `device`; it may be read after :func:`wait_reload`.

    Raises:
        TransferError: there is no memory for it.
    """
    transfer = transfer_of(handle)
    if transfer is None:
        out = empty(handle, device, strides)
        fill(out, handle)
        return out
    out = transfer.bring_back(_like(handle, device, strides))
    transfer.bring_ahead()
    return out


def empty(handle: torch.Tensor, device: torch.device, strides: Sequence[int]) -> torch.Tensor:
    """Memory on `device` for what `handle` stands for."""
    return _like(handle, device, strides).empty()


def _like(handle: torch.Tensor, device: torch.device, strides: Sequence[int]) -> Like:
    return Like(tuple(handle.size()), tuple(strides), handle.dtype, device)


def wait_reload(out: torch.Tensor, handle: torch.Tensor) -> None:
    """Return when `out`, which :func:`reload` gave for `handle`, may be read.

    Raises:
        TransferError: it was not copied.
    """
    transfer = transfer_of(handle)
    if transfer is None:
        return
    back = transfer.take(out)
    with transfer.telling("reload"):
        back.wait()


# --- which store -----------------------------------------------------------------------------------------------------

_stores: weakref.WeakSet[Store] = weakref.WeakSet()
_shared: dict[str, Store] = {}
_calling = threading.local()
_replacement: MakeTier | None = None


def _after_fork() -> None:
    for store in list(_stores):
        store.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@contextlib.contextmanager
def calling(store: Store) -> Iterator[None]:
    """In this context this thread calls the model of `store`."""
    before = getattr(_calling, "store", None)
    _calling.store = store
    try:
        yield
    finally:
        _calling.store = before


def is_called(store: Store) -> bool:
    """Whether this thread is in a call of the model of `store`."""
    return getattr(_calling, "store", None) is store


def current(place: str) -> Store:
    """The store of the model this thread is calling, or the one shared by models that others' functions call."""
    found: Store | None = getattr(_calling, "store", None)
    return found if found is not None else shared(place)


def shared(place: str) -> Store:
    """The store for models compiled into others' functions."""
    if place not in _shared:
        _shared.setdefault(place, Store(told=False))
    return _shared[place]


@contextlib.contextmanager
def replaced(make: MakeTier) -> Iterator[None]:
    """In this context activations go to tiers that `make` gives, in every thread: for tests of the graphs' order."""
    global _replacement
    before, _replacement = _replacement, make
    try:
        yield
    finally:
        _replacement = before


def _folder(place: str) -> str:
    return place.removeprefix("disk:")
