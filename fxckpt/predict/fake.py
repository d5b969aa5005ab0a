"""A model and its batch on fake tensors: shapes, types and strides, and no memory."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fxckpt.errors import CaptureError


def fake_model(model: nn.Module) -> nn.Module:
    """A copy of `model` whose parameters and buffers are fake, on the CPU; to be called with fake tensors on.

    Real, fake and ``meta`` parameters will do. The model itself stays as it is. So do tensors in plain attributes, such
    as a table that a module keeps or the weight that the old ``weight_norm`` computes, which could not be copied.

    Raises:
        CaptureError: the model cannot be copied.
    """
    memo: dict[int, Any] = {}
    for module in model.modules():
        for value in pytree.tree_leaves(dict(vars(module))):  # parameters and buffers among them
            if isinstance(value, torch.Tensor):
                memo.setdefault(id(value), fake_like(value))
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise CaptureError(
            f"fxckpt: a plan is made on a copy of the model without memory, and {type(model).__name__} cannot be "
            f"copied ({type(error).__name__}: {error}). Train a step of fxckpt.transform(model) and ask "
            "fxckpt.explain of that."
        ) from error


def fake_batch(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch with fake tensors in place of its own, at any depth; to be called with fake tensors on."""
    made: dict[str, Any] = pytree.tree_map_only(torch.Tensor, fake_like, dict(batch))
    return made


def fake_like(tensor: torch.Tensor) -> torch.Tensor:
    """A fake tensor, or fake parameter, of the shape, type and strides of `tensor`."""
    made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)
