"""What is kept of each captured and rewritten graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from fxckpt import graph as G
from fxckpt.capture.regions import Region
from fxckpt.decide.graph_plan import GraphPlan
from fxckpt.decide.memory import GraphTimeline, StepGraphs, simulate


@dataclass(frozen=True)
class Frame:
    """The Python frame that a graph was captured from.

    Attributes:
        function: its function, as ``modeling_llama.py:401 in forward``; empty where unknown.
        root: qualified name of the module whose method it is; empty for the model itself, or where unknown.
        compile_id: PyTorch's number of the compilation, such as ``"0/1"``, as in its logs.
        call: number of the model's call that it was captured in.
    """

    function: str = ""
    root: str = ""
    compile_id: str = ""
    call: int = 0


@dataclass(frozen=True)
class GraphRecord:
    """One captured and rewritten graph.

    Attributes:
        forward: the rewritten forward graph; outputs are the model's, then the values saved for backward.
        backward: the rewritten backward graph; inputs are the saved values, then the gradients of the outputs.
        joint: the captured joint graph before any pass.
        regions: the calls of boundary layers found in it.
        plan: what was decided for each.
        num_forward_outputs: how many of the forward graph's outputs are the model's.
        transfers: names of the boundary activations that are offloaded.
        seconds: time of each pass, in seconds.
        parameters: for each of the joint graph's inputs, whether it is a parameter.
        frame: the Python frame it was captured from.
        partition_options: what AOTAutograd gave the partitioner.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    joint: fx.GraphModule = field(repr=False)
    regions: tuple[Region, ...]
    plan: GraphPlan
    num_forward_outputs: int
    transfers: tuple[str, ...]
    seconds: Mapping[str, float] = field(repr=False)
    parameters: tuple[bool, ...] = field(default=(), repr=False)
    frame: Frame = Frame()
    partition_options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def saved(self) -> list[fx.Node]:
        """Nodes of the forward graph that are saved for backward, in order; sizes included."""
        found = G.output_args(self.forward.graph)[self.num_forward_outputs :]
        return [n for n in found if isinstance(n, fx.Node)]

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of the activations that leave the device in a step, by the sizes they were traced with."""
        return sum(G.nbytes(n) for n in self.saved if G.is_offload(n))

    @property
    def activations(self) -> frozenset[str]:
        """Names of the graph's inputs that need a gradient and are no parameters: results of an earlier graph."""
        inputs = [n for n in G.placeholders(self.joint.graph) if not G.is_tangent(n)]
        gradients = G.output_args(self.joint.graph)[self.num_forward_outputs :]
        return frozenset(
            node.name
            for node, gradient, is_parameter in zip(inputs, gradients, self.parameters, strict=False)
            if gradient is not None and not is_parameter
        )


def current_records(records: Sequence[GraphRecord]) -> list[GraphRecord]:
    """Those of one training step: for each frame, the graphs of the last call that it was captured in."""
    latest = {(r.frame.function, r.frame.root): r.frame.call for r in records}
    return [r for r in records if latest[r.frame.function, r.frame.root] == r.frame.call]


def step_graphs(record: GraphRecord, one_memory: bool = True) -> StepGraphs:
    """The graphs of a record, for the simulation of their memory."""
    graphs = record.forward.graph, record.backward.graph
    return StepGraphs(*graphs, record.num_forward_outputs, record.activations, one_memory)


def simulate_records(records: Sequence[GraphRecord]) -> list[GraphTimeline]:
    """The memory of a training step that runs the graphs of `records` node by node (see :func:`simulate`)."""
    return simulate(list(map(step_graphs, current_records(records))))
