"""How many bytes are alive while each node of a graph runs, one after the other."""

from __future__ import annotations

from collections.abc import Container, Sequence

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
    last: dict[fx.Node, int] = {}
    for i, node in enumerate(nodes):
        last.setdefault(node, i)
        for read in node.all_input_nodes:
            base = G.view_base(read)
            last[base] = max(last.get(base, i), i)
    change = [0] * (len(nodes) + 1)
    for i, node in enumerate(nodes):
        if node in resident or G.view_base(node) is not node or G.is_getitem(node):
            continue
        size = _storage_bytes(node)
        change[i] += size
        change[last[node] + 1] -= size
    alive, total = [], 0
    for i in range(len(nodes)):
        total += change[i]
        alive.append(total)
    return alive


def _storage_bytes(node: fx.Node) -> int:
    val = G.tensor(node)
    return G.nbytes(node) if val is None else G.storage_nbytes(val)
