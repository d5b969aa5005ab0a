"""What ``save=`` can name: kinds of operators, operators, and values that the model's author named."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from torch import fx

from fxckpt import graph as G

KINDS = {
    "attention": re.compile(
        r"aten\._?scaled_dot_product_\w*attention\w*|aten\._(flash|efficient)_attention_forward|flex_attention"
    ),
    "matmul": re.compile(r"aten\.(mm|addmm|bmm|baddbmm|_scaled_mm|convolution)|\w+\._?grouped_mm\w*"),
}
"""Kinds of operators by name: fused attention kernels, and matrix products with convolutions. Libraries have grouped
products of their own, as transformers has for experts in types that PyTorch's does not take."""


def match(node: fx.Node, save: Iterable[str]) -> str | None:
    """The first of `save` that names what `node` computes, or None."""
    if node.op != "call_function":
        return None
    operator, packet = str(node.target), str(G.overload_packet(node))
    for entry in save:
        kind = KINDS.get(entry)
        if kind is not None:
            if kind.fullmatch(packet):
                return entry
        elif entry in G.given_names(node) or entry.replace("::", ".") in (operator, packet, packet.rpartition(".")[2]):
            return entry
    return None


def results(node: fx.Node) -> Sequence[fx.Node]:
    """The tensors that `node` gives: itself, or what is picked out of its several."""
    return [node] if G.tensor(node) is not None else [user for user in node.users if G.is_getitem(user)]


def known(nodes: Iterable[fx.Node]) -> list[str]:
    """What could be saved among `nodes`: names that were given, kinds, operators; no views."""
    named: dict[str, None] = {}
    kinds: set[str] = set()
    operators: dict[str, None] = {}
    for node in nodes:
        named |= dict.fromkeys(G.given_names(node))
        if node.op != "call_function" or G.is_view(node) or G.is_getitem(node):
            continue
        kinds |= {kind for kind in KINDS if match(node, [kind])}
        if "." in str(G.overload_packet(node)):
            operators[str(G.overload_packet(node))] = None
    return [*named, *(kind for kind in KINDS if kind in kinds), *sorted(operators)]
