"""Passes on the backward graph that say what has to wait for what, so that less is alive at once.

Inductor orders a graph anew and fuses across it. ``fxckpt.after(value, [first, ...])`` holds an order in it: the node
claims to change `value`, which orders every later reader of it behind the node, and it reads what is to come first.
Nothing is fused or moved across it, and it does nothing when it runs. Two orders are held:

* A region's recompute waits for the gradients of what follows the region. Left alone Inductor starts it before they
  are put together, and holds all their parts beside the recomputed values.
* Of the two products with a linear layer's incoming gradient, the weight's comes first: it is the last reader of the
  layer's recomputed input, whose memory then is free for the input's gradient.
"""

from __future__ import annotations

import torch
from torch import fx

from fxckpt import graph as G
from fxckpt.rewrite.phases import find_gradients, find_readers, first_reader, is_product


def weights_first(backward: fx.Graph) -> int:
    """Let the gradient of a linear layer's weight come before that of its input, where the input is wide.

    Wide is an input of more bytes than the layer's incoming gradient; of others little would be free.

    Needs: tags on the recomputed nodes. Leaves: products moved behind others, and order nodes before them.

    Returns:
        How many products wait.
    """
    nodes = list(backward.nodes)
    order = {node: i for i, node in enumerate(nodes)}
    gradients = find_gradients(nodes)
    readers = find_readers(nodes)
    waiting = 0
    for weight in nodes:
        if not is_product(weight):
            continue
        bases = [G.view_base(n) for n in weight.all_input_nodes]
        incoming = next((n for n in bases if n in gradients), None)
        wide = next((n for n in bases if G.is_recomputed(n) and readers[n][-1] is weight), None)
        if incoming is None or wide is None or not _bytes(wide) > _bytes(incoming):
            continue
        for other in readers[incoming]:
            if other is weight or not is_product(other) or _bytes(other) < _bytes(wide):
                continue
            read_before = any(order.get(user, len(nodes)) < order[weight] for user in other.users)  # views count here
            if read_before or any(G.is_recomputed(G.view_base(n)) for n in other.all_input_nodes):
                continue
            if order[other] < order[weight]:
                weight.append(other)
            with backward.inserting_before(other):
                _order(backward, incoming, [weight], f"wait_{other.name}")
            waiting += 1
    return waiting


def _bytes(node: fx.Node) -> int:
    return G.nbytes(node) if G.tensor(node) is not None else 0


def _order(graph: fx.Graph, value: fx.Node, first: list[fx.Node], name: str) -> None:
    graph.create_node("call_function", torch.ops.fxckpt.after.default, (value, first), name=name)


def start_recomputes(backward: fx.Graph) -> int:
    """Let each value that a recomputed region starts from wait for the gradients that are alive by then.

    What is reloaded has a node that waits already, which waits for them too.

    Needs: tags on the recomputed nodes and on the inputs and reloads that they read. Leaves: the start nodes.

    Returns:
        How many were inserted.
    """
    nodes = list(backward.nodes)
    order = {node: i for i, node in enumerate(nodes)}
    readers = find_readers(nodes)
    last_use = {
        n: order[readers[n][-1]]
        for n in find_gradients(nodes)
        if n in readers and n.op == "call_function" and G.tensor(n) is not None
    }
    alive: dict[fx.Node, None] = {}  # gradients, in graph order
    started: set[tuple[fx.Node, int]] = set()
    inserted = 0
    for node in nodes:
        entries = [e for e in _entries(node) if e not in started]
        started.update(entries)
        if entries:
            alive = {g: None for g in alive if last_use[g] >= order[node]}
        arrived = _arrived(alive) if entries else []
        for value, region in entries if arrived else ():
            wait = _wait(value, node)
            if wait is not None:
                G.wait_for(wait, arrived)
                continue
            with backward.inserting_before(node):
                _order(backward, value, arrived, f"start_{_name(value, region)}")
            inserted += 1
        if node in last_use:
            alive[node] = None
    return inserted


def _wait(value: fx.Node, reader: fx.Node) -> fx.Node | None:
    """The wait for a reload, where `reader` is the first to read it."""
    if not G.is_reload(value) or first_reader(value) is not reader:
        return None
    return next(n for n in value.users if G.is_wait_reload(n))


def _arrived(alive: dict[fx.Node, None]) -> list[fx.Node]:
    """The gradients that the regions before this one left; what is made of one of them alone can wait."""
    return [g for g in alive if not any(G.view_base(n) in alive for n in g.all_input_nodes)]


def _entries(node: fx.Node) -> list[tuple[fx.Node, int]]:
    """What a recomputed node reads of what its regions start from, with the region."""
    tag = G.tag(node)
    if tag is None or not G.is_recomputed(node):
        return []
    return [(value, region) for value in node.all_input_nodes for region in tag.regions if region in _starts(value)]


def _starts(value: fx.Node) -> tuple[int, ...]:
    """The regions that start from `value`."""
    tag = _saved_tag(value)
    return tag.regions if tag is not None and G.tensor(value) is not None else ()


def _saved_tag(value: fx.Node) -> G.Tag | None:
    saved = value.args[0] if G.is_reload(value) else value
    return G.tag(saved) if isinstance(saved, fx.Node) and saved.op == "placeholder" else None


def _name(value: fx.Node, region: int) -> str:
    tag = _saved_tag(value)
    return tag.name if tag is not None and tag.name else f"region_{region}"
