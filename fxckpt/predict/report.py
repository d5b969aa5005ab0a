"""Make the page about a plan: capture the step as planned and with nothing recomputed, and plan other settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import fx

from fxckpt import graph as G
from fxckpt.config import Offload, Settings
from fxckpt.decide.kernels import simulate_kernels
from fxckpt.decide.memory import GraphTimeline, simulate
from fxckpt.decide.plan import Plan
from fxckpt.predict.capture import CapturedStep, Captures
from fxckpt.predict.plan import Target
from fxckpt.predict.steps import with_schedules
from fxckpt.predict.sweep import Progress, make_sweep, row_of, usual_settings
from fxckpt.record import GraphRecord, current_records, step_graphs
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
    captures: Captures,
    settings: Settings,
    target: Target | None = None,
    *,
    budgets: int = 0,
    on_progress: Progress = lambda done, total, what: None,
) -> Report:
    """The page about one training step of ``transform(model, ...)``.

    For its pictures the step is captured with all of its layers.

    Args:
        captures: of the original model and a batch.
        settings: as ``transform`` makes them.
        target: what it is planned for; None: ordinary kernels on a CPU.
        budgets: so many rows with budgets stand among the settings side by side.
        on_progress: told before each capture.

    Raises:
        CaptureError: the step cannot be captured, or not without knowing the contents of tensors.
        NoLayersError: the model has no boundary layer.
    """

    def tell(done: int, total: int, what: str) -> None:
        on_progress(done, total + 2, what)  # two captures follow

    target = target or Target()
    choices = [*usual_settings(settings, settings.offload or Offload()), settings]
    sweep = make_sweep(captures, choices, target, budgets=budgets, on_progress=tell)
    number = len(sweep.rows)
    planned = row_of(sweep, captures.model, settings)
    chosen = replace(settings, budget=None, policy=planned.plan.policy)
    tell(number, number, "memory with nothing recomputed")
    before = _run(sweep.rows[0], captures.step(choices[0], compiled=target.compiled), target)
    tell(number + 1, number, f"memory with {planned.name}")
    after = _run(planned, captures.step(chosen, compiled=target.compiled), target)
    return Report(planned.plan, sweep, render_report(sweep, before, after))


def _run(row: SweepRow, step: CapturedStep, target: Target) -> Run:
    return Run(row, step_timelines(step, one_memory=target.one_memory), _offloaded(step.records))


def step_timelines(step: CapturedStep, *, one_memory: bool = True) -> list[GraphTimeline]:
    """The memory of a step's graphs. Run node by node, their inputs are one step, since nothing runs between them.

    Args:
        step: a captured step.
        one_memory: whether host copies lie in the device's memory.
    """
    current = current_records(step.records)
    if step.schedules is not None:
        return simulate_kernels(with_schedules(current, step.schedules, one_memory))
    graphs = [r.forward.graph for r in current] + [r.backward.graph for r in reversed(current)]
    found = zip(simulate([step_graphs(r, one_memory) for r in current]), graphs, strict=True)
    return [begun_at_once(timeline, len(G.placeholders(graph))) for timeline, graph in found]


def _offloaded(records: Sequence[GraphRecord]) -> frozenset[str]:
    """Names of the values that are offloaded, of their copies, and of what comes back."""
    found = set()
    for record in current_records(records):
        for node in record.forward.graph.nodes:
            if G.is_offload(node) and isinstance(node.args[0], fx.Node):
                found |= {node.name, G.storage_of(node.args[0])[0].name}
        found |= {node.name for node in record.backward.graph.nodes if G.is_reload(node)}
    return frozenset(found)
