"""The table that ``fxckpt bench`` prints. Figures come from the result; here they are only written out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fxckpt.bench.result import BenchResult, VariantResult
from fxckpt.show.tables import bytes_text, flops_text, seconds_text, spread_text

WIDTH = 160
"""Columns of the output where it does not go to a terminal."""
MARK = "●"
"""Stands before the variants of the Pareto frontier."""


def _or_blank(value: Any, text: Callable[[Any], str]) -> str:
    return "" if value is None else text(value)


def cells(result: VariantResult) -> dict[str, str]:
    """What the table says of one variant, by column; blank where nothing is known."""
    passes = ""
    if result.pass_seconds is not None and result.pass_share is not None:
        passes = f"{seconds_text(result.pass_seconds)} ({result.pass_share:.1%})"
    return {
        "variant": result.variant,
        "peak": _or_blank(result.peak_bytes, bytes_text),
        "held": _or_blank(result.held_bytes, bytes_text),
        "offloaded": _or_blank(result.offloaded_bytes, bytes_text),
        "step": _or_blank(result.seconds, seconds_text),
        "quartiles": _or_blank(result.spread, lambda s: spread_text(*s)),
        "stall": _or_blank(result.stall_share, lambda s: f"{s:.1%}"),
        "ratio": _or_blank(result.ratio, lambda r: f"{r:.3f}"),
        "first step": _or_blank(result.first_step_seconds, seconds_text),
        "graphs": _or_blank(result.graphs, str),
        "recomputed": _or_blank(result.recomputed_flops, flops_text),
        "passes": passes,
        "grad diff": _or_blank(result.gradient_difference, lambda d: f"{d:.1e}" if d else "0"),
    }


def title(result: BenchResult) -> str:
    """The model and its step, in one line."""
    model = result.model
    shapes = ", ".join(f"{k} {'x'.join(map(str, v)) or 'scalar'}" for k, v in model["batch"].items() if v != "None")
    return (
        f"{model['model']}: {model['parameters'] / 1e6:.1f} M parameters ({bytes_text(model['parameter_bytes'])}), "
        f"{result.spec.dtype or 'fp32'}, {shapes}"
    )


def legend(result: BenchResult) -> str:
    """What the columns mean, and on what machine they were read."""
    machine, settings, baseline = result.machine, result.settings, result.baseline
    transformers = f", transformers {machine['transformers']}" if machine["transformers"] else ""
    return (
        f"{MARK} Pareto frontier: no other variant is lower in peak or step, and not higher in the other.\n"
        f"peak: {settings['peak']}. held: allocated after the forward, for the backward. offloaded: in host memory or "
        "on a disk, by fxckpt's count. stall: the part of a step that waited for a copy.\n"
        f"step: forward and backward, median of {settings['rounds']} interleaved rounds of {settings['steps']}. "
        f"ratio: median of the rounds' ratios to {baseline.variant if baseline else 'the first variant'}. "
        "first step: with an empty compile cache.\n"
        "recomputed: FLOPs on top of a step. passes: fxckpt's own, without PyTorch's partitioner, and their part of "
        "the first step.\n"
        "grad diff: the largest relative difference of a parameter's gradient from eager's.\n"
        f"{machine['device']}, {machine['threads']} threads of {machine['cores']} cores; torch {machine['torch']}"
        f"{transformers}, fxckpt {machine['fxckpt']}, Python {machine['python']}; {settings['date']}"
    )


def render(result: BenchResult) -> RenderableType:
    """The table, what its columns mean, and the variants that failed. Columns without a figure are left out."""
    rows = [cells(v) for v in result.variants]
    columns = [c for c in cells(VariantResult("", False)) if any(row[c] for row in rows)]
    table = Table(
        title=title(result), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    table.add_column("", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="left" if column == "variant" else "right", no_wrap=True)
    frontier = result.frontier
    for variant, found in zip(result.variants, rows, strict=True):
        on = variant.variant in frontier
        if variant.error is not None:
            found["peak"] = found["peak"] or "failed"
        style = "bold" if on else "dim" if variant.error is not None else ""
        table.add_row(MARK if on else "", *(Text(found[c]) for c in columns), style=style)
    parts: list[RenderableType] = [table, Text(legend(result), style="dim")]
    parts += [Text(f"{v.variant} failed: {v.error}", style="red" if v.ours else "") for v in result.failed]
    return Group(*parts)
