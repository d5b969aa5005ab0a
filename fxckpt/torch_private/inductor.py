"""Inductor's schedule of a compiled graph: its kernels, and what is in memory in each by Inductor's own account."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch import fx
from torch._dynamo.exc import BackendCompilerFailed
from torch._functorch._aot_autograd.schemas import AOTConfig
from torch._guards import CompileContext
from torch._inductor import compile_fx, memory
from torch._inductor.codegen.wrapper import ReuseLine
from torch._inductor.dependencies import WeakDep
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import MultiOutput, NonOwningLayout
from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode, Scheduler
from torch._inductor.virtualized import V
from torch.utils._ordered_set import OrderedSet

from fxckpt.torch_private.aot import boxed
from fxckpt.torch_private.graph_modules import snapshot

CANNOT_LOWER = BackendCompilerFailed
"""What comes out of ``torch.compile`` where Inductor cannot lower a graph."""


@dataclass(frozen=True)
class ScheduledValue:
    """A value of a compiled graph, in memory from step `first` to step `last`.

    Attributes:
        name: Inductor's name of its buffer, or the graph's name of an input.
        nbytes: bytes of its storage.
        first: the step that makes it, 0 for an input.
        last: the step after which it is free, or another value has its memory; the last step of all for an output. Of
            an input whose memory the first step takes over it is -1.
        nodes: the graph's nodes that it is the result of, as far as Inductor remembers.
        is_input: whether it comes from outside, and is free after its last reader.
        is_output: whether it stays when the graph ends.
        is_reserve: whether it is a value no more, but memory kept for a later one.
        is_heir: whether it takes over memory of an earlier one.
    """

    name: str
    nbytes: int
    first: int
    last: int
    nodes: tuple[fx.Node, ...]
    is_input: bool
    is_output: bool
    is_reserve: bool = False
    is_heir: bool = False


@dataclass(frozen=True)
class Kernel:
    """One step of a schedule: a function that is generated, or the call of an operator.

    Attributes:
        nodes: the graph's nodes that it was lowered from; of an operator, the one that it stands for is the last.
        called: whether it calls an operator.
        nbytes: bytes that it reads and writes in memory.
    """

    nodes: tuple[fx.Node, ...]
    called: bool
    nbytes: int


@dataclass(frozen=True)
class Schedule:
    """What Inductor runs for one graph.

    Attributes:
        is_backward: whether it is a backward graph.
        compile_id: PyTorch's number of the compilation, as in its logs.
        kernels: its steps, in the order of execution.
        values: what the kernels make, and the inputs that they free. Parameters and the batch are not among them.
        outputs: for each of the graph's outputs the name of its buffer, or a name of its own where it is no tensor.
        last_reads: for each of the graph's inputs that is read, by name, the last step that reads it.
    """

    is_backward: bool
    compile_id: str
    kernels: tuple[Kernel, ...]
    values: tuple[ScheduledValue, ...]
    outputs: tuple[str, ...]
    last_reads: Mapping[str, int]


@contextlib.contextmanager
def recorded_schedules() -> Iterator[list[Schedule]]:
    """The schedules of the graphs that Inductor compiles while this is open; compile caches are off meanwhile.

    Stands on ``GraphLowering.codegen``, which schedules a graph, generates its code and so decides which values take
    the memory of earlier ones, on ``Scheduler.codegen``, before which a schedule's order is final, and on
    ``torch._inductor.memory``.
    """
    found: list[Schedule] = []
    ordered: list[Schedule] = []
    generate, generate_kernels = GraphLowering.codegen, Scheduler.codegen

    def recorded(lowering: Any) -> Any:
        ordered.clear()
        result = generate(lowering)
        found.append(_as_generated(ordered[0], lowering))
        return result

    def ordering(scheduler: Any) -> Any:
        ordered.append(_read(scheduler))
        return generate_kernels(scheduler)

    with (
        mock.patch.object(GraphLowering, "codegen", recorded),
        mock.patch.object(Scheduler, "codegen", ordering),
        inductor_config.patch(fx_graph_cache=False),
        functorch_config.patch(enable_autograd_cache=False),
    ):
        yield found


@contextlib.contextmanager
def schedules_alone() -> Iterator[list[Schedule]]:
    """The schedules of the graphs that ``torch.compile`` hands to Inductor while this is open, which compiles nothing.

    Code is generated as for a run, and thrown away: a graph runs node by node when it is called, on fake tensors too.
    Stands on ``compile_fx.fx_codegen_and_compile``, which gets every graph, ``GraphLowering.compile_to_module``, which
    generates and compiles its code, and ``AOTConfig.force_non_lazy_backward_lowering``; torch 2.11 has no option for
    that.
    """
    compile_graph = compile_fx.fx_codegen_and_compile

    def compiled(gm: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        run = boxed(snapshot(gm))  # lowering changes the graph

        def generated(lowering: Any) -> Any:
            lowering.codegen()
            return types.SimpleNamespace(call=run)

        with mock.patch.object(GraphLowering, "compile_to_module", generated):
            return compile_graph(gm, *args, **kwargs)

    at_once = property(lambda config: True, lambda config, value: None)  # else a backward is lowered when it runs
    with (
        recorded_schedules() as found,
        mock.patch.object(compile_fx, "fx_codegen_and_compile", compiled),
        mock.patch.object(AOTConfig, "force_non_lazy_backward_lowering", at_once),
    ):
        yield found


def _read(scheduler: Any) -> Schedule:
    graph: Any = V.graph
    nodes = scheduler.nodes
    memory.assign_memory_planning_info_for_scheduler_buffers(nodes, scheduler.name_to_buf)
    inputs = memory.get_freeable_input_buf(nodes, OrderedSet(graph.graph_inputs.keys()))
    outputs = OrderedSet(graph.get_output_names())
    spans, _, _ = memory.compute_memory_timeline(nodes, inputs, outputs)
    by_name = {n.name: n for n in graph.module.graph.nodes}
    step_of, kernels = _kernels(nodes)
    last_reads = {name: step_of[i] for name, i in _last_reads(scheduler, graph.graph_inputs).items()}
    makers = {out.get_name(): i for i, node in enumerate(nodes) for out in node.get_outputs()}
    parts = _first_parts(spans)
    values = []
    for span in spans:
        buffer: Any = span.buffer
        name = buffer.get_name()
        is_input = name in inputs
        if not is_input and _is_part(buffer.node):
            continue
        origins = tuple(by_name[n] for n in [name] if n in by_name) if is_input else _origins(buffer.node)
        first = min(span.start_step, parts.get(name, span.start_step))
        if not is_input and isinstance(buffer.node, MultiOutput):
            source: Any = buffer.node.inputs[0]
            first = makers.get(source.get_name(), first)  # its operator makes all that it gives
        last = step_of[len(nodes) - 1 if span.end_step < 0 else span.end_step]
        last = max(last, last_reads.get(name, 0))  # under the names that an input gets when it is changed, too
        values.append(ScheduledValue(name, span.size_free, step_of[first], last, origins, is_input, name in outputs))
    return Schedule(
        bool(graph.is_backward),
        str(CompileContext.current_compile_id() or ""),
        tuple(kernels),
        tuple(values),
        tuple(graph.get_output_names()),
        last_reads,
    )


def _is_part(buffer: Any) -> bool:
    """Whether `buffer` lies in another one, such as a part of what is concatenated."""
    return isinstance(buffer.layout, NonOwningLayout)


def _first_parts(spans: Sequence[Any]) -> dict[str, int]:
    """For each buffer that is made in parts, the first of Inductor's nodes that makes one."""
    found: dict[str, int] = {}
    for span in spans:
        node = getattr(span.buffer, "node", None)
        if node is not None and _is_part(node):
            whole = node.layout.view.get_name()
            found[whole] = min(span.start_step, found.get(whole, span.start_step))
    return found


def _as_generated(schedule: Schedule, lowering: Any) -> Schedule:
    """The schedule with what its code makes of it: values that live in registers are none, and some take over memory.

    Memory that is kept for a later value is a value of its own meanwhile.
    """
    lines = [line for line in lowering.wrapper_code.lines if isinstance(line, ReuseLine)]
    heirs = {line.node.get_name(): line.reused_as.get_name() for line in lines}
    first = {value.name: value.first for value in schedule.values}
    values: list[ScheduledValue] = []
    for value in schedule.values:
        if value.name in lowering.removed_buffers:
            continue
        until = first.get(heirs.get(value.name, ""), value.last + 1)
        is_heir = value.name in heirs.values()
        values.append(replace(value, last=min(value.last, until - 1), is_heir=is_heir))
        values.append(replace(value, first=value.last + 1, last=until - 1, nodes=(), is_input=False, is_reserve=True))
    return replace(schedule, values=tuple(value for value in values if value.is_input or value.last >= value.first))


def _kernels(nodes: Sequence[Any]) -> tuple[list[int], list[Kernel]]:
    """The step that each of Inductor's nodes belongs to, and the steps.

    On a CPU the nodes between two calls of operators become one function. What picks one of an operator's several
    results belongs to the operator's step.
    """
    step_of: list[int] = []
    kernels: list[Kernel] = []
    joins = False
    for node in nodes:
        called = isinstance(node, ExternKernelSchedulerNode)
        if called and isinstance(node.node, MultiOutput) and kernels:
            step_of.append(len(kernels) - 1)
            continue
        kernel = _kernel(node, called)
        if joins and not called and _on_cpu(node):
            kernels[-1] = _joined(kernels[-1], kernel)
        else:
            kernels.append(kernel)
        joins = not called and _on_cpu(node)
        step_of.append(len(kernels) - 1)
    return step_of, kernels


def _on_cpu(node: Any) -> bool:
    device = node.get_device()
    return device is None or device.type == "cpu"


def _kernel(node: Any, called: bool) -> Kernel:
    found: dict[fx.Node, None] = {}
    for part in node.get_nodes():
        found |= dict.fromkeys(_origins(part.node))
    if isinstance(node, NopKernelSchedulerNode):
        return Kernel(tuple(sorted(found)), called, 0)
    accesses = node.get_read_write_buffer_accesses(include_reads=True, include_writes=True)
    return Kernel(tuple(sorted(found)), called, sum(accesses.values()))


def _joined(a: Kernel, b: Kernel) -> Kernel:
    return Kernel(a.nodes + b.nodes, False, a.nbytes + b.nbytes)


def _origins(buffer: Any) -> tuple[fx.Node, ...]:
    """The nodes that `buffer` was lowered from, in graph order; the one that it stands for is the last."""
    return tuple(sorted(n for n in getattr(buffer, "origins", ()) if isinstance(n, fx.Node)))


def _last_reads(scheduler: Any, inputs: Any) -> dict[str, int]:
    """For each of the graph's inputs the last of Inductor's nodes that reads it."""
    found = {}
    for i, node in enumerate(scheduler.nodes):
        for dep in node.read_writes.reads:
            name, orders_only = dep.name, isinstance(dep, WeakDep) and getattr(dep, "is_fake", False)
            while name in scheduler.mutation_real_name:  # what is changed in place is called by another name after
                name = scheduler.mutation_real_name[name]
            if name in inputs and not orders_only:
                found[name] = i
    return found
