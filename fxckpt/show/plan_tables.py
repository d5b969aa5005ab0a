"""The tables of a plan, and of plans side by side."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fxckpt.decide.plan import LayerPlan, Plan
from fxckpt.show.fold import fold_names, stem
from fxckpt.show.sweep import Sweep, SweepRow, predicted_seconds, recomputed_share
from fxckpt.show.tables import MARK, bytes_text, flops_text, seconds_text


def render_plan(plan: Plan) -> RenderableType:
    """Totals of the step, and what becomes of the layers, equal ones in one row."""
    title = f"{plan.model}, {way_text(plan)}: what a training step will cost"
    return Group(Text(title, style="bold"), _totals(plan), _layers(plan))


def way_text(plan: Plan) -> str:
    """How the graphs are run."""
    return "under torch.compile" if plan.compiled else "with ordinary kernels"


def figures(plan: Plan) -> list[tuple[str, str]]:
    """Names and texts of the plan's totals."""
    place = "nowhere" if plan.offload is None else "a disk" if plan.offload.to == "disk" else "the host"
    seconds = predicted_seconds(plan)
    state = plan.optimizer_bytes
    return [
        ("parameters and buffers", bytes_text(plan.parameter_bytes)),
        *([("what the optimizer keeps", bytes_text(state))] if state is not None else []),
        ("peak of the step on top of them, gradients included", bytes_text(plan.peak_bytes)),
        ("saved for backward on the device", bytes_text(plan.saved_bytes)),
        (f"offloaded to {place}", bytes_text(plan.offloaded_bytes)),
        ("forward and backward", flops_text(plan.flops)),
        ("recomputed on top", f"{flops_text(plan.recomputed_flops)} ({recomputed_share(plan):.1%})"),
        ("predicted time", "unknown" if seconds is None else seconds_text(seconds)),
    ]


def _totals(plan: Plan) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_header=False, pad_edge=False)
    table.add_column("figure", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    for figure, value in figures(plan):
        table.add_row(figure, value)
    table.add_row("batch", ", ".join(f"{name} {text}" for name, text in plan.batch.items()))
    return table


def _layers(plan: Plan) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("layers", overflow="fold")
    for column in ("number", "treatment", "saved", "offloaded", "recomputed"):
        table.add_column(column, justify="left" if column == "treatment" else "right", no_wrap=True)
    for layers in fold_layers(plan):
        one, count = layers[0], len(layers)
        table.add_row(
            Text(fold_names(layer.name for layer in layers)),
            str(count),
            one.decided.text,
            bytes_text(count * one.saved_bytes),
            bytes_text(count * one.offloaded_bytes),
            flops_text(count * one.recomputed_flops),
        )
    return table


def fold_layers(plan: Plan) -> list[list[LayerPlan]]:
    """Layers that differ in nothing but numbers in their names, together, in order of the first."""
    rows: dict[tuple[object, ...], list[LayerPlan]] = {}
    for layer in plan.layers:
        figures = (layer.decided, layer.saved_bytes, layer.offloaded_bytes, layer.recomputed_flops)
        rows.setdefault((stem(layer.name), *figures), []).append(layer)
    return list(rows.values())


def render_sweep(sweep: Sweep) -> RenderableType:
    """A row for each choice of settings, those of the frontier marked."""
    table = Table(
        title="settings side by side", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False
    )
    table.add_column("", no_wrap=True)
    for column in SWEEP_COLUMNS:
        table.add_column(column, justify="left" if column == "settings" else "right", no_wrap=True)
    frontier = sweep.frontier
    for row in sweep.rows:
        on = row.name in frontier
        table.add_row(MARK if on else "", *sweep_cells(sweep, row), style="bold" if on else "")
    return Group(table, Text(sweep_legend(sweep), style="dim"))


SWEEP_COLUMNS = ("settings", "layers recomputed", "peak", "ratio", "saved", "offloaded", "recomputed", "predicted")


def sweep_cells(sweep: Sweep, row: SweepRow) -> list[str]:
    """What the table says of one row, by ``SWEEP_COLUMNS``."""
    plan, first = row.plan, sweep.rows[0].plan
    seconds = predicted_seconds(plan)
    return [
        row.name,
        f"{sum(layer.treatment == 'recompute' for layer in plan.layers)} of {len(plan.layers)}",
        bytes_text(plan.peak_bytes),
        f"{plan.peak_bytes / first.peak_bytes:.2f}" if first.peak_bytes else "",
        bytes_text(plan.saved_bytes),
        bytes_text(plan.offloaded_bytes),
        f"{recomputed_share(plan):.1%}",
        "unknown" if seconds is None else seconds_text(seconds),
    ]


def sweep_legend(sweep: Sweep) -> str:
    """What the columns mean."""
    cost = "predicted time" if sweep.has_seconds else "recomputed share"
    to_host = any(row.plan.offload is not None and row.plan.offload.to == "cpu" for row in sweep.rows)
    copies = " Copies on the host count in the peak, as on a CPU, where they lie in the same memory." if to_host else ""
    return (
        f"{MARK} frontier: no other row is lower in peak or {cost}, and not higher in the other.\n"
        "peak: of the step, gradients included, on top of parameters and batch; ratio: to the first row. "
        "saved: on the device, for backward. recomputed: FLOPs on top of the step's. predicted: time of a step."
        f"{copies}"
    )
