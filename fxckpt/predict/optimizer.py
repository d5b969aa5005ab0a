"""How many bytes an optimizer keeps for a model's parameters from its first step on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fxckpt.errors import SettingsError

NAMES = {
    name.lower(): made
    for name, made in vars(torch.optim).items()
    if isinstance(made, type) and issubclass(made, torch.optim.Optimizer) and made is not torch.optim.Optimizer
}
"""PyTorch's optimizers, by their names in small letters."""


def optimizer_bytes(model: nn.Module, optimizer: Any) -> int:
    """Bytes of state that an optimizer keeps beside the parameters that are trained.

    It is made for parameters without memory and does a step on them, so what it keeps is what it says itself.

    Args:
        model: whose parameters with ``requires_grad`` are trained.
        optimizer: the name of one of ``torch.optim``, such as ``"adamw"``; what makes one from a list of parameters,
            such as a class, or a function that gives it arguments; or bytes.

    Raises:
        SettingsError: there is no such optimizer, or it does nothing without real tensors.
    """
    if isinstance(optimizer, int) and not isinstance(optimizer, bool) and optimizer >= 0:
        return optimizer
    parameters = [_without_memory(p) for p in model.parameters() if p.requires_grad]
    if not parameters:
        return 0
    make = _maker(optimizer)
    try:
        made: Any = make(parameters)
        made.step()
        state = made.state.values()
    except Exception as error:
        raise SettingsError(
            f"optimizer={_name(optimizer)}: it cannot do a step on parameters without memory "
            f"({type(error).__name__}: {error}). Give the bytes that it keeps instead."
        ) from error
    kept = [t for t in pytree.tree_leaves(list(map(dict, state))) if isinstance(t, torch.Tensor)]
    return sum(t.nbytes for t in kept if t.is_meta)  # counters of steps lie on the host


def _without_memory(parameter: nn.Parameter) -> nn.Parameter:
    made = nn.Parameter(torch.empty_like(parameter, device="meta"))
    made.grad = torch.empty_like(made)
    return made


def _maker(optimizer: Any) -> Callable[[Iterable[nn.Parameter]], Any]:
    named = NAMES.get(optimizer.lower()) if isinstance(optimizer, str) else None
    if named is None and (isinstance(optimizer, str | bool) or not callable(optimizer)):
        raise SettingsError(
            f"optimizer={_name(optimizer)}: give a name of torch.optim ({', '.join(sorted(NAMES))}), what makes an "
            "optimizer from a list of parameters, or the bytes that it keeps."
        )
    make: Callable[[Iterable[nn.Parameter]], Any] = optimizer if named is None else named
    return make


def _name(optimizer: Any) -> str:
    return str(getattr(optimizer, "__name__", repr(optimizer)))
