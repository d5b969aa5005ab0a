"""Pass on the backward graph: say when the recompute of a region may start.

Inductor orders a graph anew and fuses across it. Left alone it starts to recompute a region before the gradients of
what follows are put together, and holds all their parts beside the recomputed values. So each value that a region
starts from gets a node before its first reader::

    start_layers_3_input = fxckpt.start_recompute(layers_3_input, [gradient, ...])

The node claims to change the value, which orders every later reader of it behind the node, and it reads the gradients
that are alive by then, which orders their computation before it. Nothing is fused or moved across it, and it does
nothing when it runs.
"""

from __future__ import annotations

import torch
from torch import fx

from fxckpt import graph as G


def start_recomputes(backward: fx.Graph) -> int:
    """Insert the start nodes; in time linear in the graph.

    Needs: tags on the recomputed nodes and on the inputs and reloads that they read. Leaves: the start nodes.

    Returns:
        How many were inserted.
    """
    nodes = list(backward.nodes)
    order = {node: i for i, node in enumerate(nodes)}
    last_use = _last_uses(nodes, order)
    alive: dict[fx.Node, None] = {}  # gradients, in graph order
    started: set[tuple[fx.Node, int]] = set()
    inserted = 0
    for node in nodes:
        entries = [e for e in _entries(node) if e not in started]
        started.update(entries)
        if entries:
            alive = {g: None for g in alive if last_use[g] >= order[node]}
        arrived = _arrived(alive) if entries else []
        for value, region in entries if arrived else ():
            with backward.inserting_before(node):
                backward.create_node(
                    "call_function",
                    torch.ops.fxckpt.start_recompute.default,
                    (value, arrived),
                    name=f"start_{_name(value, region)}",
                )
            inserted += 1
        if node in last_use:
            alive[node] = None
    return inserted


def _arrived(alive: dict[fx.Node, None]) -> list[fx.Node]:
    """The gradients that the regions before this one left; what is made of one of them alone can wait."""
    return [g for g in alive if not any(G.view_base(n) in alive for n in g.all_input_nodes)]


def _last_uses(nodes: list[fx.Node], order: dict[fx.Node, int]) -> dict[fx.Node, int]:
    """For each gradient, the place of the last node that reads it or a view of it; the output does not count."""
    gradients = {n for n in nodes if n.op == "placeholder" and G.is_tangent(n)}
    last_use: dict[fx.Node, int] = {}
    for node in nodes:
        if node.op != "call_function":
            continue
        read = [n for n in node.all_input_nodes if n in gradients]
        if not read:
            continue
        gradients.add(node)
        if G.is_view(node):  # what reads it reads its base
            continue
        for base in map(G.view_base, read):
            if base in last_use:
                last_use[base] = order[node]
        if G.tensor(node) is not None:
            last_use[node] = -1
    return {node: place for node, place in last_use.items() if place >= 0}


def _entries(node: fx.Node) -> list[tuple[fx.Node, int]]:
    """What a recomputed node reads of what its regions start from, with the region."""
    tag = G.tag(node)
    if node.op != "call_function" or tag is None or tag.kind is not G.Kind.INTERIOR:
        return []
    return [(value, region) for value in node.all_input_nodes for region in tag.regions if region in _starts(value)]


def _starts(value: fx.Node) -> tuple[int, ...]:
    """The regions that start from `value`."""
    tag = _saved_tag(value)
    return tag.regions if tag is not None else ()


def _saved_tag(value: fx.Node) -> G.Tag | None:
    saved = value.args[0] if G.is_reload(value) else value
    return G.tag(saved) if isinstance(saved, fx.Node) and saved.op == "placeholder" else None


def _name(value: fx.Node, region: int) -> str:
    tag = _saved_tag(value)
    return tag.name if tag is not None and tag.name else f"region_{region}"
