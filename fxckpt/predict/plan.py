"""Make the plan of a training step: capture it without memory, and count on its graphs."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fxckpt.config import Settings
from fxckpt.decide.cost import flops, total_flops
from fxckpt.decide.device import DeviceSpec
from fxckpt.decide.layers import boundary_layers
from fxckpt.decide.memory import module_path
from fxckpt.decide.plan import LayerPlan, Plan
from fxckpt.decide.policy import Given, Treatment, decide_layers
from fxckpt.decide.seconds import Pace
from fxckpt.errors import SettingsError
from fxckpt.predict.capture import Captures
from fxckpt.predict.fold import Fold, find_folds, index_in, short_name
from fxckpt.predict.steps import Steps, read_steps, repeat
from fxckpt.record import GraphRecord, current_records
from fxckpt.show import count
from fxckpt.show.explain import region_figures, type_text

KEPT_PERIODS = 4
"""Of a repetition so many periods are captured: the first and the last are others, and two in the middle must agree."""

KEPT_FOR_KERNELS = 2
"""Of compiled graphs so many more: it takes a layer or two until each takes over memory as the one before it did."""


@dataclass(frozen=True)
class Target:
    """What a step is planned for.

    Attributes:
        compiled: whether Inductor is to compile the graphs.
        device: how fast the device is that the step is to run on; None where that is not known.
        one_memory: whether the device is a CPU, in whose memory host copies lie too.
    """

    compiled: bool = False
    device: DeviceSpec | None = None
    one_memory: bool = True


@dataclass(frozen=True)
class Planned:
    """A plan, and the step that it is the plan of."""

    plan: Plan
    steps: Steps


def make_plan(captures: Captures, settings: Settings, target: Target | None = None, *, fold: bool = True) -> Plan:
    """The plan of one training step of ``transform(model, ...)``.

    Args:
        captures: of the original model and a batch.
        settings: as ``transform`` makes them.
        target: what it is planned for; None: ordinary kernels on a CPU.
        fold: whether equal layers are captured a few times and counted many times, which gives the same plan sooner.

    Raises:
        CaptureError: the step cannot be captured, or not without knowing the contents of tensors.
        NoLayersError: the model has no boundary layer.
    """
    return plan_step(captures, settings, target or Target(), fold=fold).plan


def plan_step(
    captures: Captures, settings: Settings, target: Target, *, nominal: DeviceSpec | None = None, fold: bool = True
) -> Planned:
    """As :func:`make_plan`, with the steps; they have seconds of `nominal` where the device is not known."""
    model = captures.model
    treatments = decide_layers(boundary_layers(model, settings.layers), settings)
    device = target.device or nominal
    pace = None if device is None else Pace(device)
    captured = _capture_folded(captures, settings, treatments, target, pace) if fold else None
    if captured is None:
        step = captures.step(settings, compiled=target.compiled)
        captured = _Captured(step.records, (), read_steps(step, pace, one_memory=target.one_memory))
    plan = _count(captured, model, captures.batch, settings, treatments, target.compiled)
    seconds = None if target.device is None else _seconds(captured.steps, plan, pace)
    return Planned(dataclasses.replace(plan, predicted_seconds=seconds), captured.steps)


@dataclass(frozen=True)
class _Captured:
    """The graphs of a step, the layers that are left out in them, and the step with these."""

    records: Sequence[GraphRecord]
    folds: Sequence[Fold]
    steps: Steps


def _capture_folded(
    captures: Captures,
    settings: Settings,
    treatments: Mapping[str, Treatment],
    target: Target,
    pace: Pace | None,
) -> _Captured | None:
    """The step from a part of its layers; None where no layers repeat, or the graphs do not repeat as they do."""
    kept, offload = KEPT_PERIODS + (KEPT_FOR_KERNELS if target.compiled else 0), settings.offload
    if offload is not None:  # transfers reach over so many layers at both ends
        kept += 2 * max(1, (offload.max_in_flight + offload.prefetch) // 2)
    folds = find_folds(captures.model, treatments, kept)
    if not folds:
        return None
    chosen = {short_name(name, folds): treatment for name, treatment in treatments.items()}  # of equal ones, equal
    checked = isinstance(settings.policy, Given) and settings.policy.checked
    settings = dataclasses.replace(settings, policy=Given(tuple(chosen.items()), checked))
    try:
        step = captures.step(settings, folds, compiled=target.compiled)
        steps: Steps | None = read_steps(step, pace, one_memory=target.one_memory)
    except SettingsError:  # save= names nothing that a layer computes: nor would all of them
        raise
    except Exception:  # a model may count on the length of its lists; the whole one tells what is wrong otherwise
        return None
    for fold in folds:
        steps = None if steps is None else repeat(steps, fold)
    return None if steps is None else _Captured(step.records, folds, steps)


def _count(
    captured: _Captured,
    model: nn.Module,
    batch: Mapping[str, Any],
    settings: Settings,
    treatments: Mapping[str, Treatment],
    compiled: bool,
) -> Plan:
    records, folds = current_records(captured.records), captured.folds
    saved, offloaded, again = _by_layer(records)
    named = {name: short_name(name, folds) for name in treatments}
    total = {
        what: sum(counts.values()) + sum(_left_out(counts, fold) for fold in folds)
        for what, counts in (("saved", saved), ("offloaded", offloaded), ("again", again), ("flops", _flops(records)))
    }
    return Plan(
        model=type(model).__name__,
        compiled=compiled,
        offload=settings.offload,
        layers=tuple(
            _layer(name, treatments[name], saved[short], offloaded[short], again[short])
            for name, short in named.items()
        ),
        batch=_describe(batch),
        parameter_bytes=_tensor_bytes([*model.parameters(), *model.buffers()]),
        saved_bytes=total["saved"],
        offloaded_bytes=total["offloaded"],
        flops=total["flops"],
        recomputed_flops=total["again"],
        peak_bytes=captured.steps.peak_bytes,
        optimizer_bytes=settings.optimizer_bytes,
    )


def _layer(name: str, decided: Treatment, saved: int, offloaded: int, again: int) -> LayerPlan:
    return LayerPlan(name, decided.kind, decided.save or (), bool(decided.offload), saved, offloaded, again)


def _seconds(steps: Steps, plan: Plan, pace: Pace | None) -> float | None:
    """Seconds of the step; None where a rate is not known."""
    if pace is None or steps.seconds is None:
        return None
    forward, backward = sum(steps.seconds[: steps.backward]), sum(steps.seconds[steps.backward :])
    if plan.offload is None:
        return forward + backward or None
    return pace.transfers(plan.offload, plan.offloaded_bytes, forward, backward)


def _by_layer(records: Iterable[GraphRecord]) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """Bytes saved, bytes offloaded and FLOPs recomputed for each boundary layer; under ``""`` those for none."""
    saved: Counter[str] = Counter()
    offloaded: Counter[str] = Counter()
    again: Counter[str] = Counter()
    for record in records:
        regions, outside = region_figures(record)
        for region in regions:
            saved[region.layer] += region.saved_bytes
            offloaded[region.layer] += region.offloaded_bytes
            again[region.layer] += region.recomputed_flops
        saved[""] += sum(value.saved_bytes for value in outside)
        offloaded[""] += sum(value.offloaded_bytes for value in outside)
        again[""] += total_flops(count.recomputed_nodes(record)) - sum(r.recomputed_flops for r in regions)
    return saved, offloaded, again


def _flops(records: Iterable[GraphRecord]) -> Counter[str]:
    """FLOPs of forward and backward, by the module whose work they are."""
    found: Counter[str] = Counter()
    for record in records:
        for node in record.joint.graph.nodes:
            found[module_path(node)] += flops(node)
    return found


def _left_out(counts: Mapping[str, int], fold: Fold) -> int:
    """What the periods that were left out add to the sum of `counts`."""
    return fold.left_out * sum(n for module, n in counts.items() if index_in(fold, module) in fold.layers)


def _describe(batch: Mapping[str, Any]) -> dict[str, str]:
    leaves, _ = pytree.tree_flatten_with_path(dict(batch))
    return {
        pytree.keystr(path).removeprefix("['").replace("']", "", 1): type_text(leaf)
        for path, leaf in leaves
        if isinstance(leaf, torch.Tensor)
    }


def _tensor_bytes(tensors: Iterable[torch.Tensor]) -> int:
    different = {id(t): t for t in tensors}.values()
    return sum(t.numel() * t.dtype.itemsize for t in different)
