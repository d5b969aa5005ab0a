"""A training step as a row of nodes, or of kernels: what is in memory while each runs, and for how long it does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fxckpt import graph as G
from fxckpt.decide.kernels import StepSchedules, simulate_kernels
from fxckpt.decide.memory import simulate
from fxckpt.decide.seconds import Pace
from fxckpt.errors import CaptureError
from fxckpt.predict.capture import CapturedStep
from fxckpt.predict.fold import Fold, index_in, shifted
from fxckpt.record import GraphRecord, current_records, step_graphs
from fxckpt.torch_private import Schedule


@dataclass(frozen=True)
class Steps:
    """The nodes of a training step, or its kernels, in the order they run in, forwards first.

    Attributes:
        levels: bytes in memory while each runs, beside parameters and the batch.
        modules: the module whose work each is; empty where unknown.
        backward: how many of the steps come before the backward begins.
        seconds: how long each runs; None where that is not known.
    """

    levels: list[int]
    modules: list[str]
    backward: int
    seconds: list[float] | None = None

    @property
    def peak_bytes(self) -> int:
        """The most bytes in memory at once."""
        return max(self.levels, default=0)


def read_steps(step: CapturedStep, pace: Pace | None = None, *, one_memory: bool = True) -> Steps:
    """The steps of a captured training step: its kernels where Inductor compiles it, else its nodes.

    Args:
        step: its graphs.
        pace: seconds on the device that it is to run on, where known.
        one_memory: whether host copies lie in the device's memory, as a CPU's do.
    """
    records = current_records(step.records)
    if step.schedules is not None:
        return _kernels(records, step.schedules, pace, one_memory)
    return _nodes(records, pace, one_memory)


def _nodes(records: Sequence[GraphRecord], pace: Pace | None, one_memory: bool) -> Steps:
    graphs = [r.forward.graph for r in records] + [r.backward.graph for r in reversed(records)]
    levels: list[int] = []
    modules: list[str] = []
    seconds: list[float | None] = []
    forward = 0
    pairs = [step_graphs(record, one_memory) for record in records]
    for timeline, graph in zip(simulate(pairs), graphs, strict=True):
        nodes = [n for n in graph.nodes if n.op != "output"]
        inputs = len(G.placeholders(graph))  # one step together: nothing runs, and their order says nothing
        levels += [max(timeline.totals[:inputs], default=0), *timeline.totals[inputs:]]
        work = zip(nodes[inputs:], timeline.modules[inputs:], strict=True)
        modules += ["", *("" if G.is_transfer(n) else module for n, module in work)]
        seconds += [0.0, *(None if pace is None else pace.of_node(n) for n in nodes[inputs:])]
        forward += 0 if timeline.is_backward else len(nodes) - inputs + 1
    return Steps(levels, modules, forward, _all_known(seconds))


def _kernels(
    records: Sequence[GraphRecord], schedules: Sequence[Schedule], pace: Pace | None, one_memory: bool
) -> Steps:
    pairs = with_schedules(records, schedules, one_memory)
    steps = Steps([], [], 0)
    seconds: list[float | None] = []
    graphs = [pair.forward for pair in pairs] + [pair.backward for pair in reversed(pairs)]
    for timeline, schedule in zip(simulate_kernels(pairs), graphs, strict=True):
        transfers = [any(map(G.is_transfer, kernel.nodes)) for kernel in schedule.kernels]
        modules = ["" if moves else m for moves, m in zip(transfers, timeline.modules, strict=True)]
        backward = steps.backward + (0 if timeline.is_backward else len(modules))
        steps = Steps([*steps.levels, *timeline.totals], [*steps.modules, *modules], backward)
        seconds += [None] * len(modules) if pace is None else _seconds(schedule, pace)
    return replace(steps, seconds=_all_known(seconds))


def _seconds(schedule: Schedule, pace: Pace) -> list[float | None]:
    allocated: dict[int, list[int]] = {}
    for value in schedule.values:
        if not (value.is_input or value.is_reserve or value.is_heir):
            allocated.setdefault(value.first, []).append(value.nbytes)
    found = []
    for i, kernel in enumerate(schedule.kernels):
        seconds = pace.of_kernel(kernel)
        found.append(None if seconds is None else seconds + pace.new(allocated.get(i, [])))
    return found


def with_schedules(
    records: Sequence[GraphRecord], schedules: Sequence[Schedule], one_memory: bool = True
) -> list[StepSchedules]:
    """The graphs of `records`, each with what Inductor makes of it.

    Raises:
        CaptureError: Inductor did not compile all of them.
    """
    compiled = {(s.compile_id, s.is_backward): s for s in schedules}
    pairs = []
    for record in records:
        both = [compiled.get((record.frame.compile_id, is_backward)) for is_backward in (False, True)]
        if both[0] is None or both[1] is None:
            raise CaptureError(
                f"fxckpt: Inductor has not compiled both graphs of {record.frame.function}. Plan with compiled=False, "
                "which tells the bytes saved and offloaded all the same."
            )
        pairs.append(StepSchedules(step_graphs(record, one_memory), both[0], both[1]))
    return pairs


def _all_known(seconds: Sequence[float | None]) -> list[float] | None:
    known = [s for s in seconds if s is not None]
    return known if len(known) == len(seconds) else None


def repeat(steps: Steps, fold: Fold) -> Steps | None:
    """The steps with those of the periods that were left out; None where two periods in the middle differ."""
    middle = fold.lead + (fold.block + 1) * fold.period  # forwards reach it from below, backwards from above
    for forward in (False, True):  # from the back, so that positions in front stay
        part = range(steps.backward) if forward else range(steps.backward, len(steps.modules))
        numbers = [index_in(fold, steps.modules[i]) for i in part]
        start, stop = (
            part.start + _cut(numbers, bound, forward)
            for bound in ((middle - fold.period, middle) if forward else (middle + fold.period, middle))
        )
        again = _repeat_once(steps, range(start, stop), fold.left_out)
        if again is None:
            return None
        steps = replace(again, modules=_renamed(steps, range(start, stop), fold, forward))
    return steps


def _renamed(steps: Steps, block: range, fold: Fold, forward: bool) -> list[str]:
    """The modules of a step in which the stretch `block` is repeated, by their paths in the whole model."""
    whole, beyond = fold.left_out * fold.period, fold.layers.stop
    passed = range(steps.backward) if forward else range(steps.backward, len(steps.modules))

    def name(i: int) -> str:
        module = steps.modules[i]
        number = index_in(fold, module) if i in passed else None
        return module if number is None or number < beyond else shifted(fold, module, whole)

    names = [name(i) for i in range(len(steps.modules))]
    times = [(t + 1 if forward else fold.left_out - 1 - t) * fold.period for t in range(fold.left_out)]
    again = [shifted(fold, steps.modules[i], layers) for layers in times for i in block]
    return names[: block.stop] + again + names[block.stop :]


def _cut(numbers: Sequence[int | None], bound: int, forward: bool) -> int:
    """The step before which layers below `bound` have run, and not the others; in a backward the other way round.

    The one that puts the fewest steps on the wrong side: a few are scheduled with other layers.
    """
    wrong = sum(1 for n in numbers if n is not None and (n < bound) is forward)
    best, cut = wrong, 0
    for i, number in enumerate(numbers):
        if number is not None:
            wrong += -1 if (number < bound) is forward else 1
        if wrong < best:
            best, cut = wrong, i + 1
    return cut


def _repeat_once(steps: Steps, block: range, times: int) -> Steps | None:
    levels = steps.levels
    after = range(block.stop, block.stop + len(block))
    if not block or after.stop > (steps.backward if block.stop <= steps.backward else len(levels)):
        return None
    growth = levels[after.start] - levels[block.start]
    if any(levels[b] - levels[a] != growth for a, b in zip(block, after, strict=True)):
        return None
    inserted = [levels[i] + growth * (t + 1) for t in range(times) for i in block]
    end, seconds = block.stop, steps.seconds
    if seconds is not None:
        seconds = seconds[:end] + [seconds[i] for i in block] * times + seconds[end:]
    return replace(
        steps,
        levels=levels[:end] + inserted + [level + growth * times for level in levels[end:]],
        backward=steps.backward + (times * len(block) if end <= steps.backward else 0),
        seconds=seconds,
    )
