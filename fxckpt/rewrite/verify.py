"""Checks of the graph invariants (docs/how-it-works.md), run after each pass with ``verify=True``.

Each check is written from what the graph says alone, not from what the passes meant to do.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

import torch
from torch import fx

from fxckpt import graph as G
from fxckpt.errors import VerifyError
from fxckpt.rewrite.verify_transfers import Limits, check_limits, check_transfers

_SAVED = (G.Kind.BOUNDARY, G.Kind.STATE, G.Kind.NAMED)


def verify_joint(
    graph: fx.Graph,
    where: str,
    recomputed: Mapping[fx.Node, str] | None = None,
    given: Container[fx.Node] = (),
    told: bool = False,
) -> None:
    """Check a joint graph.

    Args:
        graph: the joint graph.
        where: opens the message of an error.
        recomputed: once it is planned, the nodes of recomputed regions, each with its region's name.
        given: the inputs that are activations of an earlier graph.
        told: whether the partitioner has been told what the tags ask for.

    Raises:
        VerifyError: the graph is not well formed, a tag sits on a node of the backward, a value of a recomputed region
            has no tag, or the partitioner has been told other than what a tag says.
    """
    _lint(graph, where)
    backward = G.backward_nodes(graph)
    for node in graph.nodes:
        tag = G.tag(node)
        if tag is None:
            continue
        if node in backward or (node.op != "call_function" and node not in given):
            raise VerifyError(f"{where}: {node.name} carries the tag {tag.kind.value} but is no forward value.")
        if told:
            _check_policy(node, tag, where)
    for node, region in (recomputed or {}).items():
        held = any(u.target is torch.ops.fxckpt.boundary.default for u in node.users)
        if G.tag(node) is None and not held and not G.keeps_saved(node):
            raise VerifyError(f"{where}: {node.name}, inside recomputed region {region}, has no tag.")


def _check_policy(node: fx.Node, tag: G.Tag, where: str) -> None:
    if tag.kind is G.Kind.KEPT or node.op == "placeholder":  # an input is saved wherever the backward reads it
        return
    if tag.kind in _SAVED:
        if not G.keeps_saved(node):
            raise VerifyError(f"{where}: {node.name} is a {tag.kind.value} and yet not marked for saving.")
    elif not G.must_recompute(node) and not _runs_once(node):
        raise VerifyError(f"{where}: {node.name} is {tag.kind.value} and yet not marked for recompute.")


def verify_partition(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    num_forward_outputs: int,
    where: str,
    limits: Limits | None = None,
) -> None:
    """Check a forward and a backward graph.

    Args:
        forward: the forward graph.
        backward: the backward graph.
        num_forward_outputs: how many of the forward graph's outputs are the model's.
        where: opens the message of an error.
        limits: once transfers are in their places, how many may be under way.

    Raises:
        VerifyError: one of the invariants does not hold; the message names the node and the rule.
    """
    _lint(forward.graph, where)
    _lint(backward.graph, where)
    outputs = G.output_args(forward.graph)
    user, saved = outputs[:num_forward_outputs], outputs[num_forward_outputs:]
    _check_interface(saved, backward.graph, where)
    _check_interior(saved, where)
    _check_boundaries(backward.graph, where)
    check_transfers(forward.graph, backward.graph, user, saved, where)
    if limits is not None:
        check_limits(forward.graph, backward.graph, limits, where)
    _check_state(backward.graph, where)
    _check_starts(backward.graph, where)


def _lint(graph: fx.Graph, where: str) -> None:
    try:
        graph.lint()
    except Exception as error:
        raise VerifyError(f"{where}: the graph is not well formed: {error}") from error


def _check_interface(saved: list[object], backward: fx.Graph, where: str) -> None:
    """What the forward saves is what the backward takes: by number, and by name where the rewrite has a hand in it."""
    runtime = ("bwd_seed", "bwd_base_offset", "bwd_rng_state", "backward_state")  # AOTAutograd's own inputs
    taken = [n for n in G.placeholders(backward) if not G.is_tangent(n) and not n.name.startswith(runtime)]
    if len(taken) != len(saved):
        only = sorted({str(n) for n in saved} ^ {n.name for n in taken})
        raise VerifyError(
            f"{where}: the forward saves {len(saved)} values, the backward takes {len(taken)}; only in one: {only}."
        )
    names = [n.name for n in taken]
    ours = [n.name for n in saved if isinstance(n, fx.Node) and (_is_told(n) or G.is_transfer(n))]
    for name in ours:
        if names.count(name) != 1:
            raise VerifyError(f"{where}: saved value {name} is no input of the backward.")
    tensors = [n.name for n in saved if isinstance(n, fx.Node) and n.name in set(ours) and G.tensor(n) is not None]
    order = [name for name in names if name in set(tensors)]
    for name, other in zip(tensors, order, strict=True):
        if name != other:
            raise VerifyError(f"{where}: saved value {name} stands where the backward takes {other}.")


def _is_told(node: fx.Node) -> bool:
    """Whether the plan says what becomes of `node`, and not the partitioner."""
    tag = G.tag(node)
    return tag is not None and tag.kind is not G.Kind.KEPT


def _check_interior(saved: list[object], where: str) -> None:
    for node in saved:
        if not isinstance(node, fx.Node) or (tag := G.tag(node)) is None:
            continue
        if G.tensor(node) is None or G.keeps_saved(node) or _runs_once(node):
            continue
        if tag.kind is G.Kind.INTERIOR:
            raise VerifyError(f"{where}: {node.name}, inside recomputed region {tag.regions}, is saved for backward.")
        if tag.kind is G.Kind.FREE:
            raise VerifyError(
                f"{where}: {node.name} can be recomputed from graph inputs, and yet is saved for backward."
            )


def _check_boundaries(backward: fx.Graph, where: str) -> None:
    """What a recomputed region starts from is taken from the forward: else several regions run in a row."""
    for node in backward.nodes:
        tag = G.tag(node)
        if node.target is torch.ops.fxckpt.boundary.default and node.all_input_nodes[0].op == "placeholder":
            continue
        if node.op == "call_function" and tag is not None and tag.kind in _SAVED:
            raise VerifyError(f"{where}: {node.name} is a {tag.kind.value} and yet computed again in the backward.")


def _runs_once(node: fx.Node) -> bool:
    """Nodes that may not run twice whatever their tag: they change a value, or make a size from data."""
    return _changes_state(node) or G.binds_unbacked_symbol(node)


def _changes_state(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def _check_state(backward: fx.Graph, where: str) -> None:
    """Recomputed code may not draw new random numbers, nor change state a second time."""
    for node in backward.nodes:
        if G.is_order(node) or G.is_transfer(node):
            continue
        if not G.is_forward(node):  # recorded in the backward: what runs there as without fxckpt
            continue
        if G.draws_random(node):
            raise VerifyError(f"{where}: {node.name} draws new random numbers in the backward.")
        if _changes_state(node):
            raise VerifyError(f"{where}: {node.name} changes state a second time in the backward.")


def _check_starts(backward: fx.Graph, where: str) -> None:
    """A recomputed region reads what it starts from after its start node, which reads nothing recomputed for it."""
    started: dict[object, set[fx.Node]] = {}
    for node in backward.nodes:
        if G.is_order(node) or G.is_wait_reload(node):
            started.setdefault(node.args[0], set()).add(node)
            if any(u.op != "output" for u in node.users):
                raise VerifyError(f"{where}: {node.name} only orders; nothing may read it.")
    seen: set[fx.Node] = set()
    for node in backward.nodes:
        tag = G.tag(node)
        if G.is_order(node) or G.is_wait_reload(node):
            seen.add(node)
        elif node.op == "call_function" and tag is not None and tag.kind is G.Kind.INTERIOR:
            for value in node.all_input_nodes:
                if value in started and not started[value] & seen and _starts(value, tag):
                    raise VerifyError(f"{where}: {node.name} reads {value.name} before its recompute may start.")


def _starts(value: fx.Node, tag: G.Tag) -> bool:
    """Whether a region of `tag` is one of those that start from `value`."""
    saved = value.args[0] if G.is_reload(value) else value
    found = G.tag(saved) if isinstance(saved, fx.Node) else None
    return found is None or bool(set(found.regions) & set(tag.regions))
