"""Fake tensors, on which a step is captured without memory for weights and activations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)

NEEDS_DATA = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)
"""What fake tensors raise where a program asks for their contents."""


@contextmanager
def fake_tensors() -> Iterator[Any]:
    """Within this context new tensors are fake ones: shape, type and strides, and no memory."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, functorch_config.patch(enable_autograd_cache=False):
        yield mode


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no contents; the device that it says it is on need not be there."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)
