"""The plan of one graph: a policy applied to a joint graph.

``make_plan`` tags the graph's forward values (see :class:`fxckpt.graph.Kind`) and returns the same as frozen data. It
decides only; ``rewrite`` obeys the tags, and a graph without tags is left as it is.

Rules, in the order they are applied to a recomputed region:

1. A value read by the region but made outside is a *boundary activation*, and saved. Of a chain of views the tensor
   that owns the storage is saved, once, unless a view shows only a part of it.
2. If such a value does not depend on a parameter (masks, rotary tables, position ids) and is cheap to recompute from
   graph inputs that are smaller, it is recomputed instead.
3. If such a value is a cheap function of ONE other that the backward needs anyway (a layer norm's result, of its
   input), the region starts from that one, and recomputes the function too; not where the value leaves device memory.
4. A value of the region that is read outside it (by the forward, or as a graph output) is never recomputed.
5. A value of the region that the policy names (``save=``) is saved, with the tensor that owns its storage.
6. All other values of the region are its interior: recomputed, never saved.

What is saved in a region that is kept, the partitioner chooses; where it is to be offloaded, its values are tagged so.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from fxckpt import graph as G
from fxckpt.capture.regions import Region
from fxckpt.decide import saves
from fxckpt.decide.cost import is_cheap
from fxckpt.decide.kept import kept_to_move, tag_kept
from fxckpt.decide.policy import Treatment
from fxckpt.decide.transfer_names import TransferNames


@dataclass(frozen=True)
class Boundary:
    """A boundary activation.

    Attributes:
        name: name of its transfer, such as ``layers_3_input``.
        node: name of its node in the joint and forward graph.
        shape: sizes, as traced.
        dtype: element type.
        nbytes: bytes of its elements.
        source: the source line that made it.
        regions: names of the recomputed regions that start from it.
        offload: whether it leaves device memory between forward and backward.
    """

    name: str
    node: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    source: str
    regions: tuple[str, ...]
    offload: bool


@dataclass(frozen=True)
class RegionPlan:
    """What becomes of one region.

    Attributes:
        name: the layer's name, with ``#k`` for a further call.
        layer: the layer's name.
        call: which call of the layer in this graph.
        treatment: what the policy chose.
        inside: name of the recomputed region around it, which then decides, or None.
    """

    name: str
    layer: str
    call: int
    treatment: Treatment
    inside: str | None


@dataclass(frozen=True)
class GraphPlan:
    """A policy applied to one graph.

    Attributes:
        regions: what becomes of each region.
        boundaries: the boundary activations.
        matched: those of the ``save=`` that named a value of a recomputed region.
    """

    regions: tuple[RegionPlan, ...] = ()
    boundaries: tuple[Boundary, ...] = ()
    matched: frozenset[str] = frozenset()

    @property
    def recomputes(self) -> bool:
        """Whether any region is recomputed."""
        return any(r.treatment.recompute for r in self.regions)


@dataclass
class _Draft:
    """Working state of one planning run."""

    owner: dict[fx.Node, Region]
    treatments: Mapping[str, Treatment]
    kept: Mapping[fx.Node, Region]
    backward: set[fx.Node]
    parametric: set[fx.Node]
    outputs: set[fx.Node]
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


def make_plan(
    graph: fx.Graph,
    regions: Sequence[Region],
    treatments: Mapping[str, Treatment],
    *,
    learned: set[fx.Node],
    num_forward_outputs: int,
) -> GraphPlan:
    """Tag `graph` and say what was decided.

    Args:
        graph: the joint graph.
        regions: its regions.
        treatments: by layer name, with nothing left open; layers that are missing are kept.
        learned: the placeholders that are parameters, or activations made from parameters in an earlier graph.
        num_forward_outputs: how many of the graph's outputs are the forward's.
    """
    owner = _owners(regions, treatments)
    region_plans = tuple(
        RegionPlan(r.name, r.layer.name, r.call, treatments.get(r.layer.name, Treatment.KEEP), _inside(r, treatments))
        for r in regions
    )
    parametric = _dependents(graph, learned)
    names = TransferNames(regions)
    kept = kept_to_move(regions, treatments, owner)
    if not owner:
        tag_kept(kept, parametric, names)
        return GraphPlan(region_plans)
    backward = G.backward_nodes(graph)
    outputs = {n for n in G.output_args(graph)[:num_forward_outputs] if isinstance(n, fx.Node)}
    draft = _Draft(owner, treatments, kept, backward, parametric, outputs)
    _find_exits(draft)
    _find_entries(draft)
    _start_from_what_is_saved(draft)
    _find_named(draft)
    boundaries = _name_boundaries(draft, names)
    _tag_all(draft, boundaries, names)
    tag_kept(kept, parametric, names)
    return GraphPlan(region_plans, tuple(b for b, _ in boundaries.values()), frozenset(draft.named.values()))


def _outermost(region: Region, treatments: Mapping[str, Treatment]) -> Region | None:
    found, step = None, region
    while step is not None:
        if treatments.get(step.layer.name, Treatment.KEEP).recompute:
            found = step
        step = step.parent  # type: ignore[assignment]
    return found


def _inside(region: Region, treatments: Mapping[str, Treatment]) -> str | None:
    around = _outermost(region, treatments)
    return None if around is None or around is region else around.name


def _owners(regions: Sequence[Region], treatments: Mapping[str, Treatment]) -> dict[fx.Node, Region]:
    """For each node of a recomputed region, the outermost recomputed region it is in.

    The seeds of random operators are of no region, wherever they are drawn: drawn again they would be others.
    """
    owner: dict[fx.Node, Region] = {}
    for region in regions:
        around = _outermost(region, treatments)
        if around is not None:
            for node in region.nodes:
                if not G.makes_seeds(node):
                    owner.setdefault(node, around)
    return owner


def _dependents(graph: fx.Graph, sources: set[fx.Node]) -> set[fx.Node]:
    found = set(sources)
    for node in graph.nodes:
        if node.op == "call_function" and any(i in found for i in node.all_input_nodes):
            found.add(node)
    return found


def _find_exits(draft: _Draft) -> None:
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


def _find_entries(draft: _Draft) -> None:
    """Values that recomputed regions read from outside, as boundaries (rule 1) or free (rule 2)."""
    partial: list[tuple[fx.Node, Region]] = []
    for node, region in draft.owner.items():
        for read in node.all_input_nodes:
            if draft.owner.get(read) is region or read.op != "call_function" or read in draft.backward:
                continue
            if G.tensor(read) is None or G.view_base(read).op != "call_function":
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


def _start_from_what_is_saved(draft: _Draft) -> None:
    """Rule 3: of two values of which one is made of the other, save the one that the backward reads."""
    for node in list(draft.readers):
        if draft.moves(node, draft.readers[node]):
            continue
        chain = _made_of(draft, node)
        if chain is None:
            continue
        source, made = chain
        for region in draft.readers.pop(node):
            _add_reader(draft, source, region)
            for value in made:
                draft.again.setdefault(value, []).append(region)


def _made_of(draft: _Draft, node: fx.Node) -> tuple[fx.Node, list[fx.Node]] | None:
    """The value read by the backward that `node` is cheaply made of, and the values on the way, or None."""
    made: list[fx.Node] = []
    source = node  # that the region's own backward reads it, too, saves nothing
    while source is node or not _read_by_backward(draft, source):
        fixed = source in draft.owner or source in draft.exits or source in draft.outputs or G.keeps_saved(source)
        if fixed or not is_cheap(source) or _aliases_output(draft, source) or len(made) == _LONGEST_CHAIN:
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


def _read_by_backward(draft: _Draft, node: fx.Node) -> bool:
    """Whether the backward reads `node`, or a view of it that is made outside recomputed regions."""
    return any(
        user in draft.backward or (user not in draft.owner and G.is_view(user) and _read_by_backward(draft, user))
        for user in node.users
    )


def _add_reader(draft: _Draft, node: fx.Node, region: Region) -> None:
    readers = draft.readers.setdefault(node, [])
    if region not in readers:
        readers.append(region)


def _try_free(draft: _Draft, value: fx.Node) -> None:
    closure = G.walk_inputs([value], lambda n: n.op == "call_function" and n not in draft.free)
    if not all(is_cheap(n) and not G.keeps_saved(n) for n in closure):
        return
    sources = {i for n in closure for i in n.all_input_nodes if i.op == "placeholder" and G.tensor(i) is not None}
    if sum(G.nbytes(s) for s in sources) < max(G.nbytes(value), 1):
        draft.free |= closure


def _find_named(draft: _Draft) -> None:
    """Interior values that the policy saves (rule 5)."""
    for node, region in draft.owner.items():
        entry = saves.match(node, draft.treatments[region.layer.name].save or ())
        if entry is not None and G.tensor(node) is None:  # what the backward alone reads of several results
            draft.named[node] = entry
        for found in saves.results(node) if entry is not None else ():
            value = found if G.is_partial_view(found) else _owned(found)
            if draft.owner.get(value) is region and G.tensor(value) is not None:
                draft.named.setdefault(value, str(entry))


def _name_boundaries(draft: _Draft, names: TransferNames) -> dict[fx.Node, tuple[Boundary, G.Tag]]:
    """Boundary and tag of each value that is saved at the edge of a recomputed region, in graph order."""
    used: dict[str, int] = {}
    made: dict[fx.Node, tuple[Boundary, G.Tag]] = {}
    for node in sorted(
        draft.readers, key=lambda n: (min(r.index for r in draft.readers[n]), n not in draft.parametric, n)
    ):
        readers = draft.readers[node]
        stem = names.of(readers[0], "input")
        count = used[stem] = used.get(stem, -1) + 1
        name = f"{stem}_{count}" if count else stem
        moves = draft.moves(node, readers) and not _aliases_output(draft, node)
        val = G.tensor(node)
        assert val is not None
        shape = tuple(G.hint(s) for s in val.shape)
        boundary = Boundary(
            name,
            node.name,
            shape,
            val.dtype,
            G.nbytes(node),
            G.source_line(node),
            tuple(r.name for r in readers),
            moves,
        )
        made[node] = boundary, G.Tag(G.Kind.BOUNDARY, tuple(r.index for r in readers), name, moves)
    return made


def _aliases_output(draft: _Draft, node: fx.Node) -> bool:
    base = G.view_base(node)
    return any(G.view_base(out) is base for out in draft.outputs)


def _exit_tag(draft: _Draft, node: fx.Node, names: TransferNames) -> G.Tag:
    """Of a value that a recomputed region gives; it leaves device memory where a kept region that does so reads it."""
    region = draft.owner.get(node)
    if region is None:
        return G.Tag(G.Kind.BOUNDARY)
    moves = node in draft.parametric and not _aliases_output(draft, node) and _is_read(node, draft.kept)
    return G.Tag(G.Kind.BOUNDARY, (region.index,), names.of(region, node.name) if moves else "", moves)


def _is_read(node: fx.Node, readers: Container[fx.Node]) -> bool:
    return any(user in readers or (G.is_view(user) and _is_read(user, readers)) for user in node.users)


def _tag_all(draft: _Draft, boundaries: Mapping[fx.Node, tuple[Boundary, G.Tag]], names: TransferNames) -> None:
    for node, (_, tag) in boundaries.items():
        G.set_tag(node, tag)
    for node in draft.exits:
        if G.tag(node) is None:
            G.set_tag(node, _exit_tag(draft, node, names))
    for node in draft.named:
        region = draft.owner[node]
        if G.tag(node) is None:
            moves = draft.moves(node, [region]) and G.tensor(node) is not None
            G.set_tag(node, G.Tag(G.Kind.NAMED, (region.index,), names.of(region, node.name), moves))
    for node, readers in draft.again.items():
        if G.tag(node) is None:
            G.set_tag(node, G.Tag(G.Kind.INTERIOR, tuple(r.index for r in readers)))
    for node in draft.free:
        if G.tag(node) is None:
            G.set_tag(node, G.Tag(G.Kind.FREE))
    for node, region in draft.owner.items():
        if G.tag(node) is None and not G.keeps_saved(node):
            G.set_tag(node, G.Tag(G.Kind.INTERIOR, (region.index,)))
    for node in draft.owner:  # views, outside the region, of what is saved for it
        for read in node.all_input_nodes:
            while G.is_view(read) and G.tag(read) is None and read.op == "call_function":
                G.set_tag(read, G.Tag(G.Kind.FREE))
                read = read.args[0]  # type: ignore[assignment]
