"""Make the page about a plan: capture the step as planned and with nothing recomputed, and plan other settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from fxckpt import graph as G
from fxckpt.config import Offload, Settings
from fxckpt.decide.memory import GraphTimeline
from fxckpt.decide.plan import Plan
from fxckpt.pipeline import GraphRecord, current_records, simulate_records
from fxckpt.predict.capture import capture_step
from fxckpt.predict.sweep import Progress, make_sweep, row_of, usual_settings
from fxckpt.show.report import Run, render_report
from fxckpt.show.report_data import begun_at_once
from fxckpt.show.sweep import Sweep, SweepRow


@dataclass(frozen=True)
class Report:
    """A page, and what it was made from.

    Attributes:
        plan: what becomes of the step.
        sweep: other settings beside it.
        html: the page, complete in itself.
    """

    plan: Plan
    sweep: Sweep
    html: str


def make_report(
    model: nn.Module,
    batch: Mapping[str, Any],
    settings: Settings,
    *,
    compiled: bool = False,
    on_progress: Progress = lambda done, total, what: None,
) -> Report:
    """The page about one training step of ``transform(model, ...)``.

    For its pictures the step is captured with all of its layers, two times.

    Args:
        model: the original model, in the mode (training or not) that it is to run in. It is not run, nor changed.
        batch: keyword arguments of a call. Only shapes, types and strides of its tensors matter.
        settings: as ``transform`` makes them.
        compiled: whether Inductor is to compile the graphs.
        on_progress: told before each capture.

    Raises:
        CaptureError: the step cannot be captured, or not without knowing the contents of tensors.
        NoLayersError: the model has no boundary layer.
    """

    def tell(done: int, total: int, what: str) -> None:
        on_progress(done, total + 2, what)  # two captures follow

    choices = [*usual_settings(settings, settings.offload or Offload()), settings]
    sweep = make_sweep(model, batch, choices, compiled=compiled, on_progress=tell)
    number = len(sweep.rows)
    planned = row_of(sweep, model, settings)
    tell(number, number, "memory with nothing recomputed")
    before = _run(sweep.rows[0], capture_step(model, batch, choices[0], compiled=compiled))
    tell(number + 1, number, f"memory with {planned.name}")
    after = _run(planned, capture_step(model, batch, settings, compiled=compiled))
    return Report(planned.plan, sweep, render_report(sweep, before, after))


def _run(row: SweepRow, records: list[GraphRecord]) -> Run:
    return Run(row, step_timelines(records), _offloaded(records))


def step_timelines(records: list[GraphRecord]) -> list[GraphTimeline]:
    """The memory of a step's graphs; of each the inputs, between which nothing runs, are one step."""
    current = current_records(records)
    graphs = [r.forward.graph for r in current] + [r.backward.graph for r in reversed(current)]
    found = zip(simulate_records(records), graphs, strict=True)
    return [begun_at_once(timeline, len(G.placeholders(graph))) for timeline, graph in found]


def _offloaded(records: list[GraphRecord]) -> frozenset[str]:
    """Names of the values that are offloaded, of their copies, and of what comes back."""
    found = set()
    for record in current_records(records):
        for node in record.forward.graph.nodes:
            if G.is_offload(node) and isinstance(node.args[0], fx.Node):
                found |= {node.name, G.storage_of(node.args[0])[0].name}
        found |= {node.name for node in record.backward.graph.nodes if G.is_reload(node)}
    return frozenset(found)
