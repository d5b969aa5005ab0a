"""Pinned host memory that is used again."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import Any

import torch

from fxckpt.runtime.stats import Meter


class Block:
    """Pinned memory; goes back to its pool when nothing refers to this object.

    Attributes:
        memory: a one-dimensional uint8 tensor.
        read: event after which the last copy from it is done, or None.
    """

    def __init__(self, memory: torch.Tensor, read: Any) -> None:
        self.memory = memory
        self.read = read

    def shaped(self, like: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
        """The memory as a tensor of the shape and dtype of `like`."""
        return torch.empty(0, dtype=like.dtype).set_(self.memory.untyped_storage(), 0, like.size(), strides)


class PinnedPool:
    """Pinned memory for one transformed model.

    Pinning is slow, so that blocks are kept for the next step. Together, in use and kept, they never take more than was
    in use at once, or than the next block needs.
    """

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._lock = threading.Lock()
        self._kept: list[tuple[torch.Tensor, Any]] = []
        # Filled without the lock: the garbage collector may do that at any time, also while this thread holds it.
        self._returned: deque[tuple[torch.Tensor, Any]] = deque()
        self._used = 0
        self._most_used = 0

    def take(self, nbytes: int) -> Block:
        """A block of at least `nbytes`, of a kept one of up to twice the size if there is one.

        Raises:
            RuntimeError: no host memory.
        """
        wanted = max(nbytes, 1)
        with self._lock:
            self._collect()
            fitting = [(m.nbytes, i) for i, (m, _) in enumerate(self._kept) if wanted <= m.nbytes <= 2 * wanted]
            memory, read = self._kept.pop(min(fitting)[1]) if fitting else (None, None)
            if memory is None:
                self._trim(wanted)
        if memory is None:
            memory = torch.empty(wanted, dtype=torch.uint8, pin_memory=True)
            self._meter.rise("host", memory.nbytes)
        with self._lock:
            self._used += memory.nbytes
            self._most_used = max(self._most_used, self._used)
        block = Block(memory, read)
        weakref.finalize(block, self._give_back, memory, lambda held=block.__dict__: held.get("read")).atexit = False
        return block

    def _give_back(self, memory: torch.Tensor, read: Any) -> None:
        self._returned.append((memory, read()))

    def _collect(self) -> None:
        while self._returned:
            memory, read = self._returned.popleft()
            self._used -= memory.nbytes
            self._kept.append((memory, read))

    def _trim(self, coming: int) -> None:
        """Let kept blocks go, the smallest first, until `coming` bytes more stay below the most ever in use."""
        kept = sum(m.nbytes for m, _ in self._kept)
        self._kept.sort(key=lambda one: -one[0].nbytes)
        while self._kept and self._used + kept + coming > max(self._most_used, self._used + coming):
            memory, read = self._kept.pop()
            if read is not None:
                read.synchronize()
            kept -= memory.nbytes
            self._meter.fall("host", memory.nbytes)
