"""What a node's operator is, and does."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx


def is_offload(node: fx.Node) -> bool:
    """Whether `node` moves an activation to the host."""
    return node.target is torch.ops.fxckpt.offload.default


def is_reload(node: fx.Node) -> bool:
    """Whether `node` brings an activation back to its device."""
    return node.target is torch.ops.fxckpt.reload.default


def is_order(node: fx.Node) -> bool:
    """Whether `node` only orders others: what reads its value behind it waits for what else it reads."""
    return node.target is torch.ops.fxckpt.after.default


def is_transfer(node: fx.Node) -> bool:
    """Whether `node` is an offload or a reload."""
    return is_offload(node) or is_reload(node)


def draws_random(node: fx.Node) -> bool:
    """Whether `node` reads the random number generator."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    return bool(argument(node, "dropout_p") != 0.0)  # attention without dropout draws nothing


def argument(node: fx.Node, name: str) -> Any:
    """The value `node` passes for its operator's argument `name`, its default, or None where there is no such one."""
    for position, declared in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if declared.name == name:
            given = node.args[position] if position < len(node.args) else declared.default_value
            return node.kwargs.get(name, given)
    return None
