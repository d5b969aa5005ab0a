"""The plan of one graph: a policy applied to a joint graph.

``make_plan`` tags the graph's forward values (see :class:`fxckpt.graph.Kind`) and returns the same as frozen data. It
decides only; ``rewrite`` obeys the tags, and a graph without tags is left as it is.

Rules, in the order they are applied to a recomputed region:

1. A value read by the region but made outside is a *boundary activation*, and saved. Of a chain of views the tensor
   that owns the storage is saved, once, unless a view shows only a part of it. An input of the graph, which is there
   anyway, is one where it is an activation of an earlier graph that is to leave device memory.
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
from dataclasses import dataclass

import torch
from torch import fx

from fxckpt import graph as G
from fxckpt.capture.regions import Region
from fxckpt.decide.edges import (
    Draft,
    aliases_output,
    find_entries,
    find_exits,
    find_named,
    start_from_what_is_saved,
)
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


def make_plan(
    graph: fx.Graph,
    regions: Sequence[Region],
    treatments: Mapping[str, Treatment],
    *,
    learned: set[fx.Node],
    given: set[fx.Node] | None = None,
    num_forward_outputs: int,
) -> GraphPlan:
    """Tag `graph` and say what was decided.

    Args:
        graph: the joint graph.
        regions: its regions.
        treatments: by layer name, with nothing left open; layers that are missing are kept.
        learned: the placeholders that are parameters, or activations made from parameters in an earlier graph.
        given: the placeholders that are such activations, made before this graph: where each layer is a graph of its
            own, what it starts from. They are saved whatever is planned, and leave device memory if they are to.
        num_forward_outputs: how many of the graph's outputs are the forward's.
    """
    owner = _owners(regions, treatments)
    region_plans = tuple(
        RegionPlan(r.name, r.layer.name, r.call, treatments.get(r.layer.name, Treatment.KEEP), _inside(r, treatments))
        for r in regions
    )
    parametric = _dependents(graph, learned)
    names = TransferNames(regions)
    given = given or set()
    kept = kept_to_move(regions, treatments, owner, given)
    if not owner:
        tag_kept(kept, parametric, names)
        return GraphPlan(region_plans)
    backward = G.backward_nodes(graph)
    outputs = {n for n in G.output_args(graph)[:num_forward_outputs] if isinstance(n, fx.Node)}
    draft = Draft(owner, treatments, kept, backward, parametric, outputs, given)
    find_exits(draft)
    find_entries(draft)
    start_from_what_is_saved(draft)
    find_named(draft)
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


def _name_boundaries(draft: Draft, names: TransferNames) -> dict[fx.Node, tuple[Boundary, G.Tag]]:
    """Boundary and tag of each value that is saved at the edge of a recomputed region, in graph order."""
    used: dict[str, int] = {}
    made: dict[fx.Node, tuple[Boundary, G.Tag]] = {}
    for node in sorted(
        draft.readers, key=lambda n: (min(r.index for r in draft.readers[n]), n not in draft.parametric, n)
    ):
        readers = draft.readers[node]
        moves = draft.moves(node, readers) and not aliases_output(draft, node)
        if node in draft.given and not moves:
            continue
        stem = names.of(readers[0], "input")
        count = used[stem] = used.get(stem, -1) + 1
        name = f"{stem}_{count}" if count else stem
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


def _exit_tag(draft: Draft, node: fx.Node, names: TransferNames) -> G.Tag:
    """Of a value that a recomputed region gives; it leaves device memory where a kept region that does so reads it."""
    region = draft.owner.get(node)
    if region is None:
        return G.Tag(G.Kind.BOUNDARY)
    moves = node in draft.parametric and not aliases_output(draft, node) and _is_read(node, draft.kept)
    return G.Tag(G.Kind.BOUNDARY, (region.index,), names.of(region, node.name) if moves else "", moves)


def _is_read(node: fx.Node, readers: Container[fx.Node]) -> bool:
    return any(user in readers or (G.is_view(user) and _is_read(user, readers)) for user in node.users)


def _tag_all(draft: Draft, boundaries: Mapping[fx.Node, tuple[Boundary, G.Tag]], names: TransferNames) -> None:
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
