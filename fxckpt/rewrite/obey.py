"""Passes on the joint graph: turn the plan's tags into what PyTorch's partitioner understands."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fxckpt import graph as G
from fxckpt.capture.regions import Region

_RECOMPUTED = (G.Kind.INTERIOR, G.Kind.FREE)
_SAVED = (G.Kind.BOUNDARY, G.Kind.NAMED)
_KNOWN = ("aten", "prims", "fxckpt", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "inductor")
"""Namespaces of operators that say themselves whether they draw random numbers; collectives do not."""


def copy_changed_inputs(graph: fx.Graph, changed: Iterable[fx.Node]) -> None:
    """Let the step read inputs that it changes (running statistics, counters) as they were before.

    The forward writes such an input in place at its end; what the backward recomputes, in a recomputed region or where
    the partitioner chose to, would read the new value. All readers read a copy instead, which is saved where the
    backward needs it.

    Needs: tags. Leaves: tag STATE on the copies.
    """
    for source in changed:
        readers = [u for u in source.users if u.op == "call_function" and not _writes(u, source)]
        if not readers or G.tensor(source) is None:
            continue
        first = next(n for n in graph.nodes if n.op != "placeholder")
        with graph.inserting_before(first):
            copied = graph.call_function(torch.ops.aten.clone.default, (source,))
        G.set_value(copied, _fake_clone(source))
        G.copy_provenance(source, copied)
        G.set_tag(copied, G.Tag(G.Kind.STATE))
        for reader in readers:
            reader.replace_input_with(source, copied)


def _writes(node: fx.Node, target: fx.Node) -> bool:
    """Whether `node` changes `target` in place, as the copy of a new value at the forward's end does."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable and bool(node.args) and node.args[0] is target


def _fake_clone(source: fx.Node) -> torch.Tensor:
    val = G.tensor(source)
    assert val is not None
    with val.fake_mode:  # type: ignore[attr-defined]
        return val.clone()


def drop_foreign_tags(regions: Iterable[Region]) -> None:
    """Take over layers whose own (transformers') checkpointing is on: what it tagged in them is the plan's to decide.

    Needs: regions. Leaves: no partitioner tag in them. Other modules' own ``torch.utils.checkpoint`` calls keep theirs.
    """
    for region in regions:
        if getattr(region.layer.module, "gradient_checkpointing", False) is True:
            for node in region.nodes:
                G.clear_policy(node)


def random_operators(graph: fx.Graph) -> dict[torch._ops.OpOverload, bool]:
    """Whether each recomputed operator may draw random numbers, where PyTorch's own mark on it does not settle that.

    What draws has to find the random state of its first run when it runs again, as under ``torch.utils.checkpoint``.
    Of operators from outside PyTorch nobody says whether they draw. Attention is marked as drawing, and does so only
    with dropout; to keep a random state for it in vain costs 5 kB a layer and, since what wraps it hides its strides,
    a copy of its result (PyTorch looks at the dropout itself from 2.14 on).

    Needs: partitioner tags.
    """
    found: dict[torch._ops.OpOverload, bool] = {}
    for node in graph.nodes:
        target = node.target
        if not isinstance(target, torch._ops.OpOverload) or not G.must_recompute(node):
            continue
        if target.namespace not in _KNOWN:
            tag = G.tag(node)
            if tag is not None and tag.kind in _RECOMPUTED:
                found[target] = True
        elif torch.Tag.nondeterministic_seeded in target.tags:
            found[target] = found.get(target, False) or G.draws_random(node)
    return found


def hold_boundaries(graph: fx.Graph) -> None:
    """Put ``fxckpt.boundary`` behind boundary and named values that PyTorch's partitioner would not save when told to.

    It recomputes views and results picked out of a tuple (as of a layer norm) whatever their tag says, and so would run
    several regions in a row. :func:`release_boundaries` takes the nodes out again.

    Needs: tags. Leaves: the tag on the new node, none on the value itself.
    """
    for node in list(graph.nodes):
        tag = G.tag(node)
        if tag is None or tag.kind not in _SAVED or not (G.is_view(node) or G.is_getitem(node)):
            continue
        readers = [u for u in node.users if u.op != "output"]
        with graph.inserting_after(node):
            held = graph.call_function(torch.ops.fxckpt.boundary.default, (node,))
        G.set_value(held, G.value(node))
        G.copy_provenance(node, held)
        G.set_tag(held, tag)
        G.clear_tag(node)
        for reader in readers:
            reader.replace_input_with(node, held)


def release_boundaries(forward: fx.Graph, backward: fx.Graph) -> None:
    """Take the nodes of :func:`hold_boundaries` out of both graphs.

    Needs: forward and backward graph. Leaves: the tag on the value itself.
    """
    inputs = {n.name: n for n in G.placeholders(backward)}
    made = {n.name: n for n in forward.nodes}
    for graph in (forward, backward):
        for held in graph.find_nodes(op="call_function", target=torch.ops.fxckpt.boundary.default):
            source = held.args[0]
            assert isinstance(source, fx.Node)
            tag = G.tag(held)
            assert tag is not None
            G.set_tag(source, tag)
            if graph is backward and source.name in made:  # the partitioner saved the value itself
                G.set_tag(made[source.name], tag)
            if graph is forward and held.name in inputs:
                taken = inputs[held.name]
                taken._rename(source.name)
                taken.target = taken.name
            held.replace_all_uses_with(source)
            graph.erase_node(held)


def describe_random(forward: fx.Graph, backward: fx.Graph) -> None:
    """Note what the random operators give that the partitioner has wrapped to draw the same numbers again.

    It notes that of a first run's numbers alone. Without it they would count for nothing in memory.

    Needs: forward and backward graph. Leaves: values and origins of these nodes.
    """
    states = [n for n in G.output_args(forward) if isinstance(n, fx.Node) and G.is_rng_state(n)]
    given = [n for n in G.placeholders(backward) if n.name.startswith("rng_state_output")]
    for state, placeholder in zip(states, given, strict=True):
        first = state.all_input_nodes[0]
        drawn = next((u for u in first.users if G.is_getitem(u) and u is not state), None)
        if drawn is None:
            continue
        for node in (first, *placeholder.users):
            G.copy_provenance(drawn, node)
            G.set_value(node, (G.value(state), G.value(drawn)) if node is first else G.value(drawn))


def drop_unread(forward: fx.Graph, backward: fx.Graph, num_forward_outputs: int) -> None:
    """Save no value that the rewrite asked for and the backward does not read, as of the last product of a layer.

    Needs: forward and backward graph. Leaves: neither the output of the forward nor the input of the backward.
    """
    outputs = G.output_args(forward)
    taken = {n.name: n for n in G.placeholders(backward)}
    kept = []
    for node in outputs[num_forward_outputs:]:
        tag = G.tag(node) if isinstance(node, fx.Node) else None
        given = taken.get(node.name) if isinstance(node, fx.Node) else None
        if tag is not None and tag.kind in _SAVED and given is not None and not given.users:
            backward.erase_node(given)
        else:
            kept.append(node)
    G.output_node(forward).args = ((*outputs[:num_forward_outputs], *kept),)


def order_saved(forward: fx.Graph, backward: fx.Graph, num_forward_outputs: int) -> None:
    """Put saved random states among the saved tensors.

    The partitioner appends them behind what is no tensor, such as the device mesh of a DTensor, and AOTAutograd tells
    both kinds by their places.

    Needs: forward and backward graph. Leaves: of what is saved, tensors, then opaque objects, then sizes.
    """
    outputs = G.output_args(forward)
    saved = outputs[num_forward_outputs:]
    opaque = [n for n in saved if isinstance(n, fx.Node) and G.is_opaque(n)]
    if not opaque or not any(isinstance(n, fx.Node) and G.is_rng_state(n) for n in saved[saved.index(opaque[0]) :]):
        return
    tensors = [n for n in saved if isinstance(n, fx.Node) and G.tensor(n) is not None]
    sizes = [n for n in saved if n not in opaque and n not in tensors]
    G.output_node(forward).args = ((*outputs[:num_forward_outputs], *tensors, *opaque, *sizes),)
    taken = {n.name: n for n in G.placeholders(backward)}
    tangent = next(n for n in G.placeholders(backward) if G.is_tangent(n))
    for node in opaque:
        tangent.prepend(taken[node.name])


def tell_partitioner(graph: fx.Graph) -> None:
    """Give each tagged node the partitioner's own recompute tag.

    Nodes without a tag of ours keep what they carry, such as the tags of a module's own ``torch.utils.checkpoint``
    calls.

    Needs: tags. Leaves: partitioner tags, and no tag of ours changed.
    """
    for node in graph.nodes:
        tag = G.tag(node)
        if tag is None or node.op != "call_function":
            continue
        if tag.kind is G.Kind.KEPT:
            continue
        if tag.kind in _RECOMPUTED:
            if _runs_once(node):
                continue
            G.set_policy(node, CheckpointPolicy.MUST_RECOMPUTE)
        else:
            G.set_policy(node, CheckpointPolicy.MUST_SAVE)


def _runs_once(node: fx.Node) -> bool:
    """Nodes that may not run twice: they change an input, or make a size from data."""
    mutates = isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
    return mutates or G.binds_unbacked_symbol(node)
