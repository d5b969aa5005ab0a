"""A pass on the joint graph: attention whose mask is known beforehand to be the causal one, or to hide nothing.

Captured models build masks that they leave out when they run eagerly, since what decides it depends on data. Where a
mask is made of sizes alone its values are known while the graph is rewritten. Attention that is told ``is_causal``
needs no mask, of batch x length x length numbers, and computes half as much.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxckpt import graph as G
from fxckpt.decide.cost import is_cheap
from fxckpt.torch_private import running_for_real

_MOST_BYTES = 1 << 30
"""Larger masks, and those that are made of larger values, are not looked at: the values are computed on the host."""


class _Mask(enum.Enum):
    NONE = "hides nothing"
    CAUSAL = "hides what comes later"
    OTHER = "anything else"


def drop_known_masks(graph: fx.Graph) -> int:
    """Tell attention operators ``is_causal`` instead of a causal mask, and give them no mask that hides nothing.

    Needs: nothing. Leaves: no node that only made such a mask.

    Returns:
        How many attention operators, forward and backward, lost their mask.
    """
    known = _Known()
    found: dict[int, _Mask] = {}
    dropped: list[fx.Node] = []
    for node in graph.nodes:
        known.see(node)
        name = _mask_argument(node)
        mask = G.argument(node, name) if name else None
        if mask not in known.number or G.argument(node, "is_causal"):
            continue
        number = known.number[mask]
        if number not in found:
            found[number] = _look_at(mask)
        if found[number] is _Mask.OTHER or (found[number] is _Mask.CAUSAL and not _is_square(node)):
            continue
        _set_argument(node, name, None)
        _set_argument(node, "is_causal", found[number] is _Mask.CAUSAL)
        dropped.append(mask)
    _erase_unread(dropped)
    return len(dropped)


class _Known:
    """The nodes that are made of sizes alone, with a number for each, the same for those that compute the same.

    Layers often make a mask each, all of them alike.
    """

    def __init__(self) -> None:
        self.number: dict[fx.Node, int] = {}
        self.keys: dict[Hashable, int] = {}

    def see(self, node: fx.Node) -> None:
        """Take in a node whose inputs were seen before."""
        if node.op != "call_function" or any(n not in self.number for n in node.all_input_nodes):
            return
        if _is_looked_at(node) and is_cheap(node):
            made_of = pytree.tree_map_only(fx.Node, self._name, (node.args, dict(node.kwargs)))
            self.number[node] = self.keys.setdefault((node.target, repr(made_of)), len(self.keys))

    def _name(self, node: fx.Node) -> str:
        return f"%{self.number[node]}"


def _mask_argument(node: fx.Node) -> str:
    """What an attention operator calls its mask; empty for other nodes."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return ""
    names = {a.name for a in node.target._schema.arguments}
    found = names & {"attn_mask", "attn_bias"}
    return found.pop() if found and {"is_causal", "query", "key"} <= names else ""


def _set_argument(node: fx.Node, name: str, value: Any) -> None:
    for position, declared in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if declared.name == name:
            if position < len(node.args) and not declared.kwarg_only:
                node.update_arg(position, value)
            else:
                node.update_kwarg(name, value)


def _is_square(node: fx.Node) -> bool:
    """Whether there are as many queries as keys: else operators differ in what they call causal."""
    lengths = [val.shape[-2] for n in ("query", "key") if (val := G.tensor(G.argument(node, n))) is not None]
    return len(lengths) == 2 and isinstance(lengths[0], int) and lengths[0] == lengths[1]


def _look_at(mask: fx.Node) -> _Mask:
    """What `mask`, which is made of sizes alone, hides, by its values."""
    closure = sorted(G.walk_inputs([mask], lambda n: True))
    last = {read: node for node in closure for read in node.all_input_nodes}
    values: dict[fx.Node, torch.Tensor] = {}
    with running_for_real():
        for node in closure:
            try:
                values[node] = _run(node, values)
            except (RuntimeError, NotImplementedError):  # no kernel for the host
                return _Mask.OTHER
            for read in node.all_input_nodes:
                if last[read] is node:
                    values.pop(read, None)
        return _classify(values[mask])


def _is_looked_at(node: fx.Node) -> bool:
    """Whether `node` is a tensor of known size, not too large to be looked at."""
    val = G.tensor(node)
    return val is not None and all(isinstance(s, int) for s in val.shape) and G.nbytes(node) <= _MOST_BYTES


def _run(node: fx.Node, values: dict[fx.Node, Any]) -> torch.Tensor:
    """The result of `node` on the host."""
    on_host = pytree.tree_map_only(torch.device, lambda _: torch.device("cpu"), (node.args, dict(node.kwargs)))
    args, kwargs = pytree.tree_map_only(fx.Node, values.__getitem__, on_host)
    result: torch.Tensor = node.target(*args, **kwargs)  # type: ignore[operator]
    return result


def _classify(mask: torch.Tensor) -> _Mask:
    """By the values that attention adds to its scores: 0 leaves one as it is, -inf hides it."""
    if not mask.is_floating_point() or mask.ndim < 2:
        return _Mask.OTHER
    shown = _without_copies(mask)
    if not shown.any():
        return _Mask.NONE
    length = shown.shape[-1]
    causal = torch.full((length, length), float("-inf"), dtype=shown.dtype).triu(1)
    return _Mask.CAUSAL if shown.shape[-2] == length and bool((shown == causal).all()) else _Mask.OTHER


def _without_copies(mask: torch.Tensor) -> torch.Tensor:
    for dim, stride in enumerate(mask.stride()[:-2]):
        if stride == 0:
            mask = mask.narrow(dim, 0, 1)
    return mask


def _erase_unread(nodes: Iterable[fx.Node]) -> None:
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node.op == "call_function" and not node.users and not node._erased:
            todo += node.all_input_nodes
            node.graph.erase_node(node)
