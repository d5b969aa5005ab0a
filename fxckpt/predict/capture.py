"""Capture a training step without running it: its rewritten graphs, from fake tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fxckpt import torch_private
from fxckpt.config import Settings
from fxckpt.errors import CaptureError, FxckptError
from fxckpt.pipeline import GraphRecord
from fxckpt.predict.fake import fake_batch, fake_model
from fxckpt.torch_private import Schedule
from fxckpt.use.view import make_view, state_of


@dataclass(frozen=True)
class CapturedStep:
    """The graphs of one training step.

    Attributes:
        records: one for each graph, in order of capture.
        schedules: what Inductor makes of the graphs; None for a step that runs node by node.
    """

    records: Sequence[GraphRecord]
    schedules: Sequence[Schedule] | None = None


def capture_step(
    model: nn.Module, batch: Mapping[str, Any], settings: Settings, *, compiled: bool = False
) -> CapturedStep:
    """The graphs of one training step of ``transform(model, ...)``.

    Args:
        model: the original model, in the mode (training or not) that it is to run in. It is not run, nor changed.
        batch: keyword arguments of a call. Only shapes, types and strides of its tensors matter.
        settings: as ``transform`` makes them.
        compiled: whether Inductor is to compile the graphs, which makes others. It lowers and schedules them, and
            generates no code.

    Raises:
        CaptureError: the step cannot be captured, or not without knowing the contents of tensors.
    """
    name = type(model).__name__
    scheduling = torch_private.schedules_alone() if compiled else contextlib.nullcontext()
    with torch_private.fake_tensors(), torch.enable_grad(), scheduling as schedules:
        view = make_view(fake_model(model), settings)
        run: Any = torch.compile(view) if compiled else view
        try:
            run(**fake_batch(batch))
        except FxckptError:
            raise
        except torch_private.NEEDS_DATA as error:
            raise CaptureError(
                f"fxckpt: {name} asks for the contents of a tensor ({error}), and a plan is made "
                "without any. Train a step of fxckpt.transform(model) and ask fxckpt.explain of that."
            ) from error
        except torch_private.CANNOT_LOWER as error:
            raise CaptureError(
                f"fxckpt: Inductor cannot compile a graph of {name} on tensors without contents ({error}). Plan with "
                "compiled=False, which tells the bytes saved and offloaded all the same."
            ) from error
    state = state_of(view)
    state.resolve_pending()
    if not state.records:
        raise CaptureError(f"fxckpt: no graph of {name} was captured from this batch.")
    return CapturedStep(list(state.records), schedules)
