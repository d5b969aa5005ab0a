"""A place for activations that goes to the limit of what its interface allows, so that a wait that is missing shows.

On a CPU. What a copy reads is what lies in the memory when it runs: with `Late.RANDOM` on a background thread after a
random delay, with `Late.AT_THE_WAIT` only when it is waited for. Memory that has been freed by then reads as NaN; until
its copy has landed a destination holds NaN; and with `poison` an activation's memory holds NaN once it has been let go.
"""

from __future__ import annotations

import enum
import random
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from fxckpt.runtime import store
from fxckpt.runtime.stats import Account, Meter
from fxckpt.runtime.tier import Back, Stored, Tier, fill


class Late(enum.Enum):
    """When copies run."""

    RANDOM = "random"
    AT_THE_WAIT = "at the wait"


@dataclass
class HostileTier(Tier):
    """See the module's head.

    Attributes:
        seed: of the delays.
        late: when copies run.
        poison: whether an activation that has been let go is overwritten; true to the order of the graph's nodes only.
        longest: longest delay, in seconds.
        log: what was done, in order.
    """

    seed: int = 0
    late: Late = Late.RANDOM
    poison: bool = False
    longest: float = 0.002
    log: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._pool = ThreadPoolExecutor(2)

    def start(self, copy: Callable[[], None]) -> Callable[[], None]:
        """Have `copy` run some time; what is called to wait for it."""
        if self.late is Late.AT_THE_WAIT:
            return copy
        delay = self._random.choice([0.0, self._random.uniform(0, self.longest)])

        def run() -> None:
            time.sleep(delay)
            copy()

        future: Future[None] = self._pool.submit(run)
        return lambda: future.result()

    def offload(self, activation: torch.Tensor, account: Account) -> Stored:
        self.log.append(("offload", account.name))
        return _Stored(self, activation, account.name)

    def close(self) -> None:
        self._pool.shutdown()


class _Stored(Stored):
    def __init__(self, tier: HostileTier, activation: torch.Tensor, name: str) -> None:
        self.tier, self.name = tier, name
        self.host = spoiled(torch.empty_like(activation, memory_format=torch.contiguous_format))
        self._read = reader(activation)
        self._wait = tier.start(self._copy)

    def _copy(self) -> None:
        found = self._read()
        if found is not None:
            self.host.copy_(found)

    def wait(self) -> None:
        self._wait()
        self.tier.log.append(("wait_offload", self.name))
        found = self._read()
        if self.tier.poison and found is not None:
            spoiled(found)

    def reload(self, out: torch.Tensor) -> Back:
        self.tier.log.append(("reload", self.name))
        return _Back(self, out)


class _Back(Back):
    def __init__(self, stored: _Stored, out: torch.Tensor) -> None:
        self.out, self._stored = out, stored
        spoiled(out)
        self._wait = stored.tier.start(lambda: fill(out, stored.host))

    def wait(self) -> None:
        self._wait()
        self._stored.tier.log.append(("wait_reload", self._stored.name))


def reader(shown: torch.Tensor) -> Callable[[], torch.Tensor | None]:
    """What gives `shown` again as long as its memory is there, and does not keep it there."""
    storage = weakref.ref(shown.untyped_storage())
    dtype, offset, size, stride = shown.dtype, shown.storage_offset(), shown.size(), shown.stride()

    def read() -> torch.Tensor | None:
        alive = storage()
        return None if alive is None else torch.empty(0, dtype=dtype).set_(alive, offset, size, stride)

    return read


def spoiled(t: torch.Tensor) -> torch.Tensor:
    """`t`, now holding what nobody wants to compute with."""
    with torch.no_grad():
        return t.fill_(float("nan")) if t.is_floating_point() or t.is_complex() else t.fill_(1)


@contextmanager
def hostile(
    seed: int = 0, late: Late = Late.RANDOM, poison: bool = False, longest: float = 0.002
) -> Iterator[HostileTier]:
    """In this context all activations go to one such place."""
    tier = HostileTier(seed, late, poison, longest)

    def make(place: str, device: torch.device, meter: Meter) -> Tier:
        return tier

    try:
        with store.replaced(make):
            yield tier
    finally:
        tier.close()
