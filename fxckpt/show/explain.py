"""From records of captured graphs to an :class:`~fxckpt.show.data.Explanation`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fxckpt import graph as G
from fxckpt.capture.regions import Region
from fxckpt.config import Settings
from fxckpt.decide.cost import total_flops
from fxckpt.decide.graph_plan import Boundary, RegionPlan
from fxckpt.record import GraphRecord, current_records
from fxckpt.runtime.stats import TransferStats
from fxckpt.show import count
from fxckpt.show.data import BoundaryFigures, Explanation, GraphFigures, RegionFigures, SavedValue, Why


def explain_records(
    records: Sequence[GraphRecord], settings: Settings, model: str, transfers: TransferStats
) -> Explanation:
    """Figures of the graphs of one transformed model, in order of capture.

    Args:
        records: its records.
        settings: what was asked for.
        model: class name of the model.
        transfers: figures of its last step's transfers.
    """
    current = {id(r) for r in current_records(records)}
    graphs = [_graph(r, id(r) in current) for r in records]
    return Explanation(model, _settings(settings), tuple(graphs), transfers)


def type_text(val: torch.Tensor) -> str:
    """``float32[2, 16, 32]``."""
    return f"{dtype_text(val.dtype)}[{', '.join(str(G.hint(s)) for s in val.shape)}]"


def dtype_text(dtype: torch.dtype) -> str:
    """``float32``."""
    return str(dtype).removeprefix("torch.")


def region_figures(record: GraphRecord) -> tuple[tuple[RegionFigures, ...], tuple[SavedValue, ...]]:
    """Figures of a graph's regions, and the values saved outside them."""
    regions = count.innermost_regions(record)
    saved: dict[str | None, list[SavedValue]] = {}
    for entry in count.held(record.saved, record.activations):
        where, value = _saved_value(record, entry, regions)
        saved.setdefault(where, []).append(value)
    forward: dict[str, list[fx.Node]] = {}
    backward = G.backward_nodes(record.joint.graph)
    for node in record.joint.graph.nodes:
        if node.op == "call_function" and node not in backward and node.name in regions:
            forward.setdefault(regions[node.name].name, []).append(node)
    again: dict[str, list[fx.Node]] = {}
    for node in count.recomputed_nodes(record):
        region = count.region_of(node, regions)
        if region is not None:
            again.setdefault(region.name, []).append(node)
    figures = [
        _region(record, plan, saved.get(plan.name, []), forward.get(plan.name, []), again.get(plan.name, []))
        for plan in record.plan.regions
    ]
    return tuple(figures), tuple(saved.get(None, []))


def _graph(record: GraphRecord, current: bool) -> GraphFigures:
    regions, outside = region_figures(record)
    counted: list[RegionFigures | SavedValue] = [*regions, *outside]
    inputs = [n for n in G.placeholders(record.joint.graph) if not G.is_tangent(n)]
    shown = [v for n, p in zip(inputs, record.parameters, strict=False) if not p and (v := G.tensor(n)) is not None]
    return GraphFigures(
        function=record.frame.function,
        root=record.frame.root,
        compile_id=record.frame.compile_id,
        call=record.frame.call,
        current=current,
        inputs=tuple(type_text(v) for v in shown),
        baseline_saved_bytes=count.baseline_saved_bytes(record),
        saved_bytes=sum(c.saved_bytes for c in counted),
        offloaded_bytes=sum(c.offloaded_bytes for c in counted),
        flops=total_flops(record.joint.graph.nodes),
        recomputed_flops=total_flops(count.recomputed_nodes(record)),
        regions=regions,
        outside=outside,
    )


def _region(
    record: GraphRecord, plan: RegionPlan, saved: list[SavedValue], forward: list[fx.Node], again: list[fx.Node]
) -> RegionFigures:
    boundaries = [_boundary(b, b.name in record.transfers) for b in record.plan.boundaries if plan.name in b.regions]
    return RegionFigures(
        name=plan.name,
        layer=plan.layer,
        call=plan.call,
        treatment=plan.treatment.kind,
        save=plan.treatment.save or (),
        inside=plan.inside,
        nodes=len(forward),
        saved_bytes=sum(v.saved_bytes for v in saved),
        offloaded_bytes=sum(v.offloaded_bytes for v in saved),
        flops=total_flops(forward),
        recomputed_flops=total_flops(again),
        boundaries=tuple(boundaries),
        saved=tuple(saved),
    )


def _boundary(found: Boundary, offloaded: bool) -> BoundaryFigures:
    return BoundaryFigures(
        found.name,
        found.node,
        found.shape,
        dtype_text(found.dtype),
        found.nbytes,
        offloaded,
        found.regions,
        found.source,
    )


def _saved_value(
    record: GraphRecord, entry: count.Held, regions: Mapping[str, Region]
) -> tuple[str | None, SavedValue]:
    """A saved value, and the name of the region it is counted in."""
    node, val = entry.node, G.tensor(entry.node)
    assert val is not None
    why, where = _why(record, node, regions)
    shape = tuple(G.hint(s) for s in val.shape)
    base = G.view_base(node)
    source = G.source_line(node)
    if base.op == "placeholder":
        source = next((line for user in base.users if (line := G.source_line(user))), "")
    shares = None if entry.shares is None else entry.shares.name
    return where, SavedValue(
        node.name,
        why,
        shape,
        dtype_text(val.dtype),
        entry.held_bytes,
        entry.offloaded_bytes,
        shares,
        source,
    )


def _why(record: GraphRecord, node: fx.Node, regions: Mapping[str, Region]) -> tuple[Why, str | None]:
    region = count.region_of(node, regions)
    where = None if region is None else region.name
    tag = G.tag(node)
    if G.view_base(node).op == "placeholder" and tag is None:
        return Why.EARLIER, where
    if G.is_rng_state(node):
        return Why.RANDOM, where
    if tag is not None and tag.kind is G.Kind.BOUNDARY:
        readers = next((b.regions for b in record.plan.boundaries if b.name == tag.name), None)
        return (Why.EXIT, where) if readers is None else (Why.BOUNDARY, readers[0])
    if tag is not None and tag.kind is G.Kind.STATE:
        return Why.STATE, where
    if tag is not None and tag.kind is G.Kind.NAMED:
        return Why.NAMED, where
    plan = next((p for p in record.plan.regions if p.name == where), None)
    if plan is None:
        return Why.OUTSIDE, where
    if not plan.treatment.recompute and plan.inside is None:
        return Why.KEPT, where
    return (Why.POLICY if G.keeps_saved(node) else Why.ONCE), where


def _settings(settings: Settings) -> dict[str, Any]:
    return {
        "every_n": settings.every_n if settings.policy is None else None,
        "policy": None if settings.policy is None else _named(settings.policy),
        "offload": None if settings.offload is None else settings.offload.to,
        "layers": None if settings.layers is None else [_named(s) for s in settings.layers],
        "enabled": settings.enabled,
    }


def _named(spec: Any) -> str:
    if isinstance(spec, str):
        return spec
    return str(getattr(spec, "__qualname__", None) or repr(spec))
