"""What nodes cost: FLOPs by PyTorch's own counter formulas (``torch.utils.flop_counter``)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from fxckpt import graph as G

CHEAP_FLOPS_PER_ELEMENT = 64
"""A value is cheap to recompute when the operators behind it do no more than this for each element of their result."""


_aten = torch.ops.aten
_LIKE = {  # operators that PyTorch has no formula for, though it has one for the same work on another device
    _aten._scaled_dot_product_flash_attention_for_cpu: _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _aten._scaled_dot_product_flash_attention_backward,
}
_WRAPPERS = {"run_and_save_rng_state": 0, "run_with_rng_state": 1, "graphsafe_run_with_rng_state": 0}
"""What the partitioner puts around a random operator, by name, and which of its arguments is the operator."""


def formulas_of_ours() -> dict[Any, Any]:
    """Formulas beside PyTorch's own, by operator, as ``FlopCounterMode(custom_mapping=...)`` takes them."""

    def raw(formula: Any) -> Any:
        def count(*args: Any, **kwargs: Any) -> Any:
            return formula(*args, **kwargs)

        count._get_raw = True  # type: ignore[attr-defined]  # it takes tensors, and needs no wrapper for that
        return count

    return {packet: raw(flop_registry[like]) for packet, like in _LIKE.items()}


def flops(node: fx.Node) -> int:
    """Floating point operations of one node, a multiply-add counting as two; 0 for operators without a formula.

    PyTorch gives formulas for matrix products, convolutions and attention, which is where the FLOPs are.
    """
    if node.op != "call_function":
        return 0
    packet, inputs = unwrapped(node)
    formula = flop_registry.get(_LIKE.get(packet, packet))
    if formula is None:
        return 0

    def shown(item: Any) -> Any:
        val = G.value(item) if isinstance(item, fx.Node) else item
        if isinstance(val, torch.Tensor):
            return val
        return G.hint(val) if isinstance(val, torch.SymInt) else val

    args, kwargs = pytree.tree_map_only(fx.Node, shown, (inputs, dict(node.kwargs)))
    count = formula(*_shapes(args), **_shapes(kwargs), out_val=_shapes(G.value(node)))
    return int(G.hint(count)) if not isinstance(count, int) else count


def unwrapped(node: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    """The operator that a node runs, without its overload, and its positional arguments."""
    wrapped = _WRAPPERS.get(getattr(node.target, "__name__", ""))
    if wrapped is None:
        return G.overload_packet(node), node.args
    return getattr(node.args[wrapped], "overloadpacket", None), node.args[wrapped + 1 :]


def _shapes(tree: Any) -> Any:
    def concrete(item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return item
        if all(isinstance(s, int) for s in item.shape):
            return item
        return torch.empty([G.hint(s) for s in item.shape], dtype=item.dtype, device="meta")

    return pytree.tree_map(concrete, tree)


def total_flops(nodes: Iterable[fx.Node]) -> int:
    """FLOPs of all `nodes`."""
    return sum(flops(n) for n in nodes)


def is_cheap(node: fx.Node) -> bool:
    """Whether recomputing this one node costs next to nothing and changes nothing.

    False for operators that draw random numbers, change their inputs, make sizes from data, come from outside ATen, or
    do much arithmetic for each element of their result.
    """
    target = node.target
    if callable(target) and getattr(target, "__module__", "") == "_operator":
        return True
    if not isinstance(target, torch._ops.OpOverload) or target.namespace not in ("aten", "prims"):
        return not isinstance(target, torch._ops.OpOverload) and G.tensor(node) is None and G.value(node) is not None
    if target._schema.is_mutable or G.draws_random(node) or G.binds_unbacked_symbol(node):
        return False
    val = G.tensor(node)
    elements = G.hint(val.numel()) if val is not None else 1
    return flops(node) <= CHEAP_FLOPS_PER_ELEMENT * max(elements, 1)
