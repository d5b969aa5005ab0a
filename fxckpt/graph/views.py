"""Which nodes share a storage."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from fxckpt.graph.meta import tensor
from fxckpt.graph.sizes import storage_nbytes, tensor_nbytes

aten = torch.ops.aten

_VIEW_OPS = frozenset(
    {
        aten.alias,
        aten.as_strided,
        aten.detach,
        aten.diagonal,
        aten.expand,
        aten.permute,
        aten.select,
        aten.slice,
        aten.split,
        aten.split_with_sizes,
        aten.squeeze,
        aten.t,
        aten.transpose,
        aten.unbind,
        aten.unfold,
        aten.unsqueeze,
        aten.view,
        aten._unsafe_view,
        aten.lift_fresh,
    }
)


def overload_packet(node: fx.Node) -> Any:
    """The operator without its overload (``aten.view`` for ``aten.view.default``), or the target itself."""
    return getattr(node.target, "overloadpacket", node.target)


def is_getitem(node: fx.Node) -> bool:
    """Whether `node` picks one result out of an operator's several."""
    return node.op == "call_function" and node.target is operator.getitem


def is_view(node: fx.Node) -> bool:
    """Whether `node` shares the storage of its first input."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and overload_packet(source) in _VIEW_OPS
    return overload_packet(node) in _VIEW_OPS


def view_base(node: fx.Node) -> fx.Node:
    """The node whose storage `node` shares, through any chain of views; `node` itself where it owns its storage."""
    while is_view(node):
        source = node.args[0]
        if not isinstance(source, fx.Node):
            break
        node = source
    return node


def is_partial_view(node: fx.Node) -> bool:
    """Whether `node` shows less than the storage it shares."""
    base, shown = view_base(node), tensor(node)
    whole = tensor(base)
    if base is node or shown is None or whole is None:
        return False
    return tensor_nbytes(shown) < storage_nbytes(whole)
