"""The values at the edges of recomputed regions, by the rules of ``graph_plan.py``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from fxckpt import graph as G
from fxckpt.capture.regions import Region
from fxckpt.decide import saves
from fxckpt.decide.cost import is_cheap
from fxckpt.decide.policy import Treatment


@dataclass
class Draft:
    """Working state of one planning run."""

    owner: dict[fx.Node, Region]
    treatments: Mapping[str, Treatment]
    kept: Mapping[fx.Node, Region]
    backward: set[fx.Node]
    parametric: set[fx.Node]
    outputs: set[fx.Node]
    given: set[fx.Node]
    """Activations of an earlier graph, which are inputs of this one."""
    readers: dict[fx.Node, list[Region]] = field(default_factory=dict)
    exits: set[fx.Node] = field(default_factory=set)
    free: set[fx.Node] = field(default_factory=set)
    again: dict[fx.Node, list[Region]] = field(default_factory=dict)
    """Values outside recomputed regions that are recomputed with these regions."""
    named: dict[fx.Node, str] = field(default_factory=dict)
    """Interior values that are saved, and what named them."""

    def moves(self, node: fx.Node, readers: Sequence[Region]) -> bool:
        """Whether what these regions start from leaves device memory."""
        return node in self.parametric and all(self.treatments[r.layer.name].offload for r in readers)


def find_exits(draft: Draft) -> None:
    """Values of a recomputed region that something outside it reads."""
    for node, region in draft.owner.items():
        read = node in draft.outputs or any(
            u not in draft.backward and u.op == "call_function" and draft.owner.get(u) is not region for u in node.users
        )
        if read and G.tensor(node) is not None:
            draft.exits.add(node if G.is_partial_view(node) else _owned(node))


def _owned(node: fx.Node) -> fx.Node:
    """The node to save in place of a view: its base, or `node` where the base is no value of the forward."""
    base = G.view_base(node)
    return base if base.op == "call_function" and G.tensor(base) is not None else node


def find_entries(draft: Draft) -> None:
    """Values that recomputed regions read from outside, as boundaries (rule 1) or free (rule 2)."""
    partial: list[tuple[fx.Node, Region]] = []
    for node, region in draft.owner.items():
        for read in node.all_input_nodes:
            base = G.view_base(read)
            if base in draft.given:
                _add_reader(draft, base, region)
            if draft.owner.get(read) is region or read.op != "call_function" or read in draft.backward:
                continue
            if G.tensor(read) is None or base.op != "call_function":
                continue
            if read not in draft.parametric:
                _try_free(draft, read)
                if read in draft.free:
                    continue
            if G.is_partial_view(read):
                partial.append((read, region))
            else:
                _add_reader(draft, _owned(read), region)
    for read, region in partial:  # a part of something that is saved anyway is not saved once more
        base = _owned(read)
        _add_reader(draft, base if base in draft.readers or base in draft.exits else read, region)


def start_from_what_is_saved(draft: Draft) -> None:
    """Rule 3: of two values of which one is made of the other, save the one that the backward reads."""
    for node in list(draft.readers):
        if node in draft.given or draft.moves(node, draft.readers[node]):
            continue
        chain = _made_of(draft, node)
        if chain is None:
            continue
        source, made = chain
        for region in draft.readers.pop(node):
            _add_reader(draft, source, region)
            for value in made:
                draft.again.setdefault(value, []).append(region)


def _made_of(draft: Draft, node: fx.Node) -> tuple[fx.Node, list[fx.Node]] | None:
    """The value read by the backward that `node` is cheaply made of, and the values on the way, or None."""
    made: list[fx.Node] = []
    source = node  # that the region's own backward reads it, too, saves nothing
    while source is node or not _read_by_backward(draft, source):
        fixed = source in draft.owner or source in draft.exits or source in draft.outputs or G.keeps_saved(source)
        if fixed or not is_cheap(source) or aliases_output(draft, source) or len(made) == _LONGEST_CHAIN:
            return None
        made.append(source)
        wide = {i for i in source.all_input_nodes if i.op == "call_function" and 2 * _size(i) > _size(node)}
        if len(wide) != 1:
            return None
        (source,) = wide
    usable = made and source not in draft.owner and G.tensor(source) is not None and _owned(source) is source
    return (source, made) if usable and _size(source) <= _size(node) else None


_LONGEST_CHAIN = 8
"""Steps from a value to what it is made of; a layer norm has four."""


def _size(node: fx.Node) -> int:
    value = G.value(node)
    parts = value if isinstance(value, (tuple, list)) else (value,)
    return sum(G.storage_nbytes(p) for p in parts if isinstance(p, torch.Tensor))


def _read_by_backward(draft: Draft, node: fx.Node) -> bool:
    """Whether the backward reads `node`, or a view of it that is made outside recomputed regions."""
    return any(
        user in draft.backward or (user not in draft.owner and G.is_view(user) and _read_by_backward(draft, user))
        for user in node.users
    )


def _add_reader(draft: Draft, node: fx.Node, region: Region) -> None:
    readers = draft.readers.setdefault(node, [])
    if region not in readers:
        readers.append(region)


def _try_free(draft: Draft, value: fx.Node) -> None:
    closure = G.walk_inputs([value], lambda n: n.op == "call_function" and n not in draft.free)
    if not all(is_cheap(n) and not G.keeps_saved(n) for n in closure):
        return
    sources = {i for n in closure for i in n.all_input_nodes if i.op == "placeholder" and G.tensor(i) is not None}
    if sum(G.nbytes(s) for s in sources) < max(G.nbytes(value), 1):
        draft.free |= closure


def find_named(draft: Draft) -> None:
    """Interior values that the policy saves (rule 5)."""
    for node, region in draft.owner.items():
        entry = saves.match(node, draft.treatments[region.layer.name].save or ())
        if entry is not None and G.tensor(node) is None:  # what the backward alone reads of several results
            draft.named[node] = entry
        for found in saves.results(node) if entry is not None else ():
            value = found if G.is_partial_view(found) else _owned(found)
            if draft.owner.get(value) is region and G.tensor(value) is not None:
                draft.named.setdefault(value, str(entry))


def aliases_output(draft: Draft, node: fx.Node) -> bool:
    """Whether an output of the graph lies in the storage of `node`."""
    base = G.view_base(node)
    return any(G.view_base(out) is base for out in draft.outputs)
