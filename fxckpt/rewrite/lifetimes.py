"""How many bytes are alive while each node of a graph runs, one after the other."""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import accumulate

from torch import fx

from fxckpt import graph as G


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
    for life in G.lifetimes(nodes, resident).values():
        change[life.first] += life.nbytes
        change[life.last + 1] -= life.nbytes
    return list(accumulate(change[:-1]))
