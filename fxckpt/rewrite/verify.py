"""Checks of the graph invariants (docs/how-it-works.md), run after each pass with ``verify=True``.

Each check is written from what the graph says alone, not from what the passes meant to do.
"""

from __future__ import annotations

from collections import Counter

from torch import fx

from fxckpt import graph as G
from fxckpt.errors import VerifyError


def verify_joint(graph: fx.Graph, where: str) -> None:
    """Check a tagged joint graph.

    Raises:
        VerifyError: an interior value is an output, a tag sits on a node of the backward, or a policy contradicts a
            tag.
    """
    _lint(graph, where)
    backward = G.backward_nodes(graph)
    for node in graph.nodes:
        tag = G.tag(node)
        if tag is None:
            continue
        if node in backward or node.op != "call_function":
            raise VerifyError(f"{where}: {node.name} carries the tag {tag.kind.value} but is no forward value.")
        if tag.kind in (G.Kind.BOUNDARY, G.Kind.STATE) and G.must_recompute(node):
            raise VerifyError(f"{where}: {node.name} is a {tag.kind.value} and yet marked for recompute.")


def verify_partition(forward: fx.GraphModule, backward: fx.GraphModule, num_forward_outputs: int, where: str) -> None:
    """Check a forward and a backward graph.

    Raises:
        VerifyError: one of the invariants does not hold; the message names the node and the rule.
    """
    _lint(forward.graph, where)
    _lint(backward.graph, where)
    outputs = G.output_args(forward.graph)
    user, saved = outputs[:num_forward_outputs], outputs[num_forward_outputs:]
    _check_interface(saved, backward.graph, where)
    _check_interior(saved, where)
    _check_transfers(forward.graph, backward.graph, user, saved, where)
    _check_state(backward.graph, where)


def _lint(graph: fx.Graph, where: str) -> None:
    try:
        graph.lint()
    except Exception as error:
        raise VerifyError(f"{where}: the graph is not well formed: {error}") from error


def _check_interface(saved: list[object], backward: fx.Graph, where: str) -> None:
    """What the forward saves is what the backward takes, by number, and by name where the rewrite has a hand in it."""
    runtime = ("bwd_seed", "bwd_base_offset", "bwd_rng_state", "backward_state")  # AOTAutograd's own inputs
    taken = [n for n in G.placeholders(backward) if not G.is_tangent(n) and not n.name.startswith(runtime)]
    if len(taken) != len(saved):
        raise VerifyError(f"{where}: the forward saves {len(saved)} values, the backward takes {len(taken)}.")
    names = [n.name for n in taken]
    for node in saved:
        if not isinstance(node, fx.Node) or (G.tag(node) is None and not G.is_transfer(node)):
            continue
        if names.count(node.name) != 1:
            raise VerifyError(f"{where}: saved value {node.name} is no input of the backward.")


def _check_interior(saved: list[object], where: str) -> None:
    for node in saved:
        if not isinstance(node, fx.Node):
            continue
        tag = G.tag(node)
        if tag is not None and tag.kind is G.Kind.INTERIOR and not G.keeps_saved(node) and G.must_recompute(node):
            raise VerifyError(f"{where}: {node.name}, inside recomputed region {tag.regions}, is saved for backward.")
        if tag is not None and tag.kind is G.Kind.FREE and G.must_recompute(node):
            raise VerifyError(
                f"{where}: {node.name} can be recomputed from graph inputs, and yet is saved for backward."
            )


def _check_transfers(
    forward: fx.Graph, backward: fx.Graph, user: list[object], saved: list[object], where: str
) -> None:
    kept_alive = {G.view_base(n) for n in user if isinstance(n, fx.Node)}
    sources: set[fx.Node] = set()
    names: Counter[str] = Counter()
    for node in forward.nodes:
        if not G.is_offload(node):
            continue
        source, name = node.args
        assert isinstance(source, fx.Node) and isinstance(name, str)
        base = G.view_base(source)
        names[name] += 1
        if saved.count(node) != 1 or set(node.users) != {G.output_node(forward)}:
            raise VerifyError(f"{where}: {node.name} must go to the backward once, and nowhere else.")
        if source in saved:
            raise VerifyError(f"{where}: {source.name} is offloaded and saved on the device as well.")
        if base.op == "placeholder":
            raise VerifyError(f"{where}: {node.name} offloads {base.name}, an input of the graph.")
        if base in kept_alive:
            raise VerifyError(f"{where}: {node.name} offloads {source.name}, which an output of the graph keeps alive.")
        if base in sources:
            raise VerifyError(f"{where}: the storage of {base.name} is offloaded twice.")
        sources.add(base)
    reloaded: Counter[str] = Counter()
    for node in backward.nodes:
        if G.is_reload(node):
            host = node.args[0]
            assert isinstance(host, fx.Node) and isinstance(node.args[2], str)
            reloaded[node.args[2]] += 1
            if host.op != "placeholder" or set(host.users) != {node}:
                raise VerifyError(f"{where}: the host tensor {host.name} must be read by its reload {node.name} only.")
            if not node.users:
                raise VerifyError(f"{where}: {node.name} is read by nothing.")
    if names != reloaded or any(count != 1 for count in names.values()):
        differing = sorted((names - reloaded) + (reloaded - names)) or sorted(n for n, c in names.items() if c > 1)
        raise VerifyError(f"{where}: each offload needs one reload of its name; wrong: {differing}.")


def _check_state(backward: fx.Graph, where: str) -> None:
    """Recomputed code may not draw new random numbers, nor change state a second time."""
    for node in backward.nodes:
        recomputed = node.op == "call_function" and G.module_stack(node) and G.is_forward(node)
        if not recomputed:
            continue
        if G.draws_random(node):
            raise VerifyError(f"{where}: {node.name} draws new random numbers in the backward.")
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable:
            raise VerifyError(f"{where}: {node.name} changes state a second time in the backward.")
