"""What is in memory at each kernel of a compiled training step, from the schedules that Inductor makes of its graphs.

The account of a graph's own values is Inductor's. What graphs of one step hold for each other is counted as
:func:`~fxckpt.decide.memory.simulate` counts it for graphs that run node by node.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from fxckpt import graph as G
from fxckpt.decide.memory import (
    OF_PARAMETERS,
    OTHER,
    RECOMPUTED,
    SAVED,
    ForwardStorages,
    GraphTimeline,
    StepGraphs,
    Value,
    copy_nbytes,
    module_path,
    value_of,
    workspaces,
)
from fxckpt.torch_private import Kernel, Schedule, ScheduledValue


@dataclass(frozen=True)
class StepSchedules:
    """A forward graph and its backward graph, with the schedules of both."""

    graphs: StepGraphs
    forward: Schedule
    backward: Schedule


def kernel_module(kernel: Kernel) -> str:
    """Path of the module whose work a kernel is; empty where unknown."""
    return next((m for node in reversed(kernel.nodes) if (m := module_path(node))), "")


def read_schedule(schedule: Schedule) -> GraphTimeline:
    """The memory of one graph by itself: what its kernels make, and the inputs that they free."""
    values = [_value(v, schedule.is_backward, True) for v in schedule.values]
    return _timeline(schedule, values + _workspaces(schedule))


def simulate_kernels(steps: Sequence[StepSchedules]) -> list[GraphTimeline]:
    """The memory of a compiled training step: forwards in order, then backwards in reverse order.

    Args:
        steps: the step's pairs of graphs, in the order they are captured in.

    Returns:
        A timeline for each graph, in the order they run in.
    """
    forwards = [ForwardStorages(one.graphs) for one in steps]
    held = [one.held_bytes for one in forwards]
    found = [_forward(steps[i], forwards[i], sum(held[:i])) for i in range(len(steps))]
    gradients = 0
    for i in reversed(range(len(steps))):
        timeline = _backward(steps[i], forwards[i], sum(held[:i]) + gradients)
        gradients += sum(v.nbytes for v in timeline.values if v.kind == OF_PARAMETERS)
        found.append(timeline)
    return found


def _forward(step: StepSchedules, forward: ForwardStorages, around: int) -> GraphTimeline:
    # What is kept in reserve here is not periodic, and Inductor keeps it as long as the graph's peak is not lifted.
    values = [_value(v, False, forward.one_memory) for v in step.forward.values if not v.is_input and not v.is_reserve]
    end, saved = len(step.forward.kernels) - 1, set(forward.saved.values())
    for storage in forward.lifetimes:
        if storage[0].op == "placeholder":  # the result of an earlier graph
            kind = SAVED if storage in saved else OTHER
            values.append(value_of(storage, forward.nbytes(storage), kind, 0, end))
    values += _workspaces(step.forward) if forward.one_memory else []
    return _timeline(step.forward, values, around)


def _backward(step: StepSchedules, forward: ForwardStorages, around: int) -> GraphTimeline:
    schedule, end = step.backward, len(step.backward.kernels) - 1
    given = zip(G.placeholders(step.graphs.forward), schedule.outputs, strict=False)
    of_activations = {output for node, output in given if node.name in step.graphs.activations}
    values = []
    lasts = dict(schedule.last_reads)
    for made in schedule.values:
        if made.is_input:
            lasts[made.name] = made.last
        else:
            value = _value(made, True, forward.one_memory)
            values.append(replace(value, kind=OTHER) if made.name in of_activations else value)
    last_read: dict[G.Storage, int] = {}
    for node in G.placeholders(step.graphs.backward):
        last = end if node.name in schedule.outputs else lasts.get(node.name, 0)
        if node.name in forward.saved:  # several may be views of one storage
            source = forward.saved[node.name]
            last_read[source] = max(last_read.get(source, -1), last)
        elif G.is_tangent(node):
            values.append(value_of((node, None), G.nbytes(node), OTHER, 0, last))
    for source, last in last_read.items():
        if source in forward.lifetimes:
            values.append(value_of(source, forward.nbytes(source), SAVED, 0, last))
    values += _workspaces(schedule) if forward.one_memory else []
    return _timeline(schedule, values, around)


def _workspaces(schedule: Schedule) -> list[Value]:
    """What called operators need inside themselves."""
    kernels = enumerate(schedule.kernels)
    return workspaces((i, kernel.nodes[-1]) for i, kernel in kernels if kernel.called and kernel.nodes)


def _timeline(schedule: Schedule, values: Iterable[Value], around: int = 0) -> GraphTimeline:
    modules = tuple(map(kernel_module, schedule.kernels))
    return GraphTimeline(
        schedule.is_backward, modules, tuple(v for v in values if v.nbytes and v.last >= v.first), around
    )


def _value(value: ScheduledValue, is_backward: bool, one_memory: bool) -> Value:
    node = value.nodes[-1] if value.nodes else None
    if (value.is_input and node is not None and not G.is_tangent(node)) or (value.is_output and not is_backward):
        kind = SAVED
    elif value.is_output:
        kind = OF_PARAMETERS
    elif is_backward and node is not None and G.must_recompute(node):
        kind = RECOMPUTED
    else:
        kind = OTHER
    if node is None:
        return Value(value.name, kind, value.nbytes, "", "", value.first, value.last)
    nbytes = value.nbytes
    if G.is_offload(node):
        nbytes = copy_nbytes(node) if one_memory else 0
    return Value(node.name, kind, nbytes, module_path(node), G.source_line(node), value.first, value.last)
