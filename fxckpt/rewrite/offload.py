"""Pass on the forward and backward graph: move boundary activations out of device memory and back.

forward:   add_5 = ...;  offload_layers_3_input = fxckpt.offload(add_5, 'layers_3_input');  return ..., offload_...
backward:  (offload_layers_3_input, ...):  reload_layers_3_input = fxckpt.reload(offload_layers_3_input, device, ...)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxckpt import graph as G


def insert_transfers(forward: fx.GraphModule, backward: fx.GraphModule, num_forward_outputs: int) -> list[str]:
    """Insert offload and reload nodes for every saved value whose tag asks for it.

    Needs: tags on the forward graph's nodes; saved values after the first `num_forward_outputs` outputs.
    Leaves: in the forward one offload right after the value; in the backward one reload right before the first use.

    Returns:
        The names of the transfers, in order of the saved values.
    """
    outputs = G.output_args(forward.graph)
    kept_alive = {G.view_base(n) for n in outputs[:num_forward_outputs] if isinstance(n, fx.Node)}
    by_name = {n.name: n for n in G.placeholders(backward.graph)}
    moved: dict[fx.Node, fx.Node] = {}
    for node in outputs[num_forward_outputs:]:
        tag = G.tag(node) if isinstance(node, fx.Node) else None
        if tag is None or not tag.offload or node.op != "call_function" or G.view_base(node) in kept_alive:
            continue
        if G.view_base(node).op == "placeholder" or node in moved:
            continue
        moved[node] = _offload(forward.graph, node, tag)
        _reload(backward.graph, by_name[node.name], moved[node], node, tag)
    if moved:
        _replace_outputs(forward.graph, num_forward_outputs, moved)
    return [t.name for n in moved if (t := G.tag(n)) is not None]


def _offload(graph: fx.Graph, node: fx.Node, tag: G.Tag) -> fx.Node:
    op = torch.ops.fxckpt.offload.default
    with graph.inserting_after(node):
        made = graph.create_node("call_function", op, (node, tag.name), name=f"offload_{tag.name}")
    _describe(made, node, _run_fake(op, (G.value(node), tag.name)))
    return made


def _reload(graph: fx.Graph, saved: fx.Node, offload: fx.Node, original: fx.Node, tag: G.Tag) -> None:
    op = torch.ops.fxckpt.reload.default
    val = G.tensor(original)
    assert val is not None
    readers = set(saved.users)
    first = next(n for n in graph.nodes if n in readers)
    host = G.value(offload)
    stride = None if host.stride() == val.stride() else list(val.stride())
    args: tuple[Any, ...] = (saved, val.device, tag.name) if stride is None else (saved, val.device, tag.name, stride)
    with graph.inserting_before(first):
        made = graph.create_node("call_function", op, args, name=f"reload_{tag.name}")
    _describe(made, original, _run_fake(op, (host, *args[1:])))
    for reader in readers:
        reader.replace_input_with(saved, made)
    G.set_value(saved, host)
    saved._rename(offload.name)
    saved.target = saved.name


def _describe(made: fx.Node, source: fx.Node, val: Any) -> None:
    G.set_value(made, val)
    G.copy_provenance(source, made)


def _run_fake(op: Any, args: tuple[Any, ...]) -> Any:
    with args[0].fake_mode:
        return op(*args)


def _replace_outputs(graph: fx.Graph, start: int, moved: dict[fx.Node, fx.Node]) -> None:
    outputs = G.output_args(graph)
    replaced = [*outputs[:start], *(moved.get(n, n) if isinstance(n, fx.Node) else n for n in outputs[start:])]
    G.output_node(graph).args = (tuple(replaced),)
