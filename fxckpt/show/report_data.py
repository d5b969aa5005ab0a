"""A training step's memory in the form that the page of a plan draws it: the largest values, and sums of the rest.

A deep model's step has ten thousand nodes. The page has a column for some of them: of each stretch of nodes the one
with the most bytes, so that the peak is there. At each column the bytes are exact, by kind and by layer.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

from fxckpt.decide.memory import KINDS, OF_PARAMETERS, SAVED, GraphTimeline, Value

COLUMNS = 800
"""At most so many columns, and one for each graph."""
VALUES = 1000
"""So many values can be pointed at: those that cover the most of the picture."""


@dataclass(frozen=True)
class Span:
    """A value over the whole step.

    Attributes:
        value: the value.
        first: the step that makes it, counted over all graphs.
        last: the step after which it is free.
    """

    value: Value
    first: int
    last: int


def begun_at_once(timeline: GraphTimeline, inputs: int) -> GraphTimeline:
    """The timeline with its first `inputs` steps, at which the graph's inputs come, as one: nothing runs meanwhile."""
    if inputs < 2:
        return timeline
    most = max(range(inputs), key=timeline.totals.__getitem__)
    found = []
    for value in timeline.values:
        if value.last >= inputs or value.first <= most <= value.last:
            is_there = value.first <= most
            first = max(value.first - inputs + 1, 0 if is_there else 1)
            found.append(replace(value, first=first, last=max(value.last - inputs + 1, 0)))
    return replace(timeline, modules=("", *timeline.modules[inputs:]), values=tuple(found))


def spans(timelines: Sequence[GraphTimeline]) -> list[Span]:
    """Every value once: what is saved from its making to its last use, a parameter's gradient to the end of the step.

    Args:
        timelines: those of a step, forwards in order, then backwards in reverse order.
    """
    starts = [0, *accumulate(len(t.modules) for t in timelines)]
    end, found = starts[-1] - 1, []
    reads: dict[tuple[int, str], Span] = {}
    for i, timeline in reversed(list(enumerate(timelines))):
        for value in timeline.values:
            first, last = starts[i] + value.first, starts[i] + value.last
            if timeline.is_backward:
                span = Span(value, first, end if value.kind == OF_PARAMETERS else last)
                if value.kind == SAVED and value.first == 0:
                    reads[len(timelines) - 1 - i, value.name] = span  # of the forward that this backward belongs to
                else:
                    found.append(span)
            else:
                read = reads.pop((i, value.name), None) if value.kind == SAVED else None
                found.append(Span(value, first, last if read is None else read.last))
    return [*found, *reads.values()]


def columns(timelines: Sequence[GraphTimeline]) -> tuple[list[int], list[int]]:
    """For each column the first step of its stretch, and the step of it that has the most bytes."""
    totals = [n for t in timelines for n in t.totals]
    width, offset = -(-len(totals) // COLUMNS), 0
    starts: list[int] = []
    for timeline in timelines:
        starts += range(offset, offset + len(timeline.modules), width)
        offset += len(timeline.modules)
    stretches = (range(a, b) for a, b in pairwise([*starts, offset]))
    return starts, [max(stretch, key=totals.__getitem__) for stretch in stretches]


def run_data(
    timelines: Sequence[GraphTimeline], layers: Mapping[str, str], offloaded: Collection[str] = ()
) -> dict[str, Any]:
    """What the page draws of one way to run the step.

    Args:
        timelines: those of the step, forwards in order, then backwards in reverse order.
        layers: what becomes of each boundary layer, by its name.
        offloaded: names of values that are offloaded, of their copies, and of what comes back.

    Returns:
        Lists and dicts for JSON. Bytes over the columns are differences to the column before; texts are numbers in
        ``texts``; ``layers[0]`` is what lies in no layer.
    """
    alive, totals = spans(timelines), [n for t in timelines for n in t.totals]
    modules = [m for t in timelines for m in t.modules]
    starts, at = columns(timelines)
    names, texts, layer_of = ["", *layers], _Texts(), _layer_of(layers)
    by_kind = _bytes_at(at, KINDS, alive, lambda value: value.kind)
    by_layer = _bytes_at(at, names, alive, lambda value: layer_of(value.module))
    for c, step in enumerate(at):  # what other graphs hold and no value of theirs accounts for
        beside = totals[step] - sum(found[c] for found in by_kind)
        by_kind[KINDS.index(SAVED)][c] += beside
        by_layer[0][c] += beside
    places = [(s, bisect_left(at, s.first), bisect_right(at, s.last) - 1) for s in alive]
    shown = sorted((p for p in places if p[1] <= p[2]), key=lambda p: -p[0].value.nbytes * (p[2] - p[1] + 1))[:VALUES]
    return {
        "steps": len(totals),
        "forward": sum(len(t.modules) for t in timelines if not t.is_backward),
        "starts": starts,
        "at": at,
        "modules": [texts(modules[step]) for step in at],
        "kinds": [_deltas(b) for b in by_kind],
        "layers": [
            {"name": name, "treatment": layers.get(name, ""), "bytes": _deltas(b)}
            for name, b in zip(names, by_layer, strict=True)
        ],
        "values": [
            [
                texts(s.value.name),
                s.value.nbytes,
                KINDS.index(s.value.kind),
                names.index(layer_of(s.value.module)),
                texts(s.value.module),
                texts(s.value.source),
                first,
                last,
                int(s.value.name in offloaded),
            ]
            for s, first, last in shown
        ],
        "texts": texts.all,
    }


class _Texts:
    """Gives texts numbers, equal ones the same."""

    def __init__(self) -> None:
        self.all: list[str] = []
        self._numbers: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        if text not in self._numbers:
            self._numbers[text] = len(self.all)
            self.all.append(text)
        return self._numbers[text]


def _layer_of(layers: Collection[str]) -> Callable[[str], str]:
    """A function from a module's path to the innermost boundary layer it lies in; empty where in none."""

    @cache
    def find(path: str) -> str:
        return path if not path or path in layers else find(path.rpartition(".")[0])

    return find


def _bytes_at(
    at: Sequence[int], groups: Sequence[str], alive: Iterable[Span], group_of: Callable[[Value], str]
) -> list[list[int]]:
    """For each group the bytes of its values at each of the steps `at`."""
    found = {group: [0] * (len(at) + 1) for group in groups}
    for span in alive:
        changes = found[group_of(span.value)]
        changes[bisect_left(at, span.first)] += span.value.nbytes
        changes[bisect_right(at, span.last)] -= span.value.nbytes
    return [list(accumulate(changes[:-1])) for changes in found.values()]


def _deltas(numbers: Sequence[int]) -> list[int]:
    return [b - a for a, b in pairwise([0, *numbers])]
