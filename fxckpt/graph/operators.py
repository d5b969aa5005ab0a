"""What a node's operator is, and does."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx


def is_offload(node: fx.Node) -> bool:
    """Whether `node` begins to move an activation out of device memory."""
    return node.target is torch.ops.fxckpt.offload.default


def is_wait_offload(node: fx.Node) -> bool:
    """Whether `node` lets an activation's device memory go."""
    return node.target is torch.ops.fxckpt.wait_offload.default


def is_reload(node: fx.Node) -> bool:
    """Whether `node` begins to bring an activation back to its device."""
    return node.target is torch.ops.fxckpt.reload.default


def is_wait_reload(node: fx.Node) -> bool:
    """Whether `node` lets an activation that came back be read."""
    return node.target is torch.ops.fxckpt.wait_reload.default


def is_order(node: fx.Node) -> bool:
    """Whether `node` only orders others: what reads its value behind it waits for what else it reads."""
    return node.target is torch.ops.fxckpt.after.default


def is_transfer(node: fx.Node) -> bool:
    """Whether `node` is one of the four of a transfer."""
    return is_offload(node) or is_wait_offload(node) or is_reload(node) or is_wait_reload(node)


def waits_for(node: fx.Node) -> list[fx.Node]:
    """What a transfer or an order node reads only to come after it: its argument ``first``."""
    listed = argument(node, "first")
    return [n for n in listed if isinstance(n, fx.Node)] if isinstance(listed, (list, tuple)) else []


def wait_for(node: fx.Node, first: Iterable[fx.Node]) -> None:
    """Let a transfer node, whose ``first`` stands last among its arguments, come after `first` too."""
    wanted = dict.fromkeys([*waits_for(node), *first])
    node.args = (*node.args[:-1], list(wanted))


def target_name(node: fx.Node) -> str:
    """The name of the function that `node` calls."""
    return str(getattr(node.target, "__name__", ""))


def is_rng_state(node: fx.Node) -> bool:
    """Whether `node` is a state of the random number generator, saved to draw the same numbers again."""
    source = node.args[0] if node.target is operator.getitem else None
    if not isinstance(source, fx.Node) or target_name(source) != "run_and_save_rng_state":
        return False
    return bool(node.args[1] == 0)


def makes_seeds(node: fx.Node) -> bool:
    """Whether `node` draws the seeds that Inductor's random operators of a graph read, a few bytes for each."""
    return str(node.target).startswith("prims.inductor_seed")


def draws_random(node: fx.Node) -> bool:
    """Whether `node` reads the random number generator."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    return bool(argument(node, "dropout_p") != 0.0)  # attention without dropout draws nothing


def argument(node: fx.Node, name: str) -> Any:
    """The value `node` passes for its operator's argument `name`, its default, or None where there is no such one.

    Operators that call graphs (``cond``, ``scan``, the ones that set random states) declare none.
    """
    schema = getattr(node.target, "_schema", None)
    for position, declared in enumerate(schema.arguments if schema is not None else ()):
        if declared.name == name:
            given = node.args[position] if position < len(node.args) else declared.default_value
            return node.kwargs.get(name, given)
    return None
