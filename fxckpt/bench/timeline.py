"""Where the bytes go: what is in memory at each moment of a training step, by module and by kind.

Of a compiled step Inductor's own account is read, kernel by kernel, and its nodes are mapped back to the modules that
made them; a step that runs node by node is simulated. What an operator allocates inside itself is in neither; the peak
that was measured stands beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch import nn

import fxckpt
from fxckpt.bench.plot import check_plot, new_figure
from fxckpt.bench.step import TrainingStep
from fxckpt.bench.variants import KINDS, Variant, parse_variant
from fxckpt.decide.kernels import read_schedule
from fxckpt.decide.memory import OF_PARAMETERS, OTHER, RECOMPUTED, SAVED, GraphTimeline
from fxckpt.errors import SettingsError
from fxckpt.models.load import load
from fxckpt.models.spec import ModelSpec
from fxckpt.record import simulate_records
from fxckpt.show.tables import bytes_text
from fxckpt.torch_private import recorded_schedules

PLAIN = "fxckpt-plain"
COLOURS = {SAVED: "#2c5f8a", RECOMPUTED: "#c0392b", OF_PARAMETERS: "#7f8c8d", OTHER: "#e0b46c"}


@dataclass(frozen=True)
class Timeline:
    """The graphs of one training step, in the order of their compilation or of their run, and what was measured.

    Attributes:
        variant: the way that the step was run.
        graphs: the timelines of those that run a kernel.
        measured_bytes: peak of a step as it was measured, gradients included.
    """

    variant: str
    graphs: tuple[GraphTimeline, ...]
    measured_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Bytes at each step by kind, and what is in memory at each graph's peak, for JSON."""
        return {
            "variant": self.variant,
            "measured_bytes": self.measured_bytes,
            "graphs": [
                {
                    "is_backward": g.is_backward,
                    "modules": list(g.modules),
                    "bytes": g.bytes_by_kind(),
                    "peak": g.peak,
                    "alive": [vars(v) for v in g.alive(g.peak)],
                }
                for g in self.graphs
            ],
        }


def measure_timeline(spec: ModelSpec, variant: str) -> Timeline:
    """Capture a training step and read its memory.

    Args:
        spec: the model and its batch.
        variant: one whose graphs are captured, such as ``"fxckpt@1"``, ``"fxckpt-plain@1"`` or ``"hf-compile@1"``.

    Raises:
        SettingsError: there is no such model or variant, or the variant runs no graphs.
    """
    chosen = captured_variant(variant)
    torch.compiler.reset()
    model, batch = load(spec)
    run = KINDS[chosen.kind].make(model, chosen, spec)
    step = TrainingStep(model, run, batch, spec.seed)
    with recorded_schedules() as schedules:
        step.timed()
    step.timed()
    _, peak = step.memory()
    if chosen.kind == PLAIN:
        return Timeline(str(chosen), tuple(simulate_records(fxckpt.graphs(cast("nn.Module", run)))), peak)
    return Timeline(str(chosen), tuple(read_schedule(s) for s in schedules if s.kernels), peak)


def captured_variant(text: str) -> Variant:
    """One variant from its text.

    Raises:
        SettingsError: there is no such variant, or it runs no graphs.
    """
    chosen = parse_variant(text)
    if not chosen.compiled:
        raise SettingsError(f"--variants {text}: only what runs graphs has a timeline, such as fxckpt@1.")
    return chosen


# ---- shown ----------------------------------------------------------------------------------------------------------


def render_timeline(timeline: Timeline, rows: int = 16) -> RenderableType:
    """For each graph: its peak, the bytes of each kind, and the `rows` largest values in memory then."""
    parts: list[RenderableType] = []
    for graph in timeline.graphs:
        step = graph.peak
        kinds = {kind: at[step] for kind, at in graph.bytes_by_kind().items() if at[step]}
        what = "backward" if graph.is_backward else "forward"
        where = f" in {graph.modules[step]}" if graph.modules[step] else ""
        table = Table(
            title=f"{timeline.variant}, {what}: {bytes_text(sum(kinds.values()))} at step {step + 1} of "
            f"{len(graph.modules)}{where}\n" + ", ".join(f"{kind} {bytes_text(n)}" for kind, n in kinds.items()),
            title_justify="left",
            title_style="bold",
            box=box.SIMPLE_HEAD,
        )
        table.add_column("bytes", justify="right", no_wrap=True)
        for column in ("kind", "value", "module", "steps", "source"):
            table.add_column(column, no_wrap=column in ("kind", "steps"), overflow="fold")
        alive = graph.alive(step)
        for value in alive[:rows]:
            steps = f"{value.first + 1}–{value.last + 1}"
            cells = (bytes_text(value.nbytes), value.kind, value.name, value.module, steps, value.source)
            table.add_row(*map(Text, cells))
        if len(alive) > rows:
            rest = sum(v.nbytes for v in alive[rows:])
            table.add_row(bytes_text(rest), Text(f"{len(alive) - rows} more"))
        if graph.around:
            table.add_row(bytes_text(graph.around), Text("held for other graphs of the step"))
        parts.append(table)
    parts.append(Text(f"measured peak of the step: {bytes_text(timeline.measured_bytes)}", style="dim"))
    return Group(*parts)


def plot_timeline(timelines: Sequence[Timeline], path: Path) -> None:
    """Draw the bytes of each kind over the steps, a row of pictures for each timeline; all to one scale.

    Raises:
        SettingsError: matplotlib is missing, or there is no such format or folder.
    """
    check_plot(path)
    columns = max(len(t.graphs) for t in timelines)
    figure = new_figure(5 * columns, 3 * len(timelines))
    axes = figure.subplots(len(timelines), columns, squeeze=False, sharey=True)
    for row, timeline in zip(axes, timelines, strict=True):
        for place in row:
            place.set_axis_off()
        for place, graph in zip(row, timeline.graphs, strict=False):
            place.set_axis_on()
            _draw(place, graph.bytes_by_kind())
            what = "backward" if graph.is_backward else "forward"
            place.set_title(f"{timeline.variant}, {what}: {bytes_text(max(graph.totals))}", fontsize=9, loc="left")
    axes[0][0].legend(fontsize=8, loc="upper left", frameon=False)
    figure.savefig(path, dpi=150)


def _draw(axes: Any, kinds: Mapping[str, Sequence[int]]) -> None:
    steps = range(1, 1 + max(map(len, kinds.values())))
    stacks = [[n / 2**20 for n in kinds[kind]] for kind in COLOURS]
    axes.stackplot(steps, *stacks, labels=list(COLOURS), colors=list(COLOURS.values()), step="post", linewidth=0)
    axes.set_xlabel("step")
    axes.set_ylabel("MiB")
    axes.margins(x=0)
