"""Capture a training step without running it: its rewritten graphs, from fake tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fxckpt import torch_private
from fxckpt.config import Settings
from fxckpt.errors import CaptureError, FxckptError
from fxckpt.pipeline import GraphRecord
from fxckpt.predict.fake import fake_batch, fake_model
from fxckpt.use.view import make_view, state_of


def capture_step(
    model: nn.Module, batch: Mapping[str, Any], settings: Settings, *, compiled: bool = False
) -> list[GraphRecord]:
    """The graphs of one training step of ``transform(model, ...)``.

    Args:
        model: the original model, in the mode (training or not) that it is to run in. It is not run, nor changed.
        batch: keyword arguments of a call. Only shapes, types and strides of its tensors matter.
        settings: as ``transform`` makes them.
        compiled: whether Inductor is to compile the graphs, which makes others.

    Returns:
        A record for each graph, in order of capture.

    Raises:
        CaptureError: the step cannot be captured, or not without knowing the contents of tensors.
    """
    with torch_private.fake_tensors(), torch.enable_grad():
        view = make_view(fake_model(model), settings)
        run: Any = torch.compile(view, backend=torch_private.inductor_graphs) if compiled else view
        try:
            run(**fake_batch(batch))
        except FxckptError:
            raise
        except torch_private.NEEDS_DATA as error:
            raise CaptureError(
                f"fxckpt: {type(model).__name__} asks for the contents of a tensor ({error}), and a plan is made "
                "without any. Train a step of fxckpt.transform(model) and ask fxckpt.explain of that."
            ) from error
    state = state_of(view)
    state.resolve_pending()
    if not state.records:
        raise CaptureError(f"fxckpt: no graph of {type(model).__name__} was captured from this batch.")
    return list(state.records)
