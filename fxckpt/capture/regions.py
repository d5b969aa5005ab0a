"""Regions: the calls of boundary layers in one captured graph.

A region is ONE call: a layer called four times makes four regions. Dynamo keeps, for each node, the stack of module
calls it was traced in; a node belongs to a region if the region's call stands in that stack.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx, nn

from fxckpt import graph as G


@dataclass(frozen=True)
class BoundaryLayer:
    """A module whose calls are regions.

    Attributes:
        name: its qualified name in the model.
        index: its place among the model's boundary layers, in the order of ``model.modules()``.
        module: the module.
    """

    name: str
    index: int
    module: nn.Module = field(repr=False, compare=False)


@dataclass(eq=False)
class Region:
    """One call of a boundary layer in one captured graph.

    Attributes:
        index: place among the graph's regions, in order of first node.
        layer: the layer called.
        call: 0 for the layer's first call in this graph, 1 for its second, ...
        nodes: the forward nodes traced in the call, nested regions' included, in graph order.
        parent: the innermost region around this one, or None.
    """

    index: int
    layer: BoundaryLayer
    call: int
    nodes: list[fx.Node] = field(default_factory=list, repr=False)
    parent: Region | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """The layer's name, with ``#k`` for its k-th further call."""
        return self.layer.name + (f"#{self.call}" if self.call else "")


def find_regions(
    graph: fx.Graph, layers: Mapping[int, BoundaryLayer], around: Sequence[BoundaryLayer] = ()
) -> list[Region]:
    """All regions of a joint graph, in order of their first node.

    Args:
        graph: a joint forward and backward graph.
        layers: boundary layers by the ``id()`` of their module.
        around: boundary layers whose call the whole graph is part of, outermost first (a layer's own frame).

    Returns:
        Regions with at least one node; nested ones have `parent` set.
    """
    backward = G.backward_nodes(graph)
    forward = [n for n in graph.nodes if n.op == "call_function" and n not in backward]
    by_call: dict[tuple[int, int], Region] = {}

    def region_of(layer: BoundaryLayer, call: int, parent: Region | None) -> Region:
        key = (id(layer.module), call)
        if key not in by_call:
            by_call[key] = Region(len(by_call), layer, call, parent=parent)
        return by_call[key]

    outer: list[Region] = []
    for layer in around:
        outer.append(region_of(layer, 0, outer[-1] if outer else None))
    whole = {id(layer.module) for layer in around}

    owners = _owners_of_parts(forward, layers, whole)
    chains: dict[fx.Node, tuple[Region, ...]] = {}
    for node in forward:
        chain = list(outer)
        for ident, call, _path, _cls in G.module_stack(node):
            if ident in layers and ident not in whole:
                chain.append(region_of(layers[ident], call, chain[-1] if chain else None))
            elif ident in owners and all(r.layer is not owners[ident] for r in chain):
                chain.append(region_of(owners[ident], 0, chain[-1] if chain else None))
        chains[node] = tuple(chain)
    _adopt_strays(forward, chains)
    for node in forward:
        for region in chains[node]:
            region.nodes.append(node)
    return [r for r in by_call.values() if r.nodes]


def _owners_of_parts(
    forward: list[fx.Node], layers: Mapping[int, BoundaryLayer], whole: set[int]
) -> dict[int, BoundaryLayer]:
    """For layers that are run by ``layer.forward(...)``, which no stack shows: each part that only one of them has.

    All calls of such a layer are one region.
    """
    called = {ident for node in forward for ident, *_ in G.module_stack(node)} | whole
    owners: dict[int, BoundaryLayer] = {}
    shared: set[int] = set()
    for ident, layer in layers.items():
        for part in layer.module.modules() if ident not in called else ():
            if id(part) in owners:
                shared.add(id(part))
            owners[id(part)] = layer
    return {ident: layer for ident, layer in owners.items() if ident not in shared and ident not in layers}


def _adopt_strays(forward: list[fx.Node], chains: dict[fx.Node, tuple[Region, ...]]) -> None:
    """A node of no region that is fed from a region and only used in it is in it.

    Joint-graph passes make nodes without a stack, and what a layer run by its ``forward`` does outside its parts has
    the stack of its caller. Of an operator's several results, one that the backward alone reads is where the operator
    is.
    """
    stray = {n for n in forward if not chains[n]}
    fed: dict[fx.Node, tuple[Region, ...]] = {}
    for node in forward:
        if node in stray:
            fed[node] = next((c for i in node.all_input_nodes if (c := fed.get(i) or chains.get(i))), ())
    parts = {n for n in stray if G.is_getitem(n) and not any(u in chains or u.op == "output" for u in n.users)}
    for node in reversed(forward):
        if node not in stray or node in parts or not fed[node]:
            continue
        users = [chains[u] for u in node.users if u in chains and u not in parts]
        innermost = fed[node][-1]
        if users and all(innermost in chain for chain in users):
            chains[node] = fed[node]
    for node in parts:
        chains[node] = chains.get(node.all_input_nodes[0], ())
