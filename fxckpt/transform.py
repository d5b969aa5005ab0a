"""``fxckpt.transform``: the public door."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

import fxckpt.runtime.ops  # noqa: F401  (registers the transfer operators)
from fxckpt.config import make_settings
from fxckpt.decide.policy import Treatment
from fxckpt.errors import SettingsError
from fxckpt.use import hook
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
    verify: bool = False,
    debug_dir: str | Path | None = None,
) -> M:
    """The same model, trained in less memory.

    Calls of the result with gradients on are captured as graphs in which every n-th boundary layer is recomputed in the
    backward instead of kept, and in which the activations it is recomputed from may be offloaded to host memory. Call the
    result directly, or hand it to ``torch.compile``. Under ``no_grad`` and ``inference_mode`` it runs as the original.

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
        offload: ``False``; ``True`` or ``"cpu"`` (host memory); or an :class:`fxckpt.Offload`.
        layers: which modules are boundary layers. ``None``: the ``GradientCheckpointingLayer`` instances, transformers' or
            fxckpt's. Else one of, or a list of: a class, a name pattern (``"blocks.*"``; ``*`` is one part of a name,
            ``**`` any number), a predicate ``(name, module) -> bool``.
        policy: in place of `every_n`, a callable ``(layer) -> Treatment | bool``, or a list of layer names to recompute.
        verify: check the graph invariants after every pass (costs compile time).
        debug_dir: folder for numbered graphs before and after each pass.

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
    settings = make_settings(
        every_n=every_n, offload=offload, layers=layers, policy=policy, verify=verify, debug_dir=debug_dir
    )
    hook.install()
    view = make_view(model, settings)
    state_of(view).treatments()  # finds the layers now, so that a mistake is told now
    if settings.offload is not None and not _on_accelerator(model):
        log.info("fxckpt: offload to host memory on a CPU model runs the transfers as copies and saves no memory.")
    return view  # type: ignore[return-value]


def _on_accelerator(model: nn.Module) -> bool:
    return any(p.device.type not in ("cpu", "meta") for p in model.parameters())


def selected_layers(transformed: nn.Module) -> list[str]:
    """Qualified names of the boundary layers that are recomputed, in the order of ``model.modules()``.

    Raises:
        FxckptError: not a transformed model.
    """
    chosen = state_of(transformed).treatments()
    return [name for name, treatment in chosen.items() if treatment is Treatment.RECOMPUTE]
