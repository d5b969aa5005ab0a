"""``fxckpt.plan`` and ``fxckpt.sweep``: what a training step will cost, and plans that keep a budget."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

import fxckpt.runtime.ops  # noqa: F401  (registers the transfer operators)
from fxckpt.config import Settings, make_settings
from fxckpt.decide.plan import Plan
from fxckpt.errors import CaptureError, SettingsError
from fxckpt.predict.plan import make_plan
from fxckpt.predict.sweep import make_sweep, usual_settings
from fxckpt.show.sweep import Sweep
from fxckpt.use.view import state_of

log = logging.getLogger("fxckpt")


def plan(
    model: nn.Module,
    batch: Mapping[str, Any],
    *,
    every_n: int = 1,
    offload: Any = False,
    layers: Any = None,
    policy: Any = None,
    save: str | Sequence[str] = (),
    budget: int | str | None = None,
    compiled: bool = False,
) -> Plan:
    """What a training step will cost, before it runs and without memory for it.

    The step is captured on tensors that have shapes and types and no contents, so the model may be far larger than this
    machine, as one built under ``torch.device("meta")`` is. The result can be saved, and followed by
    ``transform(model, plan=...)``.

    Example::

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
            ids = torch.empty(1, 131072, dtype=torch.long)
        print(fxckpt.plan(model, {"input_ids": ids, "labels": ids}, offload=True).to_json())

    Args:
        model: any module, in the mode (training or not) that it is to run in. It is neither run nor changed.
        batch: keyword arguments of a call. Only shapes, types and strides of its tensors matter; ``meta`` ones will do.
        every_n: as for :func:`transform`.
        offload: as for :func:`transform`.
        layers: as for :func:`transform`.
        policy: as for :func:`transform`.
        save: as for :func:`transform`.
        budget: as for :func:`transform`; the plan is then the one of least seconds within it.
        compiled: plan for ``torch.compile(t)``, whose graphs are others than those that ``t(**batch)`` runs.

    Returns:
        The plan. Its ``peak_bytes`` are those of the graphs run node by node, also with `compiled`.

    Raises:
        SettingsError: an argument means nothing.
        NoLayersError: no boundary layer, or one of `layers` matches none; the message names candidates.
        BudgetError: no choice keeps the budget; the message names the smallest that can be kept.
        CaptureError: the step cannot be captured, or not without knowing the contents of tensors.
    """
    model = _original(model, batch, "plan")
    settings = make_settings(every_n=every_n, offload=offload, layers=layers, policy=policy, budget=budget, save=save)
    if settings.budget is not None:
        chosen: Plan = planning_within().plan_within(model, batch, settings, compiled=compiled)
        return chosen
    return make_plan(model, batch, settings, compiled=compiled)


def sweep(
    model: nn.Module, batch: Mapping[str, Any], *, offload: Any = True, layers: Any = None, compiled: bool = False
) -> Sweep:
    """Plans of a training step under several settings side by side, to choose among them.

    Nothing recomputed; then every layer, every second, third and fourth, each without offload and with it. Settings
    that treat all layers as earlier ones do are left out.

    Example::

        found = fxckpt.sweep(model, batch)
        print(found)
        plan = next(row.plan for row in found.rows if row.plan.peak_bytes < 20 * 2**30)
        t = fxckpt.transform(model, plan=plan)

    Args:
        model: as for :func:`plan`.
        batch: as for :func:`plan`.
        offload: as for :func:`transform`, for the rows with offload; ``False`` leaves them out.
        layers: as for :func:`transform`.
        compiled: as for :func:`plan`.

    Raises:
        SettingsError: an argument means nothing.
        NoLayersError: no boundary layer, or one of `layers` matches none; the message names candidates.
        CaptureError: the step cannot be captured, or not without knowing the contents of tensors.
    """
    model = _original(model, batch, "sweep")
    settings = make_settings(offload=offload, layers=layers)
    return make_sweep(model, batch, usual_settings(settings, settings.offload), compiled=compiled)


def _original(model: nn.Module, batch: Mapping[str, Any], function: str) -> nn.Module:
    """The model that is to be planned, where the arguments are of the right kind."""
    if not isinstance(model, nn.Module):
        raise SettingsError(f"{function} needs a torch.nn.Module, not a {type(model).__name__}.")
    if not isinstance(batch, Mapping):
        raise SettingsError(f"{function} needs the batch as a dict of keyword arguments, not a {type(batch).__name__}.")
    return state_of(model).model if hasattr(type(model), "_fxckpt_state") else model


def planning_within() -> Any:
    """The module that plans within budgets: its solver's library takes longer to import than all of fxckpt."""
    return importlib.import_module("fxckpt.predict.budget")


def keep_budget(model: nn.Module, batch: Mapping[str, Any], settings: Settings, compiled: bool) -> Plan:
    """The plan of a transformed model whose settings have a budget, at its first call."""
    with torch.random.fork_rng(devices=[]):
        made: Plan = planning_within().plan_within(model, batch, settings, compiled=compiled)
    chosen = sum(1 for layer in made.layers if layer.treatment == "recompute")
    log.info("fxckpt: %d of %d layers are recomputed to keep %s bytes.", chosen, len(made.layers), made.budget_bytes)
    return made


def chosen_plan(transformed: nn.Module) -> Plan:
    """The plan that ``transform(budget=...)`` made at the first call, to be looked at, or kept as a file.

    Args:
        transformed: what :func:`transform` returned, compiled or wrapped or not.

    Raises:
        CaptureError: there is no budget, or nothing has been called yet.
        FxckptError: not a transformed model.
    """
    found = state_of(transformed).plan
    if found is None:
        raise CaptureError(
            "No plan was made for this model: transform(model, budget=...) makes one at the first call with gradients "
            "on, and fxckpt.plan(model, batch, ...) whenever it is asked."
        )
    return found
