"""Inductor's schedule of a compiled graph: its steps, and what is in memory in each by Inductor's own account."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch import fx
from torch._inductor import memory
from torch._inductor.scheduler import Scheduler
from torch._inductor.virtualized import V
from torch.utils._ordered_set import OrderedSet


@dataclass(frozen=True)
class ScheduledValue:
    """A value of a compiled graph, in memory from step `first` to step `last`.

    Attributes:
        name: Inductor's name of its buffer, or the graph's name of an input.
        nbytes: bytes of its storage.
        first: the step that makes it, 0 for an input.
        last: the step after which it is free; the last step of all for an output.
        nodes: the graph's nodes that it is the result of, as far as Inductor remembers.
        is_input: whether it comes from outside, and is free after its last reader.
        is_output: whether it stays when the graph ends.
    """

    name: str
    nbytes: int
    first: int
    last: int
    nodes: tuple[fx.Node, ...]
    is_input: bool
    is_output: bool


@dataclass(frozen=True)
class Schedule:
    """What Inductor runs for one graph.

    Attributes:
        is_backward: whether it is a backward graph.
        steps: the graph's nodes of each kernel, in the order of execution.
        values: what the kernels make, and the inputs that they free. Parameters and the batch are not among them.
    """

    is_backward: bool
    steps: tuple[tuple[fx.Node, ...], ...]
    values: tuple[ScheduledValue, ...]


@contextlib.contextmanager
def recorded_schedules() -> Iterator[list[Schedule]]:
    """The schedules of the graphs that Inductor compiles while this is open; compile caches are off meanwhile.

    Stands on ``Scheduler.codegen``, before which a schedule's order is final, and on ``torch._inductor.memory``.
    """
    found: list[Schedule] = []
    generate = Scheduler.codegen

    def recorded(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(_read(scheduler))
        return generate(scheduler, *args, **kwargs)

    with (
        mock.patch.object(Scheduler, "codegen", recorded),
        inductor_config.patch(fx_graph_cache=False),
        functorch_config.patch(enable_autograd_cache=False),
    ):
        yield found


def _read(scheduler: Any) -> Schedule:
    graph: Any = V.graph
    steps = scheduler.nodes
    memory.assign_memory_planning_info_for_scheduler_buffers(steps, scheduler.name_to_buf)
    inputs = memory.get_freeable_input_buf(steps, OrderedSet(graph.graph_inputs.keys()))
    outputs = OrderedSet(graph.get_output_names())
    spans, _, _ = memory.compute_memory_timeline(steps, inputs, outputs)
    by_name = {n.name: n for n in graph.module.graph.nodes}
    values = []
    for span in spans:
        buffer: Any = span.buffer
        name = buffer.get_name()
        is_input = name in inputs
        nodes = tuple(by_name[n] for n in [name] if n in by_name) if is_input else _origins(buffer.node)
        last = len(steps) - 1 if span.end_step < 0 else span.end_step
        values.append(ScheduledValue(name, span.size_free, span.start_step, last, nodes, is_input, name in outputs))
    return Schedule(bool(graph.is_backward), tuple(_nodes_of(step) for step in steps), tuple(values))


def _nodes_of(step: Any) -> tuple[fx.Node, ...]:
    found: dict[fx.Node, None] = {}
    for part in step.get_nodes():
        found |= dict.fromkeys(_origins(part.node))
    return tuple(sorted(found))


def _origins(buffer: Any) -> tuple[fx.Node, ...]:
    """The nodes that `buffer` was lowered from, in graph order; the one that it stands for is the last."""
    return tuple(sorted(n for n in getattr(buffer, "origins", ()) if isinstance(n, fx.Node)))
