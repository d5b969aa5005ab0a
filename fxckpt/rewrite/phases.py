"""What of a backward graph recomputes the forward, and what is gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from fxckpt import graph as G


def find_gradients(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """The nodes that depend on a gradient of an output; `nodes` are a backward graph's, in order."""
    found = {n for n in nodes if G.is_tangent(n)}
    for node in nodes:
        if node.op == "call_function" and any(n in found for n in node.all_input_nodes):
            found.add(node)
    return found


def find_readers(nodes: Sequence[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """The nodes that read each value, or a view of it, in graph order; views and the output do not count."""
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        if node.op == "call_function" and not G.is_view(node):
            for base in dict.fromkeys(map(G.view_base, node.all_input_nodes)):
                found.setdefault(base, []).append(node)
    return found


def first_reader(reload: fx.Node) -> fx.Node:
    """The first node that computes with what `reload` brings back."""
    return min(n for n in reload.users if not G.is_transfer(n) and not G.is_order(n))


def region_of_reload(reload: fx.Node) -> tuple[int, ...] | None:
    """The region that starts from what `reload` brings back, or whose value it is; None for what is of none."""
    reader = first_reader(reload)
    tag = G.tag(reader)
    if tag is not None and G.is_recomputed(reader):
        return tag.regions
    own = G.tag(reload.all_input_nodes[0])
    return own.regions if own is not None and own.kind in (G.Kind.NAMED, G.Kind.KEPT) else None


_PRODUCTS = {torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm, torch.ops.aten.convolution}


def is_product(node: fx.Node) -> bool:
    """Whether `node` is a matrix product or a convolution: no compiler fuses it with what comes before it."""
    return G.overload_packet(node) in _PRODUCTS


def feeds_product(node: fx.Node) -> bool:
    """Whether a matrix product or a convolution reads `node` or a view of it: then it lies in memory."""
    return any(is_product(user) or (G.is_view(user) and feeds_product(user)) for user in node.users)


def is_added(node: fx.Node) -> bool:
    """Whether `node` is a matrix product that is added to something: a compiler can make one operator of the two."""
    return G.overload_packet(node) is torch.ops.aten.mm and _feeds_sum(node)


def _feeds_sum(node: fx.Node) -> bool:
    return any(
        G.overload_packet(user) is torch.ops.aten.add or (G.is_view(user) and _feeds_sum(user)) for user in node.users
    )
