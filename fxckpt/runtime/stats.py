"""What transfers moved, how long that took, and how much was held: figures of a step."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

Direction = Literal["offload", "reload"]
Level = Literal["in_flight", "host", "disk"]


@dataclass(frozen=True)
class TransferStats:
    """Transfers of the last step: of one call of the model, and of the backward that belongs to it.

    Attributes:
        offloads: activations that left the device.
        reloads: activations that came back.
        offloaded_bytes: their bytes on the way out.
        reloaded_bytes: their bytes on the way back.
        offload_seconds: time copying out; of copies at the same time, the sum.
        reload_seconds: time copying back.
        stall_seconds: time the computation waited for a copy, either way.
        in_flight_bytes: the most device memory held at once by activations on their way out.
        host_bytes: the most host memory held at once: copies that stay there, and staging on the way to a disk.
        disk_bytes: the most room taken at once in a file.
    """

    offloads: int = 0
    reloads: int = 0
    offloaded_bytes: int = 0
    reloaded_bytes: int = 0
    offload_seconds: float = 0.0
    reload_seconds: float = 0.0
    stall_seconds: float = 0.0
    in_flight_bytes: int = 0
    host_bytes: int = 0
    disk_bytes: int = 0

    def to_dict(self) -> dict[str, int | float]:
        """All figures by name, for JSON."""
        return dataclasses.asdict(self)


@dataclass(eq=False)
class Step:
    """Figures of a step while it runs; kept by :class:`Meter`."""

    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("offload", "reload"), 0))
    nbytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("offload", "reload"), 0))
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("offload", "reload", "stall"), 0.0))
    peaks: dict[str, int] = field(default_factory=dict)
    timed: list[tuple[str, Any, Any]] = field(default_factory=list)
    """On a GPU, what ``seconds`` counts, and the events recorded before and after it."""


class Held:
    """Bytes held at a level, for as long as something refers to this object."""

    __slots__ = ("__weakref__", "level", "nbytes")

    def __init__(self, level: Level, nbytes: int) -> None:
        self.level, self.nbytes = level, nbytes


class Meter:
    """Counts for one transformed model; any thread may call it.

    What is held is known from the objects that live, not by adding and subtracting: a Ctrl-C, which may come between
    any two lines, cannot part the one from the other.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # what is collected as garbage meanwhile may end a transfer
        self._held: weakref.WeakSet[Held] = weakref.WeakSet()
        self._transfers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.step = Step(peaks=self.levels())

    def begin(self) -> None:
        """A new step begins; what is still under way goes on counting for its own."""
        with self._lock:
            self.step = Step(peaks=self.levels())

    def levels(self) -> dict[str, int]:
        """Bytes held now, by level."""
        levels = dict.fromkeys(("in_flight", "host", "disk"), 0)
        with self._lock:
            for held in self._held:
                levels[held.level] += held.nbytes
        return levels

    def hold(self, level: Level, nbytes: int) -> Held:
        """So many bytes more are held, until the object returned is gone."""
        with self._lock:
            held = Held(level, nbytes)
            self._held.add(held)
            self.step.peaks[level] = max(self.step.peaks[level], self.levels()[level])
            return held

    def watch(self, transfer: object) -> None:
        """A transfer has a handle now; it is over when `transfer` is gone."""
        with self._lock:
            self._transfers.add(transfer)

    def idle(self) -> bool:
        """Whether no activation waits for its backward."""
        with self._lock:
            return not len(self._transfers)

    def moved(self, step: Step, direction: Direction, nbytes: int) -> None:
        """A transfer begins."""
        with self._lock:
            step.counts[direction] += 1
            step.nbytes[direction] += nbytes

    def took(self, step: Step, what: Direction | Literal["stall"], seconds: float) -> None:
        """Copying, or waiting for a copy, took so long."""
        with self._lock:
            step.seconds[what] += seconds

    def timed(self, step: Step, what: Direction | Literal["stall"], start: Any, end: Any) -> None:
        """The same between two events of a GPU, which are read when somebody asks."""
        with self._lock:
            step.timed.append((what, start, end))

    def read(self) -> TransferStats:
        """The figures of the step now running, or the last one."""
        with self._lock:
            step, seconds = self.step, dict(self.step.seconds)
            timed = list(step.timed)
        for what, start, end in timed:
            end.synchronize()
            seconds[what] += start.elapsed_time(end) / 1000
        return TransferStats(
            step.counts["offload"],
            step.counts["reload"],
            step.nbytes["offload"],
            step.nbytes["reload"],
            seconds["offload"],
            seconds["reload"],
            seconds["stall"],
            step.peaks["in_flight"],
            step.peaks["host"],
            step.peaks["disk"],
        )

    def after_fork(self) -> None:
        """In a child process, where a thread of the parent may have held the lock."""
        self._lock = threading.RLock()


@dataclass(frozen=True, eq=False)
class Account:
    """Where the figures of one transfer count. It refers to no transfer, so that what a tier keeps of one may hold it.

    Attributes:
        name: the transfer's.
        nbytes: bytes of the activation's elements.
        meter: what counts.
        step: the step that it counts for.
    """

    name: str
    nbytes: int
    meter: Meter
    step: Step

    def moved(self, direction: Direction) -> None:
        """The transfer begins."""
        self.meter.moved(self.step, direction, self.nbytes)

    def took(self, what: Direction | Literal["stall"], seconds: float) -> None:
        """Copying, or waiting for a copy, took so long."""
        self.meter.took(self.step, what, seconds)

    @contextlib.contextmanager
    def timing(self, *what: Direction | Literal["stall"]) -> Iterator[None]:
        """What runs in this context counts as each of `what`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            for one in what:
                self.took(one, time.perf_counter() - start)

    def timed(self, what: Direction | Literal["stall"], start: Any, end: Any) -> None:
        """The same between two events of a GPU, which are read when somebody asks."""
        self.meter.timed(self.step, what, start, end)
