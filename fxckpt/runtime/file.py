"""A file without a name: nobody else can open it, and it is gone when the process is, however that ends."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import tempfile
import threading
import weakref

BLOCK = 4096
"""Offsets and lengths are multiples of it, as direct access asks (bytes)."""


class Piece:
    """A part of a file, taken for as long as something refers to this object."""

    def __init__(self, offset: int, length: int) -> None:
        self.offset, self.length = offset, length


class SpillFile:
    """Room on a disk, taken piece by piece; any thread may call it.

    What is free is known from the pieces that live: a Ctrl-C between any two lines leaves none taken.

    The page cache is passed by where the file system allows it (``O_DIRECT``), and emptied behind us elsewhere: memory
    that holds what was offloaded would be memory not gained.

    Args:
        folder: where to make it.

    Raises:
        OSError: the folder is missing, or does not let us write.
    """

    _fd = -1  # nothing to close where opening fails

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._fd = _open_unnamed(folder)
        self._direct = _set_direct(self._fd, True)
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._taken: weakref.WeakSet[Piece] = weakref.WeakSet()
        self._size = 0

    @property
    def size(self) -> int:
        """Bytes the file takes on the disk."""
        return self._size

    def reserve(self, nbytes: int) -> None:
        """Let at least `nbytes` be free to take.

        Raises:
            OSError: the disk has no room for them.
        """
        with self._lock:
            missing = _rounded(nbytes) - sum(length for _, length in self._free())
            if missing > 0:
                self._grow(missing)

    def take(self, nbytes: int) -> Piece:
        """A piece of `nbytes` or a little more.

        Raises:
            OSError: the disk is full.
        """
        wanted = _rounded(nbytes)
        with self._lock:
            self._check_process()
            free = self._free()
            offset, length = min((f for f in free if f[1] >= wanted), key=lambda f: f[1], default=free[-1])
            if length < wanted:
                self._grow(wanted - length)
            piece = Piece(offset, wanted)
            self._taken.add(piece)
            return piece

    def _free(self) -> list[tuple[int, int]]:
        """Offset and length of what lies between the pieces taken, and of what is behind the last, maybe nothing."""
        free, at = [], 0
        for piece in sorted(self._taken, key=lambda piece: piece.offset):
            if piece.offset > at:
                free.append((at, piece.offset - at))
            at = max(at, piece.offset + piece.length)
        return [*free, (at, self._size - at)]

    def write(self, offset: int, memory: memoryview) -> None:
        """Write `memory`, whose length and address are multiples of a block.

        Raises:
            OSError: not everything was written.
        """
        self._check_process()
        done = 0
        while done < len(memory):
            done += self._checked(os.pwrite, memory[done:], offset + done)
        if not self._direct:
            os.fdatasync(self._fd)  # only what is on the disk leaves the page cache
            os.posix_fadvise(self._fd, offset, len(memory), os.POSIX_FADV_DONTNEED)

    def read(self, offset: int, memory: memoryview) -> None:
        """Fill `memory`, whose length and address are multiples of a block.

        Raises:
            OSError: not everything could be read.
        """
        self._check_process()
        done = 0
        while done < len(memory):
            done += self._checked(lambda fd, part, at: os.preadv(fd, [part], at), memory[done:], offset + done)
        if not self._direct:
            os.posix_fadvise(self._fd, offset, len(memory), os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Give the room back to the disk."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    __del__ = close

    def _checked(self, move: object, memory: memoryview, offset: int) -> int:
        try:
            done: int = move(self._fd, memory, offset)  # type: ignore[operator]
        except OSError as error:
            if error.errno != errno.EINVAL or not self._direct:
                raise
            self._direct = _set_direct(self._fd, False)  # the file system took the flag, and does not mean it
            done = move(self._fd, memory, offset)  # type: ignore[operator]
        if done <= 0:
            raise OSError(errno.EIO, f"{len(memory)} bytes at {offset} were not moved", self.folder)
        return done

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise OSError(errno.EBADF, "the file belongs to the process that this one was forked from", self.folder)

    def _grow(self, nbytes: int) -> None:
        os.posix_fallocate(self._fd, self._size, nbytes)
        self._size += nbytes


class Staging:
    """Memory between a file and what is written to it or read from it: page-aligned, of `nbytes` bytes."""

    def __init__(self, nbytes: int) -> None:
        self._map = mmap.mmap(-1, nbytes)
        self.memory = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.nbytes = nbytes

    def blocks(self, nbytes: int) -> memoryview:
        """The first `nbytes`, rounded up to whole blocks."""
        return self.memory[: _rounded(nbytes)]


def in_memory(folder: str) -> bool:
    """Whether files in `folder` lie in memory (tmpfs, ramfs), so that writing them frees none; False if unknown."""
    try:
        with open("/proc/self/mountinfo") as file:
            mounts = [line.split() for line in file]
    except OSError:
        return False
    path = os.path.realpath(folder)
    found = [m for m in mounts if os.path.commonpath([path, m[4]]) == m[4]]
    kind = max(found, key=lambda m: len(m[4]), default=None)
    return kind is not None and kind[kind.index("-") + 1] in ("tmpfs", "ramfs")


def _rounded(nbytes: int) -> int:
    return -(-nbytes // BLOCK) * BLOCK


def _open_unnamed(folder: str) -> int:
    if hasattr(os, "O_TMPFILE"):
        try:
            return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:  # a file system that cannot make a file without a name, or an old kernel
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                raise
    fd, path = tempfile.mkstemp(prefix="fxckpt-", dir=folder)
    os.unlink(path)
    return fd


def _set_direct(fd: int, wanted: bool) -> bool:
    """Whether the file is accessed past the page cache, after trying to have it so, or not so."""
    direct = getattr(os, "O_DIRECT", 0)
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | direct if wanted else flags & ~direct)
    except OSError:
        return not wanted
    return wanted and direct != 0
