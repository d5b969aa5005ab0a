"""Parts of a graph: its inputs, its outputs, its backward; copies of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx


def is_tangent(node: fx.Node) -> bool:
    """Whether `node` is a gradient of an output, an input of the backward."""
    return node.op == "placeholder" and "tangents" in str(node.target)


def placeholders(graph: fx.Graph) -> list[fx.Node]:
    """The inputs of a graph, in order."""
    return [n for n in graph.nodes if n.op == "placeholder"]


def output_node(graph: fx.Graph) -> fx.Node:
    """The output node of a graph."""
    return graph.output_node()


def output_args(graph: fx.Graph) -> list[Any]:
    """What a graph returns, flat and in order."""
    returned = output_node(graph).args[0]
    return list(returned) if isinstance(returned, (list, tuple)) else [returned]


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """A copy of a graph whose nodes have copies of all marks; their values are shared."""
    made = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    result = made.graph_copy(graph, mapping)
    made.output(result)
    output_node(made).meta.update(output_node(graph).meta)
    return made


def walk_inputs(starts: Iterable[fx.Node], into: Callable[[fx.Node], bool]) -> set[fx.Node]:
    """`starts` and all nodes they depend on, followed as long as `into(node)` holds."""
    found: set[fx.Node] = set()
    todo = list(starts)
    while todo:
        node = todo.pop()
        if node in found or not into(node):
            continue
        found.add(node)
        todo.extend(node.all_input_nodes)
    return found


def loosen_views(graph: fx.Graph) -> None:
    """Let every ``view`` copy where it must.

    Some CPU kernels return other strides than their fake implementations promise, so that a view that was legal in
    the trace is not on the real tensor; the values are the same either way.
    """
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        node.target = torch.ops.aten.reshape.default
