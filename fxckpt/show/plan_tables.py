"""The tables of a plan."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fxckpt.decide.plan import LayerPlan, Plan
from fxckpt.show.fold import fold_names, stem
from fxckpt.show.tables import bytes_text, flops_text, seconds_text


def render_plan(plan: Plan) -> RenderableType:
    """Totals of the step, and what becomes of the layers, equal ones in one row."""
    way = "under torch.compile" if plan.compiled else "with ordinary kernels"
    return Group(
        Text(f"{plan.model}, {way}: what a training step will cost", style="bold"), _totals(plan), _layers(plan)
    )


def _totals(plan: Plan) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_header=False, pad_edge=False)
    table.add_column("figure", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    place = "nowhere" if plan.offload is None else "a disk" if plan.offload.to == "disk" else "the host"
    seconds = "unknown" if plan.predicted_seconds is None else seconds_text(plan.predicted_seconds)
    share = plan.recomputed_flops / plan.flops if plan.flops else 0.0
    for figure, value in (
        ("parameters and buffers", bytes_text(plan.parameter_bytes)),
        ("peak of the step on top of them, gradients included", bytes_text(plan.peak_bytes)),
        ("saved for backward on the device", bytes_text(plan.saved_bytes)),
        (f"offloaded to {place}", bytes_text(plan.offloaded_bytes)),
        ("forward and backward", flops_text(plan.flops)),
        ("recomputed on top", f"{flops_text(plan.recomputed_flops)} ({share:.1%})"),
        ("predicted time", seconds),
    ):
        table.add_row(figure, value)
    table.add_row("batch", ", ".join(f"{name} {text}" for name, text in plan.batch.items()))
    return table


def _layers(plan: Plan) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("layers", overflow="fold")
    for column in ("number", "treatment", "saved", "offloaded", "recomputed"):
        table.add_column(column, justify="left" if column == "treatment" else "right", no_wrap=True)
    rows: dict[tuple[object, ...], list[LayerPlan]] = {}
    for layer in plan.layers:
        figures = (layer.treatment, layer.saved_bytes, layer.offloaded_bytes, layer.recomputed_flops)
        rows.setdefault((stem(layer.name), *figures), []).append(layer)
    for layers in rows.values():
        one, count = layers[0], len(layers)
        table.add_row(
            Text(fold_names(layer.name for layer in layers)),
            str(count),
            one.treatment,
            bytes_text(count * one.saved_bytes),
            bytes_text(count * one.offloaded_bytes),
            flops_text(count * one.recomputed_flops),
        )
    return table
