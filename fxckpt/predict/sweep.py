"""Plan several settings of one model, to choose among them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from fxckpt.config import Offload, Settings
from fxckpt.decide.layers import boundary_layers
from fxckpt.decide.plan import Plan
from fxckpt.decide.policy import Given, decide_layers
from fxckpt.predict.plan import Target, make_plan
from fxckpt.show.sweep import Sweep, SweepRow

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


def plan_settings(model: nn.Module, batch: Mapping[str, Any], settings: Settings, target: Target) -> Plan:
    """The plan of a step under `settings`, which may have a budget; for errors see whichever of the two makes it."""
    if settings.budget is None:
        return make_plan(model, batch, settings, target)
    within = importlib.import_module("fxckpt.predict.budget")  # its solver takes longer to import than all of fxckpt
    plan: Plan = within.plan_within(model, batch, settings, target)
    return plan


def make_sweep(
    model: nn.Module,
    batch: Mapping[str, Any],
    choices: list[Settings],
    target: Target | None = None,
    *,
    on_progress: Progress | None = None,
) -> Sweep:
    """Plan one training step under each of the `choices`.

    Args:
        model: the original model, in the mode (training or not) that it is to run in. It is not run, nor changed.
        batch: keyword arguments of a call. Only shapes, types and strides of its tensors matter.
        choices: what to plan. One that treats all layers as an earlier one does is left out.
        target: what the step is planned for; None: ordinary kernels on a CPU.
        on_progress: told before each row.

    Raises:
        CaptureError: the step cannot be captured, or not without knowing the contents of tensors.
        NoLayersError: the model has no boundary layer.
    """
    different: dict[Any, Settings] = {}
    for settings in choices:
        different.setdefault(_treatments(model, settings), settings)
    rows: list[SweepRow] = []
    for settings in different.values():
        name = settings_name(settings)
        if on_progress is not None:
            on_progress(len(rows), len(different), name)
        rows.append(SweepRow(name, plan_settings(model, batch, settings, target or Target())))
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
