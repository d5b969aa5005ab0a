"""A disk for activations: background threads write and read one file, through a bounded staging memory."""

from __future__ import annotations

import copy
import ctypes
import errno
import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from fxckpt.runtime.file import Piece, SpillFile, Staging
from fxckpt.runtime.stats import Account, Held, Meter
from fxckpt.runtime.tier import Back, Stored, Tier, empty_packed, fill, is_packed, packed_strides

STAGING_BYTES = 2 << 20
"""For each direction; an activation passes through it piece by piece, since direct access asks for aligned memory."""


@dataclass(frozen=True)
class Outcome:
    """What a background thread did: seconds of copying, checksums of the pieces, and what went wrong."""

    seconds: float
    checksums: tuple[int, ...] = ()
    error: Exception | None = None

    def check(self) -> None:
        """Raise what went wrong.

        A copy of it: what is raised comes to hold the frames it passes through, these hold the graph's handles, and a
        handle this object.

        Raises:
            OSError, RuntimeError: something did.
        """
        if isinstance(self.error, OSError):
            raise copy.copy(self.error)
        if self.error is not None:
            raise RuntimeError(f"{type(self.error).__name__}: {self.error}")


@dataclass(frozen=True, eq=False)
class Lane:
    """What serves one direction: a thread, its staging memory, and what counts that."""

    pool: ThreadPoolExecutor
    staging: Staging
    held: Held


@dataclass(frozen=True, eq=False)
class Room:
    """Room taken for one activation: free again when nothing refers to this object, which a write under way does."""

    file: SpillFile
    piece: Piece
    held: Held


class DiskTier(Tier):
    """A file in `folder`.

    Args:
        folder: where the file is made, at the first need.
        meter: counts the staging memory and the room taken.
        checksum: compare what is read with what was written.
    """

    def __init__(self, folder: str, meter: Meter, checksum: bool = False) -> None:
        self.folder = folder
        self._meter = meter
        self._checksum = checksum
        self._start()

    def _start(self) -> None:
        self._lock = threading.Lock()
        self._file: SpillFile | None = None
        self._lanes: dict[str, Lane] = {}

    def reserve(self, nbytes: int) -> None:
        """Take room for `nbytes` from the disk now.

        Raises:
            OSError: it has not that much.
        """
        self._opened().reserve(nbytes)

    def offload(self, activation: torch.Tensor, account: Account) -> Stored:
        """Begin to write `activation` from where it lies; one with gaps is packed first."""
        packed = activation if is_packed(activation) else empty_packed(activation).copy_(activation)
        return self.send(packed, account)

    def send(self, packed: torch.Tensor, account: Account, ready: Callable[[], None] | None = None) -> OnDisk:
        """Begin to write host memory without gaps, once `ready`, called on the writing thread, has returned."""
        file = self._opened()
        room = Room(file, file.take(account.nbytes), self._meter.hold("disk", account.nbytes))
        lane = self._lane("write")
        box = [(room, packed)]  # emptied by the thread: they may go when the write is done, not when its future does
        written = lane.pool.submit(_write, box, account.nbytes, lane.staging, self._checksum, ready)
        return OnDisk(self, room, packed_strides(packed), account, written)

    def fetch(self, stored: OnDisk, packed: torch.Tensor, then: Callable[[], None] | None = None) -> Future[Outcome]:
        """Begin to read into host memory without gaps; `then` is called on the reading thread afterwards."""
        lane = self._lane("read")
        return lane.pool.submit(_read, [(stored, packed)], lane.staging, then)

    def _opened(self) -> SpillFile:
        with self._lock:
            if self._file is None:
                self._file = SpillFile(self.folder)
            return self._file

    def _lane(self, direction: str) -> Lane:
        with self._lock:
            if direction not in self._lanes:
                pool = ThreadPoolExecutor(1, f"fxckpt-disk-{direction}")
                self._lanes[direction] = Lane(pool, Staging(STAGING_BYTES), self._meter.hold("host", STAGING_BYTES))
            return self._lanes[direction]

    def after_fork(self) -> None:
        """In a child process: no threads, and no share in the parent's file."""
        self._start()


class OnDisk(Stored):
    """An activation in the file, or on its way there."""

    def __init__(
        self,
        tier: DiskTier,
        room: Room,
        strides: tuple[int, ...],
        account: Account,
        written: Future[Outcome],
    ) -> None:
        self.room, self.nbytes = room, account.nbytes
        self.written = written
        self._tier, self.strides = tier, strides
        self.account = account

    def wait(self) -> None:
        """Block until it is written: until then the thread reads the activation's own memory."""
        with self.account.timing("stall"):
            outcome = self.written.result()
        self.account.took("offload", outcome.seconds)
        outcome.check()

    def reload(self, out: torch.Tensor) -> Back:
        """Begin to read into `out`; where that has gaps, into other memory, and copy when that is waited for."""
        packed = out if out.stride() == self.strides else empty_packed(out, self.strides)
        return _Reading(self, out, packed, self._tier.fetch(self, packed))


class _Reading(Back):
    def __init__(self, stored: OnDisk, out: torch.Tensor, packed: torch.Tensor, read: Future[Outcome]) -> None:
        self.out = out
        self._stored, self._packed, self._read = stored, packed, read

    def wait(self) -> None:
        account = self._stored.account
        with account.timing("stall"):
            outcome = self._read.result()
            if outcome.error is None and self._packed is not self.out:
                fill(self.out, self._packed)
        account.took("reload", outcome.seconds)
        outcome.check()


def _write(
    box: list[tuple[Room, torch.Tensor]],
    nbytes: int,
    staging: Staging,
    checksum: bool,
    ready: Callable[[], None] | None,
) -> Outcome:
    room, packed = box.pop()
    start = time.perf_counter()
    checksums = []
    try:
        if ready is not None:
            ready()
            start = time.perf_counter()
        for at in range(0, nbytes, staging.nbytes):
            length = min(staging.nbytes, nbytes - at)
            ctypes.memmove(staging.address, packed.data_ptr() + at, length)
            if checksum:
                checksums.append(zlib.crc32(staging.memory[:length]))
            room.file.write(room.piece.offset + at, staging.blocks(length))
    except Exception as error:  # told where the computation waits
        return Outcome(time.perf_counter() - start, error=error.with_traceback(None))
    return Outcome(time.perf_counter() - start, tuple(checksums))


def _read(box: list[tuple[OnDisk, torch.Tensor]], staging: Staging, then: Callable[[], None] | None) -> Outcome:
    stored, packed = box.pop()
    room = stored.room
    start = time.perf_counter()
    try:
        written = stored.written.result()
        written.check()
        start = time.perf_counter()
        for number, at in enumerate(range(0, stored.nbytes, staging.nbytes)):
            length = min(staging.nbytes, stored.nbytes - at)
            room.file.read(room.piece.offset + at, staging.blocks(length))
            if written.checksums and zlib.crc32(staging.memory[:length]) != written.checksums[number]:
                raise OSError(errno.EIO, "what was read is not what was written (checksum)", room.file.folder)
            ctypes.memmove(packed.data_ptr() + at, staging.address, length)
        if then is not None:
            then()
    except Exception as error:
        return Outcome(time.perf_counter() - start, error=error.with_traceback(None))
    return Outcome(time.perf_counter() - start)
