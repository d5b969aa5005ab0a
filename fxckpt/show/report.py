"""One page about a plan, complete in itself: pictures of the step's memory and of the settings, and tables.

The page's form is in ``page/``: its text, its style and the program that draws the pictures. Here the tables are made,
which can be read without that program, and the data that it draws. Whatever comes from a model is escaped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import Any

from fxckpt.config import VERSION
from fxckpt.decide.memory import GraphTimeline, Value
from fxckpt.decide.plan import Plan
from fxckpt.show.fold import fold_names, stem
from fxckpt.show.plan_tables import SWEEP_COLUMNS, figures, fold_layers, sweep_cells, sweep_legend, way_text
from fxckpt.show.report_data import run_data
from fxckpt.show.sweep import Sweep, SweepRow
from fxckpt.show.tables import bytes_text, flops_text

LARGEST = 12
"""So many rows of values are listed at the peak."""
SCRIPTS = ("data.js", "memory.js", "settings.js", "begin.js")


@dataclass(frozen=True)
class Run:
    """One way to run the step, and its memory.

    Attributes:
        row: its settings and its plan.
        timelines: the memory of its graphs, forwards in order, then backwards in reverse order.
        offloaded: names of values that are offloaded, of their copies, and of what comes back.
    """

    row: SweepRow
    timelines: Sequence[GraphTimeline]
    offloaded: Collection[str] = ()


def render_report(sweep: Sweep, before: Run, planned: Run) -> str:
    """The page.

    Args:
        sweep: the settings to show side by side; `planned` is one of them.
        before: the step with nothing recomputed.
        planned: the step as it is planned.
    """
    plan = planned.row.plan
    page = files("fxckpt.show") / "page"
    batch = ", ".join(f"{name} {text}" for name, text in plan.batch.items())
    parts = {
        "title": escape(f"{plan.model}: what a training step will cost"),
        "subtitle": escape(f"{planned.row.name}, {way_text(plan)}. Batch: {batch}."),
        "style": (page / "report.css").read_text(encoding="utf-8"),
        "script": "\n".join((page / name).read_text(encoding="utf-8") for name in SCRIPTS),
        "figures": _figures(before.row, planned.row),
        "peak": _peak(planned),
        "settings": _settings(sweep, planned.row),
        "layers": _layers(plan),
        "footer": escape(f"Made by fxckpt {VERSION}, before the step ran."),
        "data": _json(_data(sweep, before, planned)),
    }
    template = (page / "report.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def _data(sweep: Sweep, before: Run, planned: Run) -> dict[str, Any]:
    frontier = sweep.frontier
    cost = "predicted time" if sweep.has_seconds else "recomputed share"
    return {
        "runs": [
            {
                "name": run.row.name,
                **run_data(run.timelines, {x.name: x.decided.text for x in run.row.plan.layers}, run.offloaded),
            }
            for run in ([planned] if before.row == planned.row else [before, planned])
        ],
        "cost": cost,
        "costLabel": "predicted time of a step" if sweep.has_seconds else "recomputed FLOPs, as a part of the step's",
        "settings": [
            {
                "name": row.name,
                "peak": row.plan.peak_bytes,
                "cost": sweep.cost(row),
                "offload": row.plan.offload is not None,
                "frontier": row.name in frontier,
                "planned": row.name == planned.row.name,
            }
            for row in sweep.rows
        ],
    }


def _json(data: Any) -> str:
    """JSON that may stand inside of a script element."""
    text = json.dumps(data, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


# ---- tables ---------------------------------------------------------------------------------------------------------


def _table(
    columns: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]], left: Collection[str] = (), caption: str = ""
) -> str:
    """A table of texts, which are escaped; each row has a class, and its first cell names it."""
    classes = ["" if name in left or i == 0 else ' class="number"' for i, name in enumerate(columns)]
    head = "".join(f'<th scope="col"{c}>{escape(name)}</th>' for name, c in zip(columns, classes, strict=True))
    body = []
    for kind, (first, *rest) in rows:
        cells = "".join(f"<td{c}>{escape(text)}</td>" for text, c in zip(rest, classes[1:], strict=True))
        body.append(f'<tr class="{kind}"><th scope="row">{escape(first)}</th>{cells}</tr>')
    note = f"<caption>{escape(caption)}</caption>" if caption else ""
    return (
        f'<div class="scroll"><table>{note}<thead><tr>{head}</tr></thead>\n<tbody>\n'
        + "\n".join(body)
        + "\n</tbody></table></div>"
    )


def _figures(before: SweepRow, planned: SweepRow) -> str:
    rows = [(name, old, new) for (_, old), (name, new) in zip(figures(before.plan), figures(planned.plan), strict=True)]
    return _table(("", before.name, f"planned: {planned.name}"), [("", row) for row in rows])


def _peak(run: Run) -> str:
    timeline = max(run.timelines, key=lambda t: t.peak_bytes)
    step = timeline.peak
    kinds = ", ".join(f"{kind} {bytes_text(at[step])}" for kind, at in timeline.bytes_by_kind().items() if at[step])
    same: dict[tuple[object, ...], list[Value]] = {}
    for value in timeline.alive(step):
        same.setdefault((value.kind, value.nbytes, stem(value.module), value.source), []).append(value)
    groups = sorted(same.values(), key=lambda values: -sum(v.nbytes for v in values))
    rows = [("", _values_cells(values)) for values in groups[:LARGEST]]
    rest = sum(v.nbytes for values in groups[LARGEST:] for v in values) + timeline.around
    if rest:
        rows.append(("", ("all others", bytes_text(rest), "", "", "")))
    where = f" in {timeline.modules[step]}" if timeline.modules[step] else ""
    what = f"{'backward' if timeline.is_backward else 'forward'}{where}"
    caption = f"{run.row.name}: {bytes_text(timeline.peak_bytes)} at once, in the {what}: {kinds}."
    return _table(("value", "bytes", "kind", "module", "source line"), rows, ("kind", "module", "source line"), caption)


def _values_cells(values: Sequence[Value]) -> tuple[str, ...]:
    """A row of values that differ in nothing but their names, and in numbers in those of their modules."""
    one, more = values[0], len(values) - 1
    name = f"{one.name} and {more} more" if more else one.name
    modules = fold_names(v.module for v in values)
    return name, bytes_text(sum(v.nbytes for v in values)), one.kind, modules, one.source


def _settings(sweep: Sweep, planned: SweepRow) -> str:
    frontier = sweep.frontier
    rows = []
    for row in sweep.rows:
        name, *cells = sweep_cells(sweep, row)
        on = row.name in frontier
        kinds = " ".join(["frontier"] * on + ["planned"] * (row.name == planned.name))
        rows.append((kinds, (name + (" (planned)" if row.name == planned.name else ""), "yes" if on else "", *cells)))
    return _table((SWEEP_COLUMNS[0], "frontier", *SWEEP_COLUMNS[1:]), rows, ("frontier",), sweep_legend(sweep))


def _layers(plan: Plan) -> str:
    rows = []
    for layers in fold_layers(plan):
        one, count = layers[0], len(layers)
        sums = (count * one.saved_bytes, count * one.offloaded_bytes)
        cells = (*map(bytes_text, sums), flops_text(count * one.recomputed_flops))
        rows.append(("", (fold_names(layer.name for layer in layers), str(count), one.decided.text, *cells)))
    columns = ("layers", "number", "treatment", "saved", "offloaded", "recomputed")
    return _table(columns, rows, ("treatment",), "Equal layers are in one row, which gives their sum.")
