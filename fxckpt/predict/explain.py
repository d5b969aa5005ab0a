"""Say what a training step saves for backward, and why, before it runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from fxckpt.config import Settings
from fxckpt.predict.capture import capture_step
from fxckpt.runtime.stats import TransferStats
from fxckpt.show.data import Explanation
from fxckpt.show.explain import explain_records


def explain_step(
    model: nn.Module, batch: Mapping[str, Any], settings: Settings, *, compiled: bool = False
) -> Explanation:
    """What ``fxckpt.explain`` would say after a step of ``transform(model, ...)``, but for its transfers.

    Args:
        model: the original model, in the mode (training or not) that it is to run in. It is not run, nor changed.
        batch: keyword arguments of a call. Only shapes, types and strides of its tensors matter.
        settings: as ``transform`` makes them.
        compiled: whether Inductor is to compile the graphs.

    Raises:
        CaptureError: the step cannot be captured, or not without knowing the contents of tensors.
        NoLayersError: the model has no boundary layer.
    """
    step = capture_step(model, batch, settings, compiled=compiled)
    return explain_records(step.records, settings, type(model).__name__, TransferStats())
