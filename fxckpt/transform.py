"""``fxckpt.transform``: the public door."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

import fxckpt.runtime.ops  # noqa: F401  (registers the transfer operators)
from fxckpt import torch_private
from fxckpt.config import Offload, make_settings
from fxckpt.decide.device import choose_device
from fxckpt.decide.layers import boundary_layers
from fxckpt.decide.plan import Plan
from fxckpt.decide.policy import Treatment
from fxckpt.errors import CaptureError, SettingsError
from fxckpt.pipeline import GraphRecord
from fxckpt.predict.plan import make_plan
from fxckpt.runtime.file import in_memory
from fxckpt.runtime.stats import TransferStats
from fxckpt.show import network
from fxckpt.show.data import Explanation
from fxckpt.show.explain import explain_records
from fxckpt.use.view import make_view, state_of

log = logging.getLogger("fxckpt")

M = TypeVar("M", bound=nn.Module)


def transform(
    model: M,
    *,
    every_n: int = 1,
    offload: Any = False,
    layers: Any = None,
    policy: Any = None,
    plan: Plan | str | Path | None = None,
    verify: bool = False,
    debug_dir: str | Path | None = None,
) -> M:
    """The same model, trained in less memory.

    Calls of the result with gradients on are captured as graphs in which every n-th boundary layer is recomputed in the
    backward instead of kept, and in which the activations it is recomputed from may be offloaded to host memory or to a
    disk, beside the computation. Call the result directly, or hand it to ``torch.compile``. Under ``no_grad`` and
    ``inference_mode`` it runs as the original.

    Recomputing every layer costs about one more forward a step; ``every_n=2`` half of that, for about half the saving.

    Example::

        t = fxckpt.transform(model, every_n=2, offload=True)
        loss = torch.compile(t)(**batch).loss
        loss.backward()
        print(fxckpt.explain(t))

    Args:
        model: any module. It keeps its own behaviour; parameters, buffers and submodules are shared with the result.
        every_n: boundary layers 0, n, 2n, ... are recomputed, counted in the order of ``model.modules()`` as
            transformers' ``every_n_layers`` counts.
        offload: ``False``; ``True`` or ``"cpu"`` (host memory); ``"disk"``; or an :class:`fxckpt.Offload`.
        layers: which modules are boundary layers. ``None``: the ``GradientCheckpointingLayer`` instances,
            transformers' or fxckpt's. Else one of, or a list of: a class, a name pattern (``"blocks.*"``; ``*`` is
            one part of a name, ``**`` any number), a predicate ``(name, module) -> bool``.
        policy: in place of `every_n`, a callable ``(layer) -> Treatment | bool``, or a list of layer names to
            recompute.
        plan: what :func:`fxckpt.plan` returned, or a file of it, in place of `every_n`, `offload` and `policy`.
        verify: check the graph invariants after every pass (costs compile time).
        debug_dir: folder for numbered graphs before and after each pass, and ``seconds.txt``, the time of each.

    Returns:
        A model of the same class (``isinstance`` and ``type(...).__name__`` hold) over the same parameters.

    Raises:
        SettingsError: an argument means nothing.
        NoLayersError: no boundary layer, or one of `layers` matches none; the message names candidates.
    """
    if not isinstance(model, nn.Module):
        raise SettingsError(f"transform needs a torch.nn.Module, not a {type(model).__name__}.")
    if isinstance(getattr(model, "_orig_mod", None), nn.Module):
        raise SettingsError("This model is compiled already: transform it first, then torch.compile the result.")
    if hasattr(type(model), "_fxckpt_state"):  # transformed before: the same original, seen through new settings
        model = state_of(model).model  # type: ignore[assignment]
    if plan is not None:
        if every_n != 1 or offload is not False or policy is not None:
            raise SettingsError("plan= says what every_n=, offload= and policy= would: leave these out.")
        plan = plan if isinstance(plan, Plan) else Plan.load(plan)
        offload, policy = plan.offload, plan.policy
    settings = make_settings(
        every_n=every_n, offload=offload, layers=layers, policy=policy, verify=verify, debug_dir=debug_dir
    )
    if isinstance(plan, Plan):
        plan.check_layers(type(model).__name__, boundary_layers(model, settings.layers))
    view = make_view(model, settings)
    state_of(view).treatments()  # finds the layers now, so that a mistake is told now
    if settings.offload is not None:
        _check_place(model, settings.offload)
    return view  # type: ignore[return-value]


def plan(
    model: nn.Module,
    batch: Mapping[str, Any],
    *,
    every_n: int = 1,
    offload: Any = False,
    layers: Any = None,
    policy: Any = None,
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
        compiled: plan for ``torch.compile(t)``, whose graphs are others than those that ``t(**batch)`` runs. Inductor
            lowers and schedules them, and generates no code.
        device: what ``predicted_seconds`` are for: a ``torch.device``, the name of a device that was measured or whose
            figures are published, or a ``fxckpt.decide.device.DeviceSpec``. By default the device that the parameters
            lie on.

    Returns:
        The plan. Whatever the device, it is made of the graphs, and with `compiled` of the kernels, for a CPU.

    Raises:
        SettingsError: an argument means nothing.
        NoLayersError: no boundary layer, or one of `layers` matches none; the message names candidates.
        CaptureError: the step cannot be captured, or not without knowing the contents of tensors.
    """
    if not isinstance(model, nn.Module):
        raise SettingsError(f"plan needs a torch.nn.Module, not a {type(model).__name__}.")
    if not isinstance(batch, Mapping):
        raise SettingsError(f"plan needs the batch as a dict of keyword arguments, not a {type(batch).__name__}.")
    if hasattr(type(model), "_fxckpt_state"):
        model = state_of(model).model
    settings = make_settings(
        every_n=every_n, offload=offload, layers=layers, policy=policy, verify=False, debug_dir=None
    )
    if device is None:
        device = next((p.device for p in model.parameters() if not torch_private.is_fake(p)), None)
    spec = None if device is None else choose_device(device)
    return make_plan(model, batch, settings, compiled=compiled, device=spec)


def _check_place(model: nn.Module, offload: Offload) -> None:
    if offload.to == "cpu":
        if not _on_accelerator(model):
            _say_offload_saves_nothing()
        return
    folder = offload.folder
    if not os.path.isdir(folder):
        raise SettingsError(f"Offload(dir={folder!r}): there is no such folder. Make it, or choose another one.")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise SettingsError(f"Offload(dir={folder!r}): this process may not write there. Choose another folder.")
    if in_memory(folder):
        log.warning(
            "fxckpt: %s lies in memory (tmpfs), so offloading to it frees none; choose a folder on a disk.", folder
        )


@functools.cache
def _say_offload_saves_nothing() -> None:
    """Once a process."""
    log.info("fxckpt: offload to host memory on a CPU model runs the transfers as copies and saves no memory.")


def _on_accelerator(model: nn.Module) -> bool:
    return any(p.device.type not in ("cpu", "meta") for p in model.parameters())


def selected_layers(transformed: nn.Module) -> list[str]:
    """Qualified names of the boundary layers that are recomputed, in the order of ``model.modules()``.

    Raises:
        FxckptError: not a transformed model.
    """
    chosen = state_of(transformed).treatments()
    return [name for name, treatment in chosen.items() if treatment is Treatment.RECOMPUTE]


def stats(transformed: nn.Module) -> TransferStats:
    """What the transfers of the last step moved, how long that took, and how much was held.

    A step is a call of the model with gradients on and the backward that belongs to it; ask after the backward.

    Example::

        t(**batch).loss.backward()
        print(fxckpt.stats(t).stall_seconds)

    Args:
        transformed: what :func:`transform` returned, compiled or wrapped or not.

    Raises:
        FxckptError: not a transformed model.
    """
    return state_of(transformed).transfer_stats()


def graphs(transformed: nn.Module) -> list[GraphRecord]:
    """One record for each graph captured so far, in order of capture.

    A record has ``.forward`` and ``.backward`` (the rewritten graphs, each a ``torch.fx.GraphModule``), ``.joint`` (the
    captured graph before any pass), ``.regions``, ``.plan``, and ``.frame`` (the Python function it was captured from).

    Args:
        transformed: what :func:`transform` returned, compiled or wrapped or not.

    Raises:
        CaptureError: nothing has been captured yet.
        FxckptError: not a transformed model.
    """
    state = state_of(transformed)
    state.resolve_pending()
    if not state.records:
        name = type(state.model).__name__
        raise CaptureError(
            f"No graph of {name} has been captured yet: call t(**batch) with gradients on first."
            if state.settings.enabled
            else f"Checkpointing of {name} is switched off: call gradient_checkpointing_enable(), then t(**batch)."
        )
    return list(state.records)


def explain(transformed: nn.Module) -> Explanation:
    """What the captured graphs save for backward, why, and what they compute again.

    The result prints as tables; ``.to_dict()`` and ``.to_json()`` give all figures: bytes, and floating point
    operations, of which a multiply-add counts as two.

    Example::

        report = fxckpt.explain(t)
        print(report)
        print(report.saved_bytes, report.baseline_saved_bytes)

    For the figures without the rewrite, the first call for a graph runs PyTorch's partitioner on a copy of it.

    Args:
        transformed: what :func:`transform` returned, compiled or wrapped or not.

    Raises:
        CaptureError: nothing has been captured yet.
        FxckptError: not a transformed model.
    """
    records = graphs(transformed)
    state = state_of(transformed)
    return explain_records(records, state.settings, type(state.model).__name__, state.transfer_stats())


def to_networkx(record: GraphRecord | nn.Module) -> Any:
    """The graph of regions as a ``networkx.DiGraph``: what each computes and saves, and the tensors between them.

    Nodes are the names of the regions, ``"inputs"``, ``"outputs"``, and what is computed outside every region:
    ``"before"`` and ``"after NAME"``, where NAME is the last region it depends on. Node attributes: ``treatment``,
    ``inside``, ``nodes``, ``saved_bytes``, ``offloaded_bytes``, ``flops``, ``recomputed_flops``. Edge attributes:
    ``bytes``, and ``tensors``, a list of dicts with ``name``, ``type`` and ``bytes``.

    Args:
        record: one of ``fxckpt.graphs(t)``, or a transformed model of which one graph has been captured.

    Raises:
        CaptureError: of the model, nothing or more than one graph has been captured.
    """
    if isinstance(record, GraphRecord):
        return network.to_networkx(record)
    found = graphs(record)
    if len(found) > 1:
        raise CaptureError(
            f"{len(found)} graphs of {type(record).__name__} have been captured: choose one, such as "
            "fxckpt.to_networkx(fxckpt.graphs(t)[0])."
        )
    return network.to_networkx(found[0])
