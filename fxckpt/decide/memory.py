"""What is in memory at each moment of a training step, by the lifetimes of its graphs' storages.

A graph that runs node by node holds exactly its storages: this is what ``t(**batch)`` does. What an operator allocates
inside itself for as long as it runs is little in most; where it is much it is known (``decide/workspace.py``).

Counted are the bytes on top of what is there before the step: neither parameters nor the batch. Gradients of parameters
count from when they are made.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import fx

from fxckpt import graph as G
from fxckpt.decide.workspace import workspace_nbytes

SAVED, RECOMPUTED, OF_PARAMETERS, OTHER = "saved for backward", "recomputed", "parameters' gradients", "other"
KINDS = (SAVED, RECOMPUTED, OF_PARAMETERS, OTHER)


@dataclass(frozen=True)
class Value:
    """A value in memory.

    Attributes:
        name: its node's name, or the compiler's for it.
        kind: ``"saved for backward"``, ``"recomputed"``, ``"parameters' gradients"`` or ``"other"``.
        nbytes: bytes of its storage.
        module: the module that made it, by its path; empty where unknown.
        source: the source line that made it; empty where unknown.
        first: the step that makes it.
        last: the step after which it is free.
    """

    name: str
    kind: str
    nbytes: int
    module: str
    source: str
    first: int
    last: int


@dataclass(frozen=True)
class GraphTimeline:
    """The memory of one graph over its steps: its nodes, or the kernels that a compiler made of them.

    Attributes:
        is_backward: whether it is a backward graph.
        modules: for each step, the module whose work it is; empty where unknown.
        values: all values but parameters and the batch.
        around: bytes that other graphs of the training step keep alive meanwhile.
    """

    is_backward: bool
    modules: tuple[str, ...]
    values: tuple[Value, ...]
    around: int = 0

    def bytes_by_kind(self) -> dict[str, list[int]]:
        """Bytes in memory at each step, by kind."""
        change = {kind: [0] * (len(self.modules) + 1) for kind in KINDS}
        change[SAVED][0] = self.around
        for value in self.values:
            change[value.kind][value.first] += value.nbytes
            change[value.kind][value.last + 1] -= value.nbytes
        return {kind: list(accumulate(changes[:-1])) for kind, changes in change.items()}

    @property
    def totals(self) -> list[int]:
        """Bytes in memory at each step."""
        return [sum(parts) for parts in zip(*self.bytes_by_kind().values(), strict=True)]

    @property
    def peak(self) -> int:
        """The step with the most bytes."""
        totals = self.totals
        return max(range(len(totals)), key=totals.__getitem__, default=0)

    @property
    def peak_bytes(self) -> int:
        """The most bytes in memory at once."""
        return max(self.totals, default=0)

    def alive(self, step: int) -> list[Value]:
        """What is in memory at a step, the largest first."""
        return sorted((v for v in self.values if v.first <= step <= v.last), key=lambda v: (-v.nbytes, v.first))


def module_path(node: fx.Node) -> str:
    """Path of the module whose forward made `node`, or whose backward it is part of; empty where unknown."""
    calls = G.module_stack(node) or G.module_stack(node, "fwd_nn_module_stack")
    return re.sub(r"^L\['self'\]\.?", "", calls[-1][2]) if calls else ""


@dataclass(frozen=True)
class StepGraphs:
    """A forward graph and its backward graph.

    Attributes:
        forward: outputs are the model's, then the values saved for backward.
        backward: inputs are the saved values, then gradients of outputs.
        num_forward_outputs: how many of the forward graph's outputs are the model's.
        activations: names of the forward's inputs that are results of an earlier graph.
        one_memory: whether host copies of tensors of a CPU lie in the memory that is counted. False where the graphs
            were captured for another device.
    """

    forward: fx.Graph
    backward: fx.Graph
    num_forward_outputs: int
    activations: Collection[str] = ()
    one_memory: bool = True


def simulate(steps: Sequence[StepGraphs]) -> list[GraphTimeline]:
    """The memory of a training step whose graphs run node by node: forwards in order, then backwards in reverse order.

    Of the outputs the loss alone is taken to outlive the forward, as where a training loop keeps no other. An output
    that a later graph reads is alive until that one begins; from there it counts as its input.

    Args:
        steps: the step's pairs of graphs, in the order they are captured in.

    Returns:
        A timeline for each graph, in the order they run in.
    """
    forwards = [ForwardStorages(one) for one in steps]
    held = [one.held_bytes for one in forwards]
    found = [one.timeline(around=sum(held[:i])) for i, one in enumerate(forwards)]
    gradients = 0
    for i in reversed(range(len(steps))):
        timeline = _backward(steps[i], forwards[i], sum(held[:i]) + gradients)
        gradients += sum(v.nbytes for v in timeline.values if v.kind == OF_PARAMETERS)
        found.append(timeline)
    return found


class ForwardStorages:
    """A forward graph's storages, and which of them the backward gets.

    Args:
        step: the graph, and its backward.
    """

    def __init__(self, step: StepGraphs) -> None:
        self.one_memory = step.one_memory
        self.nodes = [n for n in step.forward.nodes if n.op != "output"]
        inputs = G.placeholders(step.forward)
        resident = {n for n in inputs if n.name not in step.activations}
        self.lifetimes = G.lifetimes(self.nodes, resident)
        kept = G.output_args(step.forward)[step.num_forward_outputs :]
        self.saved = {n.name: G.storage_of(n) for n in kept if isinstance(n, fx.Node)}
        self.returned = set(G.returned(step.forward)) | {G.storage_of(n) for n in inputs}

    def nbytes(self, storage: G.Storage) -> int:
        """Bytes in device memory."""
        if G.is_offload(storage[0]):
            return copy_nbytes(storage[0]) if self.one_memory else 0
        return self.lifetimes[storage].nbytes

    @property
    def held_bytes(self) -> int:
        """Bytes of what the backward gets."""
        return sum(self.nbytes(s) for s in set(self.saved.values()) if s in self.lifetimes)

    def timeline(self, around: int) -> GraphTimeline:
        """Of the graph run node by node, while other graphs hold `around` bytes."""
        end, saved = len(self.nodes) - 1, set(self.saved.values())
        values = []
        for storage, life in self.lifetimes.items():
            last = end if storage in saved or storage in self.returned else life.last
            kind = SAVED if storage in saved else OTHER
            values.append(value_of(storage, self.nbytes(storage), kind, life.first, last))
        values += workspaces(enumerate(self.nodes)) if self.one_memory else []
        modules = tuple(map(module_path, self.nodes))
        return GraphTimeline(False, modules, tuple(v for v in values if v.nbytes), around)


def _backward(step: StepGraphs, forward: ForwardStorages, around: int) -> GraphTimeline:
    nodes = [n for n in step.backward.nodes if n.op != "output"]
    end = len(nodes) - 1
    ends = _gradients(step)
    last_read: dict[G.Storage, int] = {}
    values = []
    for storage, life in G.lifetimes(nodes).items():
        node = storage[0]
        last = end if storage in ends else life.last
        if node.op == "placeholder" and node.name in forward.saved:  # several may be views of one storage
            source = forward.saved[node.name]
            last_read[source] = max(last_read.get(source, 0), last)
        elif node.op != "placeholder" or G.is_tangent(node):  # PyTorch makes zeros for gradients that nobody gave
            kind = OF_PARAMETERS if ends.get(storage) else _kind(node)
            values.append(value_of(storage, life.nbytes, kind, life.first, last))
    for source, last in last_read.items():
        if source in forward.lifetimes:
            values.append(value_of(source, forward.nbytes(source), SAVED, 0, last))
    values += workspaces(enumerate(nodes)) if step.one_memory else []
    return GraphTimeline(True, tuple(map(module_path, nodes)), tuple(v for v in values if v.nbytes), around)


def workspaces(steps: Iterable[tuple[int, fx.Node]]) -> list[Value]:
    """What nodes need inside themselves, each with the step that it runs in."""
    needs = [(i, node, workspace_nbytes(node)) for i, node in steps if node.op == "call_function"]
    return [value_of((node, None), nbytes, OTHER, i, i) for i, node, nbytes in needs if nbytes]


def copy_nbytes(offload: fx.Node) -> int:
    """Bytes in device memory of an offload's copy: all where device and host have one memory, else none."""
    source = offload.args[0]
    val = G.tensor(source) if isinstance(source, fx.Node) else None
    if G.argument(offload, "place") != "cpu" or val is None or val.device.type != "cpu":
        return 0
    return G.nbytes(offload)


def _kind(node: fx.Node) -> str:
    if G.is_reload(node):
        return SAVED
    return RECOMPUTED if G.is_recomputed(node) else OTHER


def _gradients(step: StepGraphs) -> dict[G.Storage, bool]:
    """What a backward returns, and whether it is the gradient of a parameter."""
    found: dict[G.Storage, bool] = {}
    for given, gradient in zip(G.placeholders(step.forward), G.output_args(step.backward), strict=False):
        if isinstance(gradient, fx.Node):
            storage = G.storage_of(gradient)
            found[storage] = found.get(storage, False) or given.name not in step.activations
    return found


def value_of(storage: G.Storage, nbytes: int, kind: str, first: int, last: int) -> Value:
    """A storage as a value of `nbytes` that is alive from step `first` to step `last`."""
    node = storage[0]
    return Value(node.name, kind, nbytes, module_path(node), G.source_line(node), first, last)
