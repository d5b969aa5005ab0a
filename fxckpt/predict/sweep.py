"""Plan several settings of one model, to choose among them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from fxckpt.config import Offload, Settings
from fxckpt.decide.layers import boundary_layers
from fxckpt.decide.policy import Given, Treatment, decide_layers
from fxckpt.predict.plan import make_plan
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
    chosen = f"every_n={settings.every_n}" if settings.policy is None else f"policy={settings.policy}"
    return chosen if settings.offload is None else f"{chosen}, offload{'' if settings.offload.to == 'cpu' else ' disk'}"


def usual_settings(settings: Settings, offload: Offload | None) -> list[Settings]:
    """Nothing recomputed; then every layer, every second, third and fourth, each without and with offload.

    Args:
        settings: whose boundary layers are meant.
        offload: where the rows with offload move what they start from; None leaves these rows out.
    """
    places = (None,) if offload is None else (None, offload)
    chosen = [replace(settings, every_n=n, policy=None, offload=place) for n in EVERY_N for place in places]
    return [replace(settings, every_n=1, policy=Given(()), offload=None), *chosen]


def make_sweep(
    model: nn.Module,
    batch: Mapping[str, Any],
    choices: list[Settings],
    *,
    compiled: bool = False,
    on_progress: Progress | None = None,
) -> Sweep:
    """Plan one training step under each of the `choices`.

    Args:
        model: the original model, in the mode (training or not) that it is to run in. It is not run, nor changed.
        batch: keyword arguments of a call. Only shapes, types and strides of its tensors matter.
        choices: what to plan. One that treats all layers as an earlier one does is left out.
        compiled: whether Inductor is to compile the graphs.
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
        rows.append(SweepRow(name, make_plan(model, batch, settings, compiled=compiled)))
    return Sweep(tuple(rows))


def row_of(sweep: Sweep, model: nn.Module, settings: Settings) -> SweepRow:
    """The row of a sweep over `model` that treats all layers as `settings` do."""
    wanted = _treatments(model, settings)
    given = ((row, [(layer.name, layer.decided) for layer in row.plan.layers]) for row in sweep.rows)
    return next(row for row, layers in given if (tuple(layers), row.plan.offload) == wanted)


def _treatments(model: nn.Module, settings: Settings) -> tuple[tuple[tuple[str, Treatment], ...], Offload | None]:
    """What becomes of each layer, and where what is recomputed starts from goes."""
    found = decide_layers(boundary_layers(model, settings.layers), settings)
    return tuple(found.items()), settings.offload if any(t.offload for t in found.values()) else None
