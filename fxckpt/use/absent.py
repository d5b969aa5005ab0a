"""Gradients that stay None in plain runs.

Where an output of the model takes no part in the loss, eager autograd leaves the ``grad`` of parameters that only it
depends on at None, and an optimiser does not touch them. A captured backward computes zeros for them instead. In
plain runs (outside ``torch.compile``) those zeros are taken out again, so that a step changes what it would change in
eager.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxckpt import graph as G
from fxckpt import torch_private
from fxckpt.record import GraphRecord


@dataclass(frozen=True)
class Dependence:
    """On which outputs each input's gradient depends.

    Attributes:
        of_input: for each tensor input of the graph, in order, the positions of those forward outputs.
    """

    of_input: tuple[frozenset[int], ...]

    @property
    def matters(self) -> bool:
        """Whether some outputs' gradients can be missing without all input gradients needing them."""
        return len({d for d in self.of_input if d}) > 1


def dependence(record: GraphRecord) -> Dependence | None:
    """Read the dependence off a joint graph; None where its outputs are not those of the traced function one to one."""
    graph = record.joint.graph
    positions = G.tangent_positions(graph)
    if positions is None:
        return None
    reach: dict[fx.Node, frozenset[int]] = {n: frozenset({p}) for n, p in positions.items()}
    nothing: frozenset[int] = frozenset()
    for node in graph.nodes:
        if node.op == "call_function":
            reach[node] = nothing.union(*(reach.get(i, nothing) for i in node.all_input_nodes))
    inputs = [n for n in G.placeholders(graph) if not G.is_tangent(n)]
    gradients = G.output_args(graph)[record.num_forward_outputs :]
    pairs = zip(inputs, gradients, strict=False)
    return Dependence(
        tuple(reach.get(g, nothing) if isinstance(g, fx.Node) else nothing for i, g in pairs if G.tensor(i) is not None)
    )


def keep_absent(compiled: Callable[..., Any], depends: Dependence) -> Callable[..., Any]:
    """`compiled`, with zeros that stand for a missing gradient turned to None in its backward."""

    def run(*args: Any) -> Any:
        start = torch_private.next_sequence_number()
        outputs = compiled(*args)
        node = _compiled_node(outputs, start)
        if node is not None and len(node.next_functions) == len(depends.of_input):
            node.register_hook(_taker(depends))
        return outputs

    return run


def _taker(depends: Dependence) -> Callable[[Any, Any], Any]:
    def take_out(inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> Any:
        absent = frozenset(i for i, g in enumerate(outputs) if g is None)
        if not absent or len(inputs) != len(depends.of_input):
            return None
        return tuple(
            None if needs and needs <= absent else g for g, needs in zip(inputs, depends.of_input, strict=True)
        )

    return take_out


def _compiled_node(outputs: Any, start: int) -> Any:
    """The autograd node of this call's captured graph, behind any view of an output; `start` is its first number."""
    for leaf in pytree.tree_leaves(outputs):
        step = leaf.grad_fn if isinstance(leaf, torch.Tensor) else None
        while step is not None and step._sequence_nr() >= start:
            if step.name() == "CompiledFunctionBackward":
                return step
            step = next((f for f, _ in step.next_functions if f is not None), None)
    return None
