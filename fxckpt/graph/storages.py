"""Storages: which result owns which memory, and from which node to which it is alive."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import fx

from fxckpt.graph.meta import tensor, value
from fxckpt.graph.sizes import nbytes, storage_nbytes
from fxckpt.graph.structure import output_args
from fxckpt.graph.views import is_getitem, view_base

Storage = tuple[fx.Node, int | None]
"""The node that makes it, and which of the node's results lies in it; None where there is one."""


@dataclass(frozen=True)
class Lifetime:
    """A storage while a graph runs, one node after the other.

    Attributes:
        nbytes: its size, by the sizes that were traced.
        first: position of the node that makes it.
        last: position of the last node that reads it; that of the output node where it is returned.
    """

    nbytes: int
    first: int
    last: int


def storage_of(node: fx.Node) -> Storage:
    """The storage that `node` lies in, through views, changes in place, and picking one of several results."""
    base = view_base(node)
    while _changes_in_place(base):
        source = base.args[0]
        assert isinstance(source, fx.Node)
        base = view_base(source)
    if is_getitem(base):
        source, part = base.args
        assert isinstance(source, fx.Node) and isinstance(part, int)
        return source, part
    return base, None


def lifetimes(nodes: Sequence[fx.Node], resident: Container[fx.Node] = ()) -> dict[Storage, Lifetime]:
    """How long each storage is alive that a graph makes or is given.

    What operators need inside themselves is not known.

    Args:
        nodes: a graph's, in order.
        resident: nodes whose storage is alive whatever the graph does, such as parameters: they are left out.
    """
    owners = {node: storage_of(node) for node in nodes if node.op != "output"}
    left_out = {owners[node] for node in owners if node in resident}
    last: dict[Storage, int] = {}
    for i, node in enumerate(nodes):
        for read in node.all_input_nodes:
            last[owners[read]] = i
    found: dict[Storage, Lifetime] = {}
    for i, node in enumerate(nodes):
        for storage, size in _made(node) if owners.get(node, (None,))[0] is node else ():
            if storage not in left_out:
                found[storage] = Lifetime(size, i, max(i, last.get(storage, i)))
    return found


def bytes_alive(nodes: Sequence[fx.Node], resident: Container[fx.Node] = ()) -> list[int]:
    """The bytes of all storages that are alive while each node runs, by the sizes they were traced with.

    A storage is alive from the node that makes it to the last one that reads it or a view of it; one that is returned,
    to the end. What operators need inside themselves is not known.

    Args:
        nodes: a graph's, in order.
        resident: placeholders that stay whatever the graph does, such as parameters: they do not count.

    Returns:
        Bytes for each node, its inputs and results included.
    """
    change = [0] * (len(nodes) + 1)
    for life in lifetimes(nodes, resident).values():
        change[life.first] += life.nbytes
        change[life.last + 1] -= life.nbytes
    return list(accumulate(change[:-1]))


def returned(graph: fx.Graph) -> list[Storage]:
    """The storages that a graph returns, in order."""
    return list(dict.fromkeys(storage_of(n) for n in output_args(graph) if isinstance(n, fx.Node)))


def _made(node: fx.Node) -> list[tuple[Storage, int]]:
    results = value(node)
    if isinstance(results, list | tuple):
        return [((node, i), storage_nbytes(r)) for i, r in enumerate(results) if isinstance(r, torch.Tensor)]
    val = tensor(node)
    return [((node, None), nbytes(node) if val is None else storage_nbytes(val))]


def _changes_in_place(node: fx.Node) -> bool:
    """Whether what `node` gives is its first input, changed."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or len(schema.returns) != 1 or not schema.arguments:
        return False
    given, taken = schema.returns[0].alias_info, schema.arguments[0].alias_info
    return given is not None and given.is_write and taken is not None and given.before_set == taken.before_set
