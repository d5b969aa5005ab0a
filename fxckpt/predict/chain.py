"""A training step, captured once for each treatment of its layers, as the chain that a budget is kept on.

Each capture treats all layers alike. What a layer holds and needs under a treatment is read from the levels of that
capture; that layers of different treatments hold the sum of what each does alone, is an assumption, which a capture of
the treatments that were chosen then tests.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median_low

import numpy as np

from fxckpt.decide.budget import Chain, Choice, Link
from fxckpt.predict.steps import Steps

_MIXED = 0.1
"""Two layers of which more than this share of steps run among the other's are decided together."""

_NEAR = 0.15
"""Layers of one kind that differ by up to this share, of what the way that needs the most does, are equal."""


@dataclass(frozen=True)
class Order:
    """The layers of a step in the order of their forwards; those that run among each other are one group."""

    groups: tuple[tuple[str, ...], ...]

    def cuts(self, modules: Sequence[str], backward: bool) -> list[int]:
        """Where each group begins among the steps of a forward, or of a backward, and where the last one ends.

        Args:
            modules: for each step the module whose work it is.
            backward: whether it is a backward, which groups run through in reverse order.
        """
        numbers = _numbers(modules, self.groups)
        count = len(self.groups)
        if backward:
            numbers = np.where(numbers < 0, -1, count - 1 - numbers)
        work = np.flatnonzero(numbers >= 0)
        if not len(work):
            return [0] * (count + 1)
        inner = [_cut(numbers, k)[0] for k in range(1, count)]
        return list(np.maximum.accumulate([int(work[0]), *inner, int(work[-1]) + 1]))


def find_order(steps: Steps, layers: Collection[str]) -> Order:
    """The order of those of `layers` that have steps."""
    modules = steps.modules[: steps.backward]
    groups: list[tuple[str, ...]] = [(layer,) for layer in layers]
    while True:
        numbers = _numbers(modules, groups)
        places = {i: float(np.median(np.flatnonzero(numbers == i))) for i in range(len(groups)) if (numbers == i).any()}
        ordered = [groups[i] for i in sorted(places, key=places.__getitem__)]
        mixed = next((k for k in range(1, len(ordered)) if _runs_mixed(modules, ordered[k - 1 : k + 1])), None)
        if mixed is None:
            return Order(tuple(ordered))
        groups = [*ordered[: mixed - 1], ordered[mixed - 1] + ordered[mixed], *ordered[mixed + 1 :]]


def _runs_mixed(modules: Sequence[str], pair: Sequence[tuple[str, ...]]) -> bool:
    numbers = _numbers(modules, pair)
    smaller = min(int((numbers == 0).sum()), int((numbers == 1).sum()))
    return _cut(numbers, 1)[1] > _MIXED * smaller


def _numbers(modules: Sequence[str], groups: Sequence[tuple[str, ...]]) -> np.ndarray:
    """The group that each step belongs to, -1 for none."""
    owner = {layer: i for i, group in enumerate(groups) for layer in group}
    known: dict[str, int] = {}

    def number(module: str) -> int:
        if module not in known:
            parts = module.split(".") if module else []
            above = (".".join(parts[:i]) for i in range(len(parts), -1, -1))
            known[module] = next((owner[name] for name in above if name in owner), -1)
        return known[module]

    return np.array([number(module) if module else -1 for module in modules], dtype=int)


def _cut(numbers: np.ndarray, k: int) -> tuple[int, int]:
    """The step before which groups below `k` have run, and not the others; and how many steps are on its wrong side."""
    change = np.where(numbers < 0, 0, np.where(numbers < k, -1, 1))
    wrong = int(((numbers >= 0) & (numbers < k)).sum()) + np.concatenate([[0], np.cumsum(change)])
    best = int(np.argmin(wrong))
    return best, int(wrong[best])


def read_chain(order: Order, ways: Sequence[Steps], kinds: Mapping[str, Hashable]) -> Chain:
    """The chain of a step that was captured in several `ways`, one for each choice.

    In front of the layers and behind them stands a link without a choice, which needs the most that any way does.

    Args:
        order: the groups of layers.
        ways: the step in each way.
        kinds: for each layer what kind it is. Layers of one kind that need almost the same are taken to need the same:
            what they differ by comes from where they are cut, and from the kernels that reach over a cut.
    """
    measured = [_needs(order, steps) for steps in ways]
    of_kind: dict[Hashable, list[int]] = {}
    for i, group in enumerate(order.groups):
        of_kind.setdefault(tuple(kinds.get(layer) for layer in group), []).append(i + 1)
    for members in of_kind.values():
        _level(measured, members)
    names = ["before the layers", *(_name(group) for group in order.groups), "after the layers"]
    links = []
    for i, name in enumerate(names):
        choices = [needs[i] for needs in measured]
        if i in (0, len(names) - 1):
            choices = [_most(choices)]
        links.append(Link(name, i, tuple(choices)))
    return Chain(tuple(links))


def _level(measured: Sequence[list[Choice]], members: Sequence[int]) -> None:
    """Give the links `members`, in each way, what the middle one needs, unless one needs something else indeed."""
    for what in ("held", "forward", "backward", "cost"):
        middle = [median_low(getattr(needs[i], what) for i in members) for needs in measured]
        near = _NEAR * max(map(abs, middle))
        for needs, usual in zip(measured, middle, strict=True):
            for i in members:
                if abs(getattr(needs[i], what) - usual) <= near:
                    needs[i] = replace(needs[i], **{what: usual})


def _name(group: Sequence[str]) -> str:
    return group[0] if len(group) == 1 else f"{group[0]} to {group[-1]}"


def _most(choices: Sequence[Choice]) -> Choice:
    return Choice(
        max(c.held for c in choices),
        max(c.forward for c in choices),
        max(c.backward for c in choices),
        max(c.cost for c in choices),
    )


def _needs(order: Order, steps: Steps) -> list[Choice]:
    """What each stretch of the step needs: before the layers, each group, and after the layers."""
    end, levels = steps.backward, steps.levels
    seconds = steps.seconds or [0.0] * len(levels)
    forward = [0, *order.cuts(steps.modules[:end], False), end]
    backward = [end + i for i in (0, *order.cuts(steps.modules[end:], True), len(levels) - end)][::-1]
    found = []
    held = 0
    for (start, stop), (last, first) in zip(pairwise(forward), pairwise(backward), strict=True):
        now = 0 if start == 0 else levels[min(start, end - 1)]
        after = levels[stop] if stop < end else now
        there = range(start, stop), range(first, last)
        found.append(
            Choice(
                held=after - held,
                forward=max((levels[i] for i in there[0]), default=now) - held,
                backward=max((levels[i] for i in there[1]), default=now) - held,
                cost=sum(seconds[i] for part in there for i in part),
            )
        )
        held = after
    return found
