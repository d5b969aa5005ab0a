"""Pinned host memory that is used again."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from fxckpt.runtime.stats import Held, Meter


@dataclass(eq=False)
class PinnedMemory:
    """Pinned memory, in use or kept.

    Attributes:
        memory: a one-dimensional uint8 tensor.
        held: counts it.
        busy: event after which the last copy from or to it is done, or None.
    """

    memory: torch.Tensor
    held: Held
    busy: Any = None

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.memory.nbytes


class Block:
    """Pinned memory in use; goes back to its pool when nothing refers to this object."""

    def __init__(self, pinned: PinnedMemory) -> None:
        self.pinned = pinned

    def shaped(self, like: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
        """The memory as a tensor of the shape and dtype of `like`."""
        return torch.empty(0, dtype=like.dtype).set_(self.pinned.memory.untyped_storage(), 0, like.size(), strides)


class PinnedPool:
    """Pinned memory for one transformed model.

    Pinning is slow, so that blocks are kept for the next step. Together, in use and kept, they never take more than was
    in use at once, or than the next block needs.
    """

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._lock = threading.Lock()
        self._kept: list[PinnedMemory] = []
        # Filled without the lock: the garbage collector may do that at any time, also while this thread holds it.
        self._returned: deque[PinnedMemory] = deque()
        self._in_use: weakref.WeakSet[Block] = weakref.WeakSet()
        self._most_used = 0

    def take(self, nbytes: int) -> Block:
        """A block of at least `nbytes`, of a kept one of up to twice the size if there is one.

        Raises:
            RuntimeError: no host memory.
        """
        wanted = max(nbytes, 1)
        with self._lock:
            while self._returned:
                self._kept.append(self._returned.popleft())
            fitting = [(one.nbytes, i) for i, one in enumerate(self._kept) if wanted <= one.nbytes <= 2 * wanted]
            pinned = self._kept.pop(min(fitting)[1]) if fitting else None
            if pinned is None:
                self._trim(wanted)
        if pinned is None:
            memory = torch.empty(wanted, dtype=torch.uint8, pin_memory=True)
            pinned = PinnedMemory(memory, self._meter.hold("host", memory.nbytes))
        block = Block(pinned)
        weakref.finalize(block, self._returned.append, pinned).atexit = False
        with self._lock:
            self._in_use.add(block)
            self._most_used = max(self._most_used, self._used())
        return block

    def _used(self) -> int:
        return sum(block.pinned.nbytes for block in self._in_use)

    def _trim(self, coming: int) -> None:
        """Let kept blocks go, the smallest first, until `coming` bytes more stay below the most ever in use."""
        used, kept = self._used(), sum(one.nbytes for one in self._kept)
        self._kept.sort(key=lambda one: -one.nbytes)
        while self._kept and used + kept + coming > max(self._most_used, used + coming):
            gone = self._kept.pop()
            if gone.busy is not None:
                gone.busy.synchronize()
            kept -= gone.nbytes
