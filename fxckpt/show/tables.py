"""The tables that ``print(explanation)`` gives. Figures come from the data; here they are summed up in rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fxckpt.runtime.stats import TransferStats
from fxckpt.show.data import Explanation, GraphFigures, RegionFigures, SavedValue, Why
from fxckpt.show.fold import fold_names, stem

REGION_WIDTH = 30
"""Columns of the names of regions in the table of saved values; longer ones wrap."""
WHY = {
    Why.BOUNDARY: "a recomputed region starts from it",
    Why.EXIT: "of a recomputed region, and read outside it",
    Why.KEPT: "of a kept region",
    Why.STATE: "copy of an input that the step changes",
    Why.RANDOM: "state of the random number generator",
    Why.POLICY: "the model's own checkpoint policy saves it",
    Why.ONCE: "of a recomputed region, but may run once only",
    Why.EARLIER: "activation of an earlier graph",
    Why.OUTSIDE: "outside every region",
}
"""What the table says of each reason."""


def render(explanation: Explanation) -> RenderableType:
    """Tables: totals; the captured graphs where there are several; regions; saved values. Equal rows are folded."""
    current = explanation.current
    found: list[RenderableType] = [_title(explanation), _totals(explanation)]
    if explanation.transfers.offloads:
        found.append(_transfers(explanation.transfers))
    if len(explanation.graphs) > 1:
        found.append(_graphs(explanation.graphs))
    groups = _fold_regions(r for g in current for r in g.regions)
    found += [_regions(groups, current), _saved(current)]
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


def seconds_text(seconds: float) -> str:
    """Seconds with a unit, ``1.52 s`` or ``38.1 ms``."""
    return f"{_digits(seconds)} s" if seconds >= 0.9995 else f"{_digits(seconds * 1000)} ms"


def spread_text(low: float, high: float) -> str:
    """Two times as a range with one unit, ``1.50–1.55 s``."""
    factor, unit = (1.0, "s") if high >= 0.9995 else (1000.0, "ms")
    return f"{_digits(low * factor)}–{_digits(high * factor)} {unit}"


def _digits(number: float) -> str:
    """Three digits, or all of a whole number."""
    return f"{number:.0f}" if number >= 99.95 else f"{number:#.3g}"


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
    place = {"disk": "to a disk"}.get(explanation.settings["offload"], "to the host")
    table.add_row(f"offloaded {place}", "-", bytes_text(explanation.offloaded_bytes))
    share = explanation.recomputed_flops / explanation.flops if explanation.flops else 0.0
    table.add_row("forward and backward", flops_text(explanation.flops), flops_text(explanation.flops))
    table.add_row("recomputed on top", "-", f"{flops_text(explanation.recomputed_flops)} ({share:.1%})")
    return table


def _transfers(stats: TransferStats) -> Table:
    table = _table("transfers of the last step", "", "number", "bytes", "copying", left=("",))
    table.add_row(
        "out of the device", str(stats.offloads), bytes_text(stats.offloaded_bytes), _ms(stats.offload_seconds)
    )
    table.add_row("back to it", str(stats.reloads), bytes_text(stats.reloaded_bytes), _ms(stats.reload_seconds))
    table.add_row("the computation waited", "", "", _ms(stats.stall_seconds))
    table.add_row("most on the way out at once", "", bytes_text(stats.in_flight_bytes), "")
    table.add_row("most in host memory", "", bytes_text(stats.host_bytes), "")
    if stats.disk_bytes:
        table.add_row("most on a disk", "", bytes_text(stats.disk_bytes), "")
    return table


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"


def _graphs(graphs: Sequence[GraphFigures]) -> Table:
    names = ("function", "inputs", "counted", "without", "saved", "offloaded")
    table = _table("captured graphs", *names, left=names[:2])
    table.expand = True
    for column, ratio in zip(table.columns, (3, 2), strict=False):
        column.ratio, column.overflow = ratio, "ellipsis"
    groups: dict[Any, list[GraphFigures]] = {}
    for graph in graphs:
        key = (stem(graph.root), graph.function, graph.inputs, graph.current, graph.saved_bytes, graph.offloaded_bytes)
        groups.setdefault((*key, graph.baseline_saved_bytes), []).append(graph)
    for members in groups.values():
        graph, roots = members[0], [g.root for g in members if g.root]
        table.add_row(
            Text(_function_text(graph.function) + (f" of {fold_names(roots)}" if roots else "")),
            Text(", ".join(short_type(i) for i in graph.inputs)),
            f"{'yes' if graph.current else 'no'}" + (f" x {len(members)}" if len(members) > 1 else ""),
            bytes_text(sum(g.baseline_saved_bytes for g in members)),
            bytes_text(sum(g.saved_bytes for g in members)),
            bytes_text(sum(g.offloaded_bytes for g in members)),
        )
    return table


def _function_text(function: str) -> str:
    """A function's name; of Dynamo's resume functions, the name of the function they are the rest of."""
    place, _, name = function.partition(" in ")
    inner = name.removeprefix("torch_dynamo_resume_in_").rpartition("_at_")[0]
    return f"{place} rest of {inner}" if name.startswith("torch_dynamo_resume_in_") else f"{place} {name}"


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
    table.add_row(
        "outside every region",
        "",
        "",
        bytes_text(sum(v.saved_bytes for v in outside)),
        bytes_text(sum(v.offloaded_bytes for v in outside)),
    )
    return table


def _sums(members: Sequence[RegionFigures]) -> list[str]:
    return [
        bytes_text(sum(m.saved_bytes for m in members)),
        bytes_text(sum(m.offloaded_bytes for m in members)),
        flops_text(sum(m.flops for m in members)),
        flops_text(sum(m.recomputed_flops for m in members)),
    ]


def _saved(graphs: Sequence[GraphFigures]) -> Table:
    """One row for each source line and reason; values that only share another's storage are left out."""
    names = ("region", "why", "value", "values", "saved", "offloaded", "source line")
    table = _table("saved for backward", *names, left=("region", "why", "value", "source line"))
    table.expand = True
    table.columns[0].max_width, table.columns[0].overflow = REGION_WIDTH, "fold"
    table.columns[-1].ratio, table.columns[-1].overflow = 1, "ellipsis"
    rows: dict[Any, list[tuple[str, SavedValue]]] = {}
    for name, value in _values(graphs):
        if value.shares is None:
            rows.setdefault((stem(name), *_value_key(value)), []).append((name, value))
    previous = ""
    for same in rows.values():
        values = [value for _, value in same]
        region = fold_names(name for name, _ in same) or "-"
        table.add_row(
            Text(region if region != previous else ""),
            values[0].why.value,
            Text(short_type(f"{values[0].dtype}{list(values[0].shape)}")),
            str(len(values)),
            bytes_text(sum(v.saved_bytes for v in values)),
            bytes_text(sum(v.offloaded_bytes for v in values)),
            Text(_short_source(values[0].source)),
        )
        previous = region
    used = {value.why for _, value in _values(graphs)}
    table.caption = Text("; ".join(f"{why.value}: {text}" for why, text in WHY.items() if why in used))
    table.caption_justify = "left"
    return table


def _values(graphs: Sequence[GraphFigures]) -> list[tuple[str, SavedValue]]:
    """All saved values with the name of their region, those of outside last."""
    inside = [(r.name, v) for g in graphs for r in g.regions for v in r.saved]
    return inside + [("", v) for g in graphs for v in g.outside]


def _value_key(value: SavedValue) -> tuple[Any, ...]:
    return value.why, value.dtype, value.shape, value.offloaded_bytes > 0, value.source


def short_type(text: str) -> str:
    """``f32[2, 16, 32]`` for ``float32[2, 16, 32]``, as PyTorch prints graphs."""
    dtype, _, shape = text.partition("[")
    kind = dtype.rstrip("0123456789")
    short = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c", "bool": "b8"}.get(kind, kind)
    return f"{short}{dtype[len(kind) :]}[{shape}"


def _short_source(source: str) -> str:
    """A source line without its folder and function."""
    place, _, code = source.partition(": ")
    return f"{place.partition(' in ')[0].rpartition('/')[2]} {code}"
