"""Pinned host memory for activations of a CUDA device, copied beside the computation.

Each device has two streams, one a direction, so that a reload need not wait for an offload. Order is held by events:
a copy starts when what was enqueued before it is done, and what is enqueued after a wait starts when the copy is done.
Memory is allocated and freed on the computing stream alone: by the wait, its next user is ordered behind the copy.
Hence no ``record_stream``, under which memory is free only when the CPU comes to see that an event has passed.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from typing import Any

import torch

from fxckpt.errors import UnsupportedError
from fxckpt.runtime.disk import DiskTier, OnDisk
from fxckpt.runtime.pool import Block, PinnedPool
from fxckpt.runtime.stats import Account, Direction, Meter
from fxckpt.runtime.tier import Back, Stored, Tier, fill, packed_strides

NO_CUDA_GRAPHS = (
    "fxckpt: offload cannot be captured in a CUDA graph: a replay would not know whose activation it moves. "
    'Use torch.compile(t, mode="max-autotune-no-cudagraphs"), or offload=False.'
)
_STAGED = 4
"""Blocks of pinned memory between the devices and a disk, at most, in each direction."""


class CudaTier(Tier):
    """Pinned host memory."""

    def __init__(self, meter: Meter) -> None:
        self.pool = PinnedPool(meter)
        self._lock = threading.Lock()
        self._streams: dict[tuple[int, Direction], torch.cuda.Stream] = {}

    def stream(self, device: torch.device, direction: Direction) -> torch.cuda.Stream:
        """The stream for copies of one direction from or to `device`."""
        assert device.index is not None
        with self._lock:
            if (device.index, direction) not in self._streams:
                self._streams[device.index, direction] = torch.cuda.Stream(device)
            return self._streams[device.index, direction]

    def offload(self, activation: torch.Tensor, account: Account) -> Pinned:
        """Begin to copy `activation`."""
        _refuse_capture()
        block = self.pool.take(account.nbytes)
        host = block.shaped(activation, packed_strides(activation))
        stream = self.stream(activation.device, "offload")
        if block.pinned.busy is not None:
            stream.wait_event(block.pinned.busy)
        done = block.pinned.busy = _copy(stream, host, activation, account, "offload")
        return Pinned(self, block, host, activation.device, done, account)

    def fetch(self, block: Block, host: torch.Tensor, out: torch.Tensor, start: Any, account: Account) -> Any:
        """Begin to copy `host`, which lies in `block`, into `out`, not before event `start`; the event of its end."""
        stream = self.stream(out.device, "reload")
        stream.wait_event(start)
        done = block.pinned.busy = _copy(stream, out, host, account, "reload", ordered=True)
        return done


class Pinned(Stored):
    """An activation in pinned memory, or on its way there."""

    def __init__(
        self,
        tier: CudaTier,
        block: Block,
        host: torch.Tensor,
        device: torch.device,
        done: Any,
        account: Account,
    ) -> None:
        self.host, self.block, self.done = host, block, done
        self._tier, self._device, self._account = tier, device, account

    def wait(self) -> None:
        """Let the computing stream wait; the CPU goes on."""
        _wait(self.done, self._device, self._account)

    def synchronize(self) -> None:
        """Let the CPU wait until the copy is done. Who holds this method holds the block."""
        self.done.synchronize()

    def reload(self, out: torch.Tensor) -> Back:
        """Begin to copy into `out`, behind what the computing stream has been given."""
        _refuse_capture()
        start = torch.cuda.current_stream(out.device).record_event()
        self._tier.stream(out.device, "reload").wait_event(self.done)
        done = self._tier.fetch(self.block, self.host, out, start, self._account)
        return _Coming(self, out, done, self._account)


class _Coming(Back):
    """A copy to the device that has been enqueued."""

    def __init__(self, stored: Stored, out: torch.Tensor, done: Any, account: Account) -> None:
        self.out = out
        self._stored, self._done, self._account, self._waited = stored, done, account, False

    def wait(self) -> None:
        self._waited = True
        _wait(self._done, self.out.device, self._account)

    def __del__(self) -> None:
        if not self._waited:  # given up: the memory of `out` is free only when nothing writes to it any more
            self._done.synchronize()


class CudaDiskTier(Tier):
    """A disk behind a CUDA device: through pinned memory, of which only so much is used at once.

    The device's memory is free when a copy has reached pinned memory; the write to the disk goes on by itself.
    """

    def __init__(self, cuda: CudaTier, disk: DiskTier) -> None:
        self._cuda, self._disk = cuda, disk
        self._writes: deque[Future[Any]] = deque()
        self._reads: deque[Future[Any]] = deque()

    def offload(self, activation: torch.Tensor, account: Account) -> Stored:
        """Begin to copy `activation` to pinned memory, from where it is written."""
        with account.timing("stall"):
            _bounded(self._writes)
        pinned = self._cuda.offload(activation, account)
        on_disk = self._disk.send(pinned.host, account, ready=pinned.synchronize)
        self._writes.append(on_disk.written)
        return _Staged(self, pinned.done, on_disk, activation.device, account)

    def fetch(self, stored: _Staged, out: torch.Tensor, account: Account) -> tuple[Future[Any], list[Any]]:
        """Begin to read into pinned memory and on into `out`; where the event of the end will be, once read."""
        with account.timing("stall"):
            _bounded(self._reads)
        block = self._cuda.pool.take(account.nbytes)
        host = block.shaped(out, stored.strides)
        start = torch.cuda.current_stream(out.device).record_event()
        end: list[Any] = []

        def on() -> None:
            end.append(self._cuda.fetch(block, host, out, start, account))

        if block.pinned.busy is not None:
            block.pinned.busy.synchronize()
        read = self._disk.fetch(stored.on_disk, host, then=on)
        self._reads.append(read)
        return read, end


class _Staged(Stored):
    def __init__(
        self, tier: CudaDiskTier, copied: Any, on_disk: OnDisk, device: torch.device, account: Account
    ) -> None:
        self.on_disk, self.strides = on_disk, on_disk.strides
        self._tier, self._copied, self._device, self._account = tier, copied, device, account

    def wait(self) -> None:
        _wait(self._copied, self._device, self._account)

    def reload(self, out: torch.Tensor) -> Back:
        read, end = self._tier.fetch(self, out, self._account)
        return _Reading(self, out, read, end, self._account)


class _Reading(Back):
    def __init__(self, stored: Stored, out: torch.Tensor, read: Future[Any], end: list[Any], account: Account) -> None:
        self.out = out
        self._stored, self._read, self._end, self._account, self._waited = stored, read, end, account, False

    def wait(self) -> None:
        with self._account.timing("stall"):
            outcome = self._read.result()
        outcome.check()
        self._waited = True
        _wait(self._end[0], self.out.device, self._account)

    def __del__(self) -> None:
        for event in () if self._waited else self._end:  # given up
            event.synchronize()


def _copy(
    stream: torch.cuda.Stream,
    target: torch.Tensor,
    source: torch.Tensor,
    account: Account,
    direction: Direction,
    ordered: bool = False,
) -> Any:
    """Copy on `stream`, behind what the computing stream has been given unless `ordered` already; the end's event."""
    if not ordered:
        stream.wait_stream(torch.cuda.current_stream(stream.device))
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(stream):
        begin.record(stream)
        fill(target, source)
        end.record(stream)
    account.timed(direction, begin, end)
    return end


def _wait(done: Any, device: torch.device, account: Account) -> None:
    """Let the computing stream of `device` wait for event `done`, and measure for how long it does."""
    stream = torch.cuda.current_stream(device)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record(stream)
    stream.wait_event(done)
    end.record(stream)
    account.timed("stall", begin, end)


def _bounded(under_way: deque[Future[Any]]) -> None:
    """Block until fewer than the allowed number are under way."""
    while under_way and (under_way[0].done() or len(under_way) >= _STAGED):
        under_way.popleft().result()


def _refuse_capture() -> None:
    if torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(NO_CUDA_GRAPHS)
