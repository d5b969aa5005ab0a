"""Several settings of one model side by side, each with its plan."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fxckpt.decide.pareto import pareto
from fxckpt.decide.plan import Plan

if TYPE_CHECKING:
    from rich.console import RenderableType

WIDTH = 120
"""Columns of the text that ``str(sweep)`` gives."""


@dataclass(frozen=True)
class SweepRow:
    """One choice of settings.

    Attributes:
        name: what is chosen, such as ``"every_n=2, offload"``.
        plan: what it costs.
    """

    name: str
    plan: Plan


@dataclass(frozen=True, repr=False)
class Sweep:
    """Plans of one training step under several settings; prints as a table.

    Attributes:
        rows: the settings and their plans, in the order of the table. The first is what others are compared with.
    """

    rows: tuple[SweepRow, ...]

    @property
    def has_seconds(self) -> bool:
        """Whether the time of every row is predicted."""
        return all(predicted_seconds(row.plan) is not None for row in self.rows)

    def cost(self, row: SweepRow) -> float:
        """What a row pays for its memory: seconds where all are predicted, else the share that is recomputed."""
        seconds = predicted_seconds(row.plan)
        return seconds if self.has_seconds and seconds is not None else recomputed_share(row.plan)

    @property
    def frontier(self) -> tuple[str, ...]:
        """Names of the rows that no other row beats in peak and :meth:`cost`, by peak."""
        return pareto({row.name: (row.plan.peak_bytes, self.cost(row)) for row in self.rows})

    def to_dict(self) -> dict[str, Any]:
        """``rows``: the plans' own dicts, each with its ``name`` and whether it is on the ``frontier``; for JSON."""
        frontier = self.frontier
        rows = [{"name": row.name, "frontier": row.name in frontier, **row.plan.to_dict()} for row in self.rows]
        return {"cost": "predicted_seconds" if self.has_seconds else "recomputed_flops", "rows": rows}

    def to_json(self, indent: int | None = 2) -> str:
        """:meth:`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=indent)

    def __rich__(self) -> RenderableType:
        from fxckpt.show.plan_tables import render_sweep

        return render_sweep(self)

    def __str__(self) -> str:
        from rich.console import Console

        text = io.StringIO()
        Console(file=text, width=WIDTH, force_terminal=False, color_system=None).print(self)
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())

    def __repr__(self) -> str:
        return f"<fxckpt.Sweep of {len(self.rows)} settings; print it, or use .to_dict()>"


def recomputed_share(plan: Plan) -> float:
    """FLOPs that recomputing adds, as a part of those of the step."""
    return plan.recomputed_flops / plan.flops if plan.flops else 0.0


def predicted_seconds(plan: Plan) -> float | None:
    """The time of a step, where the plan has one."""
    seconds: float | None = getattr(plan, "predicted_seconds", None)
    return seconds
