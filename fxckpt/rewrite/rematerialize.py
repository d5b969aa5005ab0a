"""Passes on the backward graph that compute a cheap value again where it is read much later, instead of holding it.

A recomputed region has two phases: its forward runs again, then its gradients are taken. What both read is held from
one to the other; of a layer's values, those of the first phase's end are the widest. Where a value is a pointwise
function of what is held anyway, the gradients get a copy of their own, which a compiler that fuses makes inside the
kernel that reads it. Graphs that run kernel by kernel are left alone: there each copy would be a kernel more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import fx

from fxckpt import graph as G
from fxckpt.decide.cost import is_cheap
from fxckpt.rewrite.phases import find_gradients, find_readers

_SMALL = 8
"""A value of at most this fraction of another is small beside it: that it is held does not matter."""
_LONGEST_CHAIN = 16
"""Operators from a value to what it is made of."""


def for_gradients(backward: fx.Graph) -> int:
    """Give gradients their own copy of recomputed pointwise values, where what these are made of is held anyway.

    Needs: tags. Leaves: the copies, tagged as their originals, each before its first reader.

    Returns:
        How many values are copied.
    """
    nodes = list(backward.nodes)
    late = _Late(nodes)
    before = len(late.gradients)
    for value in reversed(nodes):
        if G.is_recomputed(value) and _is_pointwise(value):
            late.copy(value)
    return len(late.gradients) - before


class _Late:
    """The gradients of a backward graph, the copies made for them, and until where each value is read."""

    def __init__(self, nodes: Sequence[fx.Node]) -> None:
        self.place = {node: i for i, node in enumerate(nodes)}  # a copy has that of the node that it is made for
        self.first = list(nodes)  # at each place, the node or the first of its copies
        self.gradients = find_gradients(nodes)
        self.last_read = {value: self.place[readers[-1]] for value, readers in find_readers(nodes).items()}

    def copy(self, value: fx.Node) -> None:
        """Copy `value` for the gradients that read it, where others read it too and a copy costs no memory."""
        readers = [u for u in value.users if u in self.gradients]
        if not readers or len(readers) == len(value.users):
            return
        until = max(map(self._until, readers))
        if not all(self._is_there(i, value, until) for i in value.all_input_nodes):
            return
        place = min(self.place[u] for u in readers)
        made = _copy_before(self.first[place], [value])[value]  # before copies that read it
        self.first[place] = made
        self.place[made] = place
        self.gradients.add(made)
        for reader in readers:
            reader.replace_input_with(value, made)
        for read in map(G.view_base, value.all_input_nodes):
            self.last_read[read] = max(self.last_read.get(read, 0), until)

    def _until(self, reader: fx.Node) -> int:
        """Until where a value is read by `reader`: a view passes it on."""
        own = self.place[reader]
        return max(own, self.last_read.get(G.view_base(reader), 0)) if G.is_view(reader) else own

    def _is_there(self, read: fx.Node, value: fx.Node, until: int, steps: int = _LONGEST_CHAIN) -> bool:
        """Whether `read`, which `value` is made of, is small, held at `until` anyway, or pointwise of such values."""
        base = G.view_base(read)
        if G.tensor(base) is None or G.nbytes(base) * _SMALL <= G.nbytes(value):
            return True
        if self.last_read.get(base, 0) >= until:
            return True
        if not steps or not G.is_recomputed(read) or not _is_pointwise(read):
            return False
        return all(self._is_there(i, value, until, steps - 1) for i in read.all_input_nodes)


def _is_pointwise(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or G.tensor(node) is None:
        return False
    return is_cheap(node) and (torch.Tag.pointwise in target.tags or G.is_view(node))


def for_each_region(backward: fx.Graph) -> int:
    """Give each region's gradients their own copy of large values that are made of small ones, such as masks.

    Otherwise one copy is held through the whole backward, also while the layers' widest values are.

    Needs: tags. Leaves: the copies, tagged as their originals, each before its first reader.

    Returns:
        How many times a value is made again.
    """
    nodes = list(backward.nodes)
    order = {node: i for i, node in enumerate(nodes)}
    gradients = find_gradients(nodes)
    boundary = max((G.nbytes(n) for n in nodes if n.op == "placeholder" and _kind(n) is G.Kind.BOUNDARY), default=0)
    copied = 0
    for value in nodes:
        if 2 * G.nbytes(value) < boundary or len(value.users) < 2 or any(u.op == "output" for u in value.users):
            continue
        made_of = _from_small(value) if value not in gradients else None
        if made_of is None or all(_from_small(u) for u in value.users):
            continue
        for group in _groups(sorted(value.users, key=order.__getitem__), gradients)[1:]:
            copy = _copy_before(group[0], made_of)[value]
            for reader in group:
                reader.replace_input_with(value, copy)
            copied += 1
    return copied


def _kind(node: fx.Node) -> G.Kind | None:
    tag = G.tag(node)
    return tag.kind if tag is not None else None


def _from_small(value: fx.Node) -> list[fx.Node] | None:
    """The nodes that make `value` of values that are small beside it, in graph order, or None."""
    found: set[fx.Node] = set()
    todo = [value]
    while todo:
        node = todo.pop()
        small = G.tensor(node) is None or G.nbytes(node) * _SMALL <= G.nbytes(value)
        if node in found or (small and node is not value):
            continue
        if node.op != "call_function" or small or not is_cheap(node) or len(found) == _LONGEST_CHAIN:
            return None
        found.add(node)
        todo += node.all_input_nodes
    return sorted(found)


def _groups(readers: Iterable[fx.Node], gradients: set[fx.Node]) -> list[list[fx.Node]]:
    """`readers` in runs, within which no region's widest values are alive.

    These are between the first phase of a region and its second; a region's second and the next region's first adjoin.
    """
    groups: list[list[fx.Node]] = []
    for reader in readers:
        if groups and len(groups[-1]) == 1 and groups[-1][0] in gradients and reader not in gradients:
            groups[-1].append(reader)
        else:
            groups.append([reader])
    return groups


def _copy_before(place: fx.Node, nodes: Sequence[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Copies of `nodes`, which are in graph order and may read each other, right before `place`."""
    copies: dict[fx.Node, fx.Node] = {}
    with place.graph.inserting_before(place):
        for node in nodes:
            copies[node] = place.graph.node_copy(node, lambda n: copies.get(n, n))
            copies[node]._rename(f"{node.name}_again")
    return copies
