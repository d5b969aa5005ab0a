"""The tables that ``print(explanation)`` gives. All figures come from the data; nothing is counted here but sums of rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fxckpt.show.data import Explanation, GraphFigures, RegionFigures, SavedValue, Why
from fxckpt.show.fold import fold_names, stem

WHY = {
    Why.BOUNDARY: "recompute starts from it",
    Why.EXIT: "read outside its recomputed region",
    Why.KEPT: "kept region",
    Why.STATE: "copy of an input that changes",
    Why.RANDOM: "random number state",
    Why.POLICY: "the model's own policy",
    Why.ONCE: "may run once only",
    Why.EARLIER: "from an earlier graph",
    Why.OUTSIDE: "outside every region",
}


def render(explanation: Explanation) -> RenderableType:
    """Tables: totals; the captured graphs where there are several; regions; saved values. Equal rows are folded."""
    current = explanation.current
    found: list[RenderableType] = [_title(explanation), _totals(explanation)]
    if len(explanation.graphs) > 1:
        found.append(_graphs(explanation.graphs))
    groups = _fold_regions(r for g in current for r in g.regions)
    found.append(_regions(groups, current))
    found.append(_saved(groups, [v for g in current for v in g.outside]))
    return Group(*found)


def bytes_text(count: int) -> str:
    """Bytes with a binary unit, ``1.5 KiB``."""
    size, units = float(count), ["KiB", "MiB", "GiB", "TiB"]
    if count < 1024:
        return f"{count} B"
    while units:
        size, unit = size / 1024, units.pop(0)
        if size < 1023.95 or not units:
            break
    return f"{size:.1f} {unit}"


def flops_text(count: int) -> str:
    """Floating point operations with a decimal unit, ``1.5 GFLOP``."""
    size, units = float(count), ["kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"]
    if count < 1000:
        return f"{count} FLOP"
    while units:
        size, unit = size / 1000, units.pop(0)
        if size < 999.95 or not units:
            break
    return f"{size:.1f} {unit}"


def _title(explanation: Explanation) -> Text:
    settings = explanation.settings
    chosen = f"every_n={settings['every_n']}" if settings["policy"] is None else f"policy={settings['policy']}"
    offload = "no offload" if settings["offload"] is None else f"offload to {settings['offload']}"
    return Text(f"{explanation.model}: {chosen}, {offload}", style="bold")


def _table(title: str, *columns: str, left: Sequence[str] = ()) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", no_wrap=column != "region")
    return table


def _totals(explanation: Explanation) -> Table:
    table = _table("one training step", "", "without fxckpt", "with fxckpt", left=("",))
    table.add_row(
        "saved on the device", bytes_text(explanation.baseline_saved_bytes), bytes_text(explanation.saved_bytes)
    )
    table.add_row("offloaded to the host", "-", bytes_text(explanation.offloaded_bytes))
    share = explanation.recomputed_flops / explanation.flops if explanation.flops else 0.0
    table.add_row("forward and backward", flops_text(explanation.flops), flops_text(explanation.flops))
    table.add_row("recomputed on top", "-", f"{flops_text(explanation.recomputed_flops)} ({share:.1%})")
    return table


def _graphs(graphs: Sequence[GraphFigures]) -> Table:
    table = _table(
        "captured graphs", "function", "inputs", "counted", "saved before", "saved", "offloaded", left=("function", "inputs")
    )
    table.columns[0].overflow = table.columns[1].overflow = "ellipsis"
    groups: dict[Any, list[GraphFigures]] = {}
    for graph in graphs:
        key = (stem(graph.root), graph.function, graph.inputs, graph.current, graph.saved_bytes, graph.offloaded_bytes)
        groups.setdefault((*key, graph.baseline_saved_bytes), []).append(graph)
    for members in groups.values():
        graph, roots = members[0], [g.root for g in members if g.root]
        table.add_row(
            Text(graph.function + (f" of {fold_names(roots)}" if roots else "")),
            Text(", ".join(graph.inputs)),
            f"{'yes' if graph.current else 'no'}" + (f" x {len(members)}" if len(members) > 1 else ""),
            bytes_text(sum(g.baseline_saved_bytes for g in members)),
            bytes_text(sum(g.saved_bytes for g in members)),
            bytes_text(sum(g.offloaded_bytes for g in members)),
        )
    return table


def _fold_regions(regions: Iterable[RegionFigures]) -> list[list[RegionFigures]]:
    """Regions that differ in nothing but numbers in their names, together, in order of the first."""
    groups: dict[Any, list[RegionFigures]] = {}
    for region in regions:
        values = tuple((*_value_key(v), v.saved_bytes, v.offloaded_bytes) for v in region.saved)
        inside = None if region.inside is None else stem(region.inside)
        key = (stem(region.name), region.treatment, inside, values, region.flops, region.recomputed_flops)
        groups.setdefault(key, []).append(region)
    return list(groups.values())


def _regions(groups: list[list[RegionFigures]], graphs: Sequence[GraphFigures]) -> Table:
    names = ("region", "treatment", "regions", "saved", "offloaded", "forward", "recomputed")
    table = _table("regions (a row gives the sum of its regions)", *names, left=names[:2])
    for members in groups:
        inside = fold_names(m.inside for m in members if m.inside is not None)
        table.add_row(
            Text(fold_names(m.name for m in members)),
            Text(f"in {inside}" if inside else members[0].treatment),
            str(len(members)),
            *_sums(members),
        )
    outside = [v for g in graphs for v in g.outside]
    flops = sum(g.flops for g in graphs)
    recomputed = sum(g.recomputed_flops for g in graphs)
    table.add_row(
        "outside every region",
        "",
        "",
        bytes_text(sum(v.saved_bytes for v in outside)),
        bytes_text(sum(v.offloaded_bytes for v in outside)),
    )
    del flops, recomputed
    return table


def _sums(members: Sequence[RegionFigures]) -> list[str]:
    return [
        bytes_text(sum(m.saved_bytes for m in members)),
        bytes_text(sum(m.offloaded_bytes for m in members)),
        flops_text(sum(m.flops for m in members)),
        flops_text(sum(m.recomputed_flops for m in members)),
    ]


def _value_key(value: SavedValue) -> tuple[Any, ...]:
    return value.why, value.dtype, value.shape, value.shares is None, value.source


def _saved(groups: list[list[RegionFigures]], outside: Sequence[SavedValue]) -> Table:
    """One row for each source line and reason; values that only share another's storage are left out."""
    names = ("region", "why", "value", "values", "saved", "offloaded", "source line")
    table = _table("saved for backward", *names, left=("region", "why", "value", "source line"))
    table.columns[-1].overflow = "ellipsis"
    rows = [(fold_names(m.name for m in members), [v for m in members for v in m.saved]) for members in groups]
    for region, values in [*rows, ("", outside)]:
        shown: dict[Any, list[SavedValue]] = {}
        for value in values:
            if value.shares is None:
                shown.setdefault(_value_key(value), []).append(value)
        for position, same in enumerate(shown.values()):
            table.add_row(
                Text(region if position == 0 else ""),
                Text(WHY[same[0].why]),
                Text(f"{same[0].dtype}{list(same[0].shape)}"),
                str(len(same)),
                bytes_text(sum(v.saved_bytes for v in same)),
                bytes_text(sum(v.offloaded_bytes for v in same)),
                Text(same[0].source),
            )
    return table
