"""How many bytes a budget is."""

from __future__ import annotations

import os

import torch
from torch import nn

from fxckpt import torch_private
from fxckpt.config import Budget
from fxckpt.errors import SettingsError


def budget_bytes(budget: Budget, model: nn.Module, beside: int | None = None) -> int:
    """Bytes that the step's peak may take on top of parameters.

    Args:
        budget: bytes, or a share of the memory of the device that the model lies on.
        model: whose parameters and buffers a share has to hold, too.
        beside: bytes that it has to hold beside them, such as those of an optimizer.

    Raises:
        SettingsError: a share of a device's memory, and the model lies on none; or its parameters alone take more.
    """
    if budget.nbytes is not None:
        return budget.nbytes
    assert budget.share is not None
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}.values()
    device = next((t.device for t in tensors), torch.device("meta"))
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
    elif device.type == "cpu" and not any(map(torch_private.is_fake, tensors)):
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    else:
        raise SettingsError(
            f"budget: {budget.share:.0%} of a device's memory, and the model lies on {device.type}. Give bytes, such "
            'as "24GiB".'
        )
    left = int(total * budget.share) - sum(t.nbytes for t in tensors) - (beside or 0)
    if left <= 0:
        taken = "parameters and the optimizer" if beside else "parameters"
        raise SettingsError(f"budget: {budget.share:.0%} of the {total:,} bytes of {device}: the {taken} take more.")
    return left
