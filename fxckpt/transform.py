"""``fxckpt.transform``: the public door."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

import fxckpt.runtime.ops  # noqa: F401  (registers the transfer operators)
from fxckpt.config import Offload, make_settings
from fxckpt.decide.layers import boundary_layers
from fxckpt.decide.plan import Plan
from fxckpt.errors import SettingsError
from fxckpt.planning import keep_budget, with_optimizer
from fxckpt.predict.amount import budget_bytes
from fxckpt.runtime.file import in_memory
from fxckpt.use import state as states
from fxckpt.use.view import make_view, state_of

log = logging.getLogger("fxckpt")

states.planner = keep_budget

M = TypeVar("M", bound=nn.Module)


def transform(
    model: M,
    *,
    every_n: int = 1,
    offload: Any = False,
    layers: Any = None,
    policy: Any = None,
    save: str | Sequence[str] = (),
    budget: int | str | None = None,
    optimizer: Any = None,
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
        save: values inside recomputed layers that are saved all the same: ``"attention"`` (what fused attention
            kernels give), ``"matmul"`` (matrix products and convolutions), an operator's name such as ``"aten.bmm"``,
            or a name that :func:`fxckpt.name` gave. Less is computed again then, and more held.
        budget: in place of `every_n` and `policy`, the most memory that a step may take: bytes of its peak on top of
            parameters and batch, as a number or as ``"24GiB"``; or a share of the device's memory, ``"80%"``, which is
            to hold parameters, buffers and what `optimizer` keeps, too. The first call plans for its batch, as
            :func:`fxckpt.plan` does: what to recompute, with `offload` what to offload, so that the step is as fast as
            it can be within it.
        optimizer: for a `budget` that is a share: ``"adamw"`` or another name of ``torch.optim``, what makes an
            optimizer from a list of parameters, or the bytes that it keeps.
        plan: what :func:`fxckpt.plan` returned, or a file of it, in place of `every_n`, `offload`, `policy`, `save` and
            `budget`.
        verify: check the graph invariants after every pass (costs compile time).
        debug_dir: folder for numbered graphs before and after each pass, and ``seconds.txt``, the time of each.

    Returns:
        A model of the same class (``isinstance`` and ``type(...).__name__`` hold) over the same parameters.

    Raises:
        SettingsError: an argument means nothing.
        NoLayersError: no boundary layer, or one of `layers` matches none; the message names candidates.

    What `save` names and no recomputed layer has, the first call tells, by a SettingsError that lists what they have;
    and by a BudgetError that no choice keeps the `budget`.
    """
    if not isinstance(model, nn.Module):
        raise SettingsError(f"transform needs a torch.nn.Module, not a {type(model).__name__}.")
    if isinstance(getattr(model, "_orig_mod", None), nn.Module):
        raise SettingsError("This model is compiled already: transform it first, then torch.compile the result.")
    if hasattr(type(model), "_fxckpt_state"):  # transformed before: the same original, seen through new settings
        model = state_of(model).model  # type: ignore[assignment]
    if plan is not None:
        if every_n != 1 or offload is not False or policy is not None or save or budget is not None:
            raise SettingsError("plan= says what every_n=, offload=, policy=, save=, budget= would: leave these out.")
        plan = plan if isinstance(plan, Plan) else Plan.load(plan)
        offload, policy = plan.offload, plan.policy
    settings = make_settings(
        every_n=every_n,
        offload=offload,
        layers=layers,
        policy=policy,
        budget=budget,
        save=save,
        verify=verify,
        debug_dir=debug_dir,
    )
    if optimizer is not None:
        if settings.budget is None:
            raise SettingsError('optimizer= is for a budget= that is a share of the device\'s memory, such as "80%".')
        settings = with_optimizer(settings, model, optimizer)
    if settings.budget is not None:
        budget_bytes(settings.budget, model, settings.optimizer_bytes)
    if isinstance(plan, Plan):
        plan.check_layers(type(model).__name__, boundary_layers(model, settings.layers))
    view = make_view(model, settings)
    state_of(view).treatments()  # finds the layers now, so that a mistake is told now
    if settings.offload is not None:
        _check_place(model, settings.offload)
    return view  # type: ignore[return-value]


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
