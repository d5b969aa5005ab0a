"""The graph of regions: who computes what, and which tensors flow between them."""

from __future__ import annotations

from typing import Any

import networkx
from torch import fx

from fxckpt import graph as G
from fxckpt.decide.cost import total_flops
from fxckpt.record import GraphRecord
from fxckpt.show import count
from fxckpt.show.data import SavedValue
from fxckpt.show.explain import region_figures, type_text

INPUTS, BEFORE, OUTPUTS = "inputs", "before", "outputs"


def to_networkx(record: GraphRecord) -> networkx.DiGraph:
    """The forward of a captured graph with its regions as nodes and the tensors between them as edges.

    Nodes are the names of the regions; ``"inputs"`` and ``"outputs"``; and what is computed outside every region:
    ``"before"`` (depends on no region, such as embeddings and masks) and ``"after NAME"`` (NAME is the last region it
    depends on). An edge leads from where a tensor is made to where it is read. Parameters and views of them flow
    nowhere.

    Node attributes: ``treatment`` (``"keep"``, ``"recompute"``, or ``""`` outside regions), ``inside`` (the recomputed
    region around it, or ``""``), ``nodes`` (operators), ``saved_bytes`` and ``offloaded_bytes`` (held for backward on
    the device and on the host), ``flops`` (of its forward) and ``recomputed_flops``. Edge attributes: ``bytes`` (each
    storage counts once) and ``tensors``, a list of dicts ``name``, ``type``, ``bytes``.

    Args:
        record: one of ``fxckpt.graphs(t)``.
    """
    places = _places(record)
    regions, outside = region_figures(record)
    made = networkx.DiGraph()
    made.add_node(INPUTS, **_outside_figures(INPUTS, record, places, outside) | {"nodes": 0})
    names = dict.fromkeys(place for place in places.values() if place != INPUTS)
    if BEFORE in names:
        made.add_node(BEFORE, **_outside_figures(BEFORE, record, places, outside))
    for region in regions:
        made.add_node(region.name, **{k: getattr(region, k) for k in _figures([])} | {"inside": region.inside or ""})
        after = f"after {region.name}"
        if after in names:
            made.add_node(after, **_outside_figures(after, record, places, outside))
    made.add_node(OUTPUTS, **_figures([]))
    _add_edges(made, record, places)
    return made


def _outside_figures(
    name: str, record: GraphRecord, places: dict[fx.Node, str], outside: tuple[SavedValue, ...]
) -> dict[str, Any]:
    nodes = [n for n, place in places.items() if place == name]
    names = {n.name for n in nodes}
    held = [v for v in outside if v.name in names]
    return _figures(nodes) | {
        "saved_bytes": sum(v.saved_bytes for v in held),
        "offloaded_bytes": sum(v.offloaded_bytes for v in held),
        "recomputed_flops": total_flops(n for n in count.recomputed_nodes(record) if n.name in names),
    }


def _figures(nodes: list[fx.Node]) -> dict[str, Any]:
    return {
        "treatment": "",
        "inside": "",
        "nodes": len(nodes),
        "saved_bytes": 0,
        "offloaded_bytes": 0,
        "flops": total_flops(nodes),
        "recomputed_flops": 0,
    }


def _places(record: GraphRecord) -> dict[fx.Node, str]:
    """The node of the region graph that each forward node and each input that is no parameter belongs to."""
    joint = record.joint.graph
    regions = count.innermost_regions(record)
    backward = G.backward_nodes(joint)
    order = {name: i for i, name in enumerate(r.name for r in record.regions)}
    names = list(order)
    latest: dict[fx.Node, int] = {}
    places: dict[fx.Node, str] = {}
    for node in joint.nodes:
        if node.op != "call_function" or node in backward:
            continue
        if node.name in regions:
            places[node] = regions[node.name].name
            latest[node] = order[places[node]]
        else:
            latest[node] = max((latest.get(i, -1) for i in node.all_input_nodes), default=-1)
            places[node] = BEFORE if latest[node] < 0 else f"after {names[latest[node]]}"
    for node in reversed(places):  # what only a later place reads is part of it
        readers = {places[u] for u in node.users if u in places}
        if places[node] == BEFORE and len(readers) == 1:
            (reader,) = readers
            places[node] = reader if reader not in order else BEFORE
    parameters = _parameters(record)
    inputs = [n for n in G.placeholders(joint) if not G.is_tangent(n) and n not in parameters]
    return {**dict.fromkeys(inputs, INPUTS), **places}


def _parameters(record: GraphRecord) -> set[fx.Node]:
    inputs = [n for n in G.placeholders(record.joint.graph) if not G.is_tangent(n)]
    return {n for n, p in zip(inputs, record.parameters, strict=False) if p}


def _add_edges(made: networkx.DiGraph, record: GraphRecord, places: dict[fx.Node, str]) -> None:
    returned = [n for n in G.output_args(record.joint.graph)[: record.num_forward_outputs] if isinstance(n, fx.Node)]
    flows: dict[tuple[str, str], dict[fx.Node, None]] = {}
    parameters = _parameters(record)
    for node, place in places.items():
        if G.view_base(node) in parameters:
            continue
        targets = {places[u] for u in node.users if u in places} | ({OUTPUTS} if node in returned else set())
        for target in sorted(targets - {place}):
            flows.setdefault((place, target), {})[node] = None
    for (source, target), nodes in flows.items():
        shown = [(n, v) for n in nodes if (v := G.tensor(n)) is not None]
        tensors = [{"name": n.name, "type": type_text(v), "bytes": G.nbytes(n)} for n, v in shown]
        if tensors:
            bases = {base: val for n, _ in shown if (val := G.tensor(base := G.view_base(n))) is not None}
            made.add_edge(source, target, bytes=sum(map(G.storage_nbytes, bases.values())), tensors=tensors)
