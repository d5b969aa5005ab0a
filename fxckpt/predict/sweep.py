"""Plan several settings of one model, to choose among them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from fxckpt.config import Offload, Settings
from fxckpt.decide.layers import boundary_layers
from fxckpt.decide.plan import Plan
from fxckpt.decide.policy import Given, decide_layers
from fxckpt.errors import SettingsError
from fxckpt.predict.capture import Captures
from fxckpt.predict.plan import Target, make_plan
from fxckpt.show.sweep import Sweep, SweepRow

if TYPE_CHECKING:
    from fxckpt.predict.budget import BudgetPlanner

EVERY_N = (1, 2, 3, 4)
NOTHING = "nothing recomputed"
"""Name of the row that others are compared with."""

Progress = Callable[[int, int, str], None]
"""Called with how many rows are done, out of how many, and the name of the next."""


def settings_name(settings: Settings) -> str:
    """What a row of these settings is called."""
    if settings.policy == Given(()):
        return NOTHING
    if settings.budget is not None:
        share, nbytes = settings.budget.share, settings.budget.nbytes
        chosen = f"budget={share:.0%}" if nbytes is None else f"budget={nbytes:,}"
    else:
        chosen = _policy_name(settings)
    return chosen if settings.offload is None else f"{chosen}, offload{'' if settings.offload.to == 'cpu' else ' disk'}"


def _policy_name(settings: Settings) -> str:
    chosen = f"every_n={settings.every_n}" if settings.policy is None else f"policy={settings.policy}"
    return f"{chosen}, save={','.join(settings.save)}" if settings.save else chosen


def usual_settings(settings: Settings, offload: Offload | None) -> list[Settings]:
    """Nothing recomputed; then every layer, every second, third and fourth, each without and with offload.

    Args:
        settings: whose boundary layers are meant.
        offload: where the rows with offload move what they start from; None leaves these rows out.
    """
    places = (None,) if offload is None else (None, offload)
    plain = replace(settings, every_n=1, policy=Given(()), offload=None, budget=None, save=())
    chosen = [replace(plain, every_n=n, policy=None, offload=place) for n in EVERY_N for place in places]
    return [plain, *chosen]


def plan_settings(captures: Captures, settings: Settings, target: Target) -> Plan:
    """The plan of a step under `settings`, which may have a budget.

    Raises:
        BudgetError: no choice is within the budget.
        CaptureError: the step cannot be captured, or not without knowing the contents of tensors.
        NoLayersError: the model has no boundary layer.
    """
    return _Planners(captures, target).plan(settings)


class _Planners:
    """Plans of one step under any settings, which share what they capture."""

    def __init__(self, captures: Captures, target: Target) -> None:
        self.captures, self.target = captures, target
        self.made: dict[Settings, BudgetPlanner] = {}

    def plan(self, settings: Settings) -> Plan:
        if settings.budget is None:
            return make_plan(self.captures, settings, self.target)
        return self.of(settings).within(settings.budget)

    def of(self, settings: Settings) -> BudgetPlanner:
        """What plans within budgets, of the other settings."""
        settings = replace(settings, budget=None)
        if settings not in self.made:
            module = importlib.import_module("fxckpt.predict.budget")  # its solver takes longer to import than fxckpt
            self.made[settings] = module.BudgetPlanner(self.captures, settings, self.target)
        return self.made[settings]


def make_sweep(
    captures: Captures,
    choices: list[Settings],
    target: Target | None = None,
    *,
    budgets: int = 0,
    on_progress: Progress | None = None,
) -> Sweep:
    """Plan one training step under each of the `choices`.

    Args:
        captures: of the original model and a batch.
        choices: what to plan. One that treats all layers as an earlier one does is left out.
        target: what the step is planned for; None: ordinary kernels on a CPU.
        budgets: so many rows follow, each with a budget, from the smallest that can be kept to what it takes to keep
            everything; with offload where any of the `choices` has it, unless it goes to the memory it comes from.
        on_progress: told before each row.

    Raises:
        SettingsError: `budgets` is no number, or 1.
        CaptureError: the step cannot be captured, or not without knowing the contents of tensors.
        NoLayersError: the model has no boundary layer.
    """
    if isinstance(budgets, bool) or not isinstance(budgets, int) or budgets < 0 or budgets == 1:
        raise SettingsError(f"budgets={budgets!r}: give how many budgets to plan for, at least 2, or 0 for none.")
    different: dict[Any, Settings] = {}
    for settings in choices:
        different.setdefault(_treatments(captures.model, settings), settings)
    planners = _Planners(captures, target or Target())
    rows: list[SweepRow] = []

    def plan(settings: Settings) -> None:
        name = settings_name(settings)
        if on_progress is not None:
            on_progress(len(rows), len(different) + budgets, name)
        rows.append(SweepRow(name, planners.plan(settings)))

    for settings in different.values():
        plan(settings)
    if budgets:
        if on_progress is not None:
            on_progress(len(rows), len(different) + budgets, "budgets")
        offloads = (one.offload for one in choices if one.offload is not None)
        useful = (one for one in offloads if one.to == "disk" or not planners.target.one_memory)
        free = replace(choices[0], policy=None, offload=next(useful, None), save=())
        for budget in planners.of(free).spread(budgets):
            plan(replace(free, budget=budget))
    return Sweep(tuple(rows))


def row_of(sweep: Sweep, model: nn.Module, settings: Settings) -> SweepRow:
    """The row of a sweep over `model` that treats all layers as `settings` do."""
    if settings.budget is not None:
        return next(row for row in sweep.rows if row.name == settings_name(settings))
    wanted = _treatments(model, settings)
    given = ((row, [(layer.name, layer.decided) for layer in row.plan.layers]) for row in sweep.rows)
    return next(row for row, layers in given if (tuple(layers), row.plan.offload) == wanted)


def _treatments(model: nn.Module, settings: Settings) -> tuple[Any, Offload | None]:
    """What becomes of each layer, or the budget that is to be kept, and where what is held goes."""
    if settings.budget is not None:
        return settings.budget, settings.offload
    found = decide_layers(boundary_layers(model, settings.layers), settings)
    return tuple(found.items()), settings.offload if any(t.offload for t in found.values()) else None
