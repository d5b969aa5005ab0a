"""Before transfers are inserted: what is to be offloaded is saved as whole storages, not as views of them.

The partitioner chooses what it saves of a kept region, and may choose a view, or several of one storage. A storage
travels once: it is saved, and the backward makes its views.

    forward:   return ..., permute_3, view_7    ->  return ..., mm_5
    backward:  (permute_3, view_7): ...         ->  (mm_5): permute_3 = permute(mm_5, ...), view_7 = view(mm_5, ...)
"""

from __future__ import annotations

from torch import fx

from fxckpt import graph as G


def save_bases(forward: fx.GraphModule, backward: fx.GraphModule, num_forward_outputs: int) -> None:
    """Save the storages of kept values that are to be offloaded.

    A view whose sizes are known when it runs only, stays saved as it is.

    Needs: tags on the forward graph's nodes; saved values after the first `num_forward_outputs` outputs.
    Leaves: no saved view of a value of kind KEPT but those that a region starts from.
    """
    outputs = G.output_args(forward.graph)
    saved = outputs[num_forward_outputs:]
    inputs = {n.name: n for n in G.placeholders(backward.graph)}
    chains: dict[fx.Node, list[fx.Node]] = {}
    for node in saved:
        if not isinstance(node, fx.Node) or not (G.tag(node) is None or _is_kept(node)) or node.name not in inputs:
            continue
        chain = _chain(node)
        if chain:
            chains[node] = chain
            _make_again(backward.graph, inputs, chain)
    if chains:
        kept = dict.fromkeys(chains[n][0] if n in chains else n for n in saved)
        G.output_node(forward.graph).args = ((*outputs[:num_forward_outputs], *kept),)
    for view in sorted({n for chain in chains.values() for n in chain[1:]}, reverse=True):
        if not view.users:  # nothing may read a storage behind the wait for its offload
            forward.graph.erase_node(view)


def _is_kept(node: fx.Node) -> bool:
    tag = G.tag(node)
    return tag is not None and tag.kind is G.Kind.KEPT


def _chain(node: fx.Node) -> list[fx.Node]:
    """The nodes from the storage's own to the view `node`; empty for no view, and where a step needs more than one."""
    chain = [node]
    while G.is_view(chain[-1]):
        if len(chain[-1].all_input_nodes) != 1:
            return []
        chain.append(chain[-1].all_input_nodes[0])
    base = chain[-1]
    usable = len(chain) > 1 and G.tensor(base) is not None and _is_kept(base)
    return chain[::-1] if usable else []


def _make_again(graph: fx.Graph, inputs: dict[str, fx.Node], chain: list[fx.Node]) -> None:
    """Make the view at the end of `chain` in the backward, from the storage at its head, in place of the saved view."""
    base, view = chain[0], inputs.pop(chain[-1].name)
    made = inputs.get(base.name)
    if made is None:
        with graph.inserting_before(view):
            made = graph.placeholder(base.name)
        made.meta.update(base.meta)
        inputs[base.name] = made
    readers = set(view.users)
    if readers:
        first = next(n for n in graph.nodes if n in readers)
        for step in chain[1:]:
            with graph.inserting_before(first):
                below = made
                made = graph.node_copy(step, lambda _, below=below: below)  # type: ignore[misc]
        view.replace_all_uses_with(made)
    graph.erase_node(view)
