"""``fxckpt.plan`` and ``fxckpt.sweep``: what a training step will cost, and plans that keep a budget."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

import fxckpt.runtime.ops  # noqa: F401  (registers the transfer operators)
from fxckpt import torch_private
from fxckpt.config import Settings, make_settings
from fxckpt.decide.device import DeviceSpec, choose_device
from fxckpt.decide.plan import Plan
from fxckpt.errors import CaptureError, SettingsError
from fxckpt.predict.capture import Captures
from fxckpt.predict.optimizer import optimizer_bytes
from fxckpt.predict.plan import Target
from fxckpt.predict.sweep import make_sweep, plan_settings, usual_settings
from fxckpt.show.sweep import Sweep
from fxckpt.use.ranks import check_same_plan
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
    optimizer: Any = None,
    compiled: bool = False,
    device: Any = None,
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
        optimizer: as for :func:`transform`; the plan then tells the bytes that it keeps, whether there is a budget or
            not.
        compiled: plan for ``torch.compile(t)``, whose graphs are others than those that ``t(**batch)`` runs. Inductor
            generates code for them, which is not compiled.
        device: what the step is planned for: a ``torch.device``, the name of a device that was measured or whose
            figures are published, or a ``fxckpt.decide.device.DeviceSpec``. By default the one that the parameters lie
            on; of a model without memory, one that is not known, beside a host with memory of its own.

    Returns:
        The plan. Whatever the device, it is made of the graphs, and with `compiled` of the kernels, for a CPU.

    Raises:
        SettingsError: an argument means nothing.
        NoLayersError: no boundary layer, or one of `layers` matches none; the message names candidates.
        BudgetError: no choice keeps the budget; the message names the smallest that can be kept.
        CaptureError: the step cannot be captured, or not without knowing the contents of tensors.
    """
    model = _original(model, batch, "plan")
    settings = make_settings(every_n=every_n, offload=offload, layers=layers, policy=policy, budget=budget, save=save)
    settings = with_optimizer(settings, model, optimizer)
    return plan_settings(Captures(model, batch), settings, target_of(model, device, compiled))


def sweep(
    model: nn.Module,
    batch: Mapping[str, Any],
    *,
    offload: Any = True,
    layers: Any = None,
    budgets: int = 0,
    optimizer: Any = None,
    compiled: bool = False,
    device: Any = None,
) -> Sweep:
    """Plans of a training step under several settings side by side, to choose among them.

    Nothing recomputed; then every layer, every second, third and fourth, each without offload and with it. Settings
    that treat all layers as earlier ones do are left out. Then plans within `budgets`, which may recompute, save and
    offload other things in each layer.

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
        budgets: how many budgets to plan for, at equal distances from the smallest that can be kept to the peak with
            nothing recomputed, these two among them.
        optimizer: as for :func:`plan`.
        compiled: as for :func:`plan`.
        device: as for :func:`plan`.

    Raises:
        SettingsError: an argument means nothing.
        NoLayersError: no boundary layer, or one of `layers` matches none; the message names candidates.
        CaptureError: the step cannot be captured, or not without knowing the contents of tensors.
    """
    model = _original(model, batch, "sweep")
    settings = with_optimizer(make_settings(offload=offload, layers=layers), model, optimizer)
    choices = usual_settings(settings, settings.offload)
    return make_sweep(Captures(model, batch), choices, target_of(model, device, compiled), budgets=budgets)


def with_optimizer(settings: Settings, model: nn.Module, optimizer: Any) -> Settings:
    """The settings with the bytes that an optimizer keeps; `optimizer` as for :func:`plan`.

    Raises:
        SettingsError: there is no such optimizer.
    """
    return settings if optimizer is None else replace(settings, optimizer_bytes=optimizer_bytes(model, optimizer))


def _original(model: nn.Module, batch: Mapping[str, Any], function: str) -> nn.Module:
    """The model that is to be planned, where the arguments are of the right kind."""
    if not isinstance(model, nn.Module):
        raise SettingsError(f"{function} needs a torch.nn.Module, not a {type(model).__name__}.")
    if not isinstance(batch, Mapping):
        raise SettingsError(f"{function} needs the batch as a dict of keyword arguments, not a {type(batch).__name__}.")
    return state_of(model).model if hasattr(type(model), "_fxckpt_state") else model


def target_of(model: nn.Module, device: Any, compiled: bool) -> Target:
    """What a step of `model` is planned for, `device` being as for :func:`plan`.

    Raises:
        SettingsError: there is no such device.
    """
    if device is None:
        device = next((p.device for p in model.parameters() if not torch_private.is_fake(p)), None)
    spec = None if device is None else choose_device(device)
    return Target(compiled, spec, _is_cpu(device, spec))


def _is_cpu(device: Any, spec: DeviceSpec | None) -> bool:
    if isinstance(device, torch.device | str):
        kind = str(device).partition(":")[0]
        if kind in ("cpu", "cuda"):
            return kind == "cpu"
    return spec is not None and spec.to_host is None


def keep_budget(model: nn.Module, batch: Mapping[str, Any], settings: Settings, compiled: bool) -> Plan:
    """The plan of a transformed model whose settings have a budget, at its first call."""
    with torch.random.fork_rng(devices=[]):
        made = plan_settings(Captures(model, batch), settings, target_of(model, None, compiled))
    check_same_plan(made)
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
