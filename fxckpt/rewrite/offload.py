"""Pass on the forward and backward graph: move boundary activations out of device memory and back.

forward:   add_5 = ...
           offload_layers_3_input = fxckpt.offload(add_5, 'layers_3_input', 'layers.3', 'cpu', False, [])
           ...
           fxckpt.wait_offload(offload_layers_3_input, add_5, [])
           return ..., offload_layers_3_input
backward:  (offload_layers_3_input, ...):
           reload_layers_3_input = fxckpt.reload(offload_layers_3_input, device, 'layers_3_input', [0, 1, 2], None, [])
           fxckpt.wait_reload(reload_layers_3_input, offload_layers_3_input, [])

When each of them comes, ``rewrite/overlap.py`` says.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import torch
from torch import fx

from fxckpt import graph as G

LEAST_BYTES = 4096
"""What a kept region saves of fewer bytes stays: a page, and of a layer's statistics there are many."""


def insert_transfers(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    num_forward_outputs: int,
    regions: Sequence[str] = (),
    place: str = "cpu",
    given: Container[str] = (),
) -> list[str]:
    """Insert the four nodes of a transfer for every saved value whose tag asks for it.

    An activation whose memory stays, because an output or something saved shares it, is left where it is. Of the
    graph's inputs those leave that are activations of an earlier graph, which lets them go after this one.

    Needs: tags on the forward graph's nodes; saved values after the first `num_forward_outputs` outputs.
    Leaves: in the forward an offload right after the value and its wait at the end; in the backward a reload and its
    wait right before the first use.

    Args:
        forward: the forward graph.
        backward: the backward graph.
        num_forward_outputs: how many of the forward graph's outputs are the model's.
        regions: names of the graph's regions, by the number in a tag.
        place: where the activations go (``Offload.place``).
        given: names of the graph's inputs that are activations of an earlier graph.

    Returns:
        The names of the transfers, in order of the saved values.
    """
    outputs = G.output_args(forward.graph)
    staying = {
        G.view_base(n)
        for i, n in enumerate(outputs)
        if isinstance(n, fx.Node) and (i < num_forward_outputs or not _wants_offload(n))
    }
    by_name = {n.name: n for n in G.placeholders(backward.graph)}
    moved: dict[fx.Node, fx.Node] = {}
    for node in outputs[num_forward_outputs:]:
        tag = G.tag(node) if isinstance(node, fx.Node) else None
        if tag is None or not _wants_offload(node) or G.view_base(node) in staying:
            continue
        base = G.view_base(node)
        if (base.op == "placeholder" and not (base is node and node.name in given)) or node in moved:
            continue
        region = regions[tag.regions[0]] if regions and tag.regions else ""
        moved[node] = _offload(forward.graph, node, tag, region, place)
        _reload(backward.graph, by_name[node.name], moved[node], node, tag)
    if moved:
        _replace_outputs(forward.graph, num_forward_outputs, moved)
    return [t.name for n in moved if (t := G.tag(n)) is not None]


def _wants_offload(node: fx.Node) -> bool:
    tag = G.tag(node)
    if tag is None or not tag.offload:
        return False
    return tag.kind is not G.Kind.KEPT or G.nbytes(node) >= LEAST_BYTES


def _offload(graph: fx.Graph, node: fx.Node, tag: G.Tag, region: str, place: str) -> fx.Node:
    op = torch.ops.fxckpt.offload.default
    given = node.op == "placeholder"
    rest: tuple[Any, ...] = (tag.name, region, place, given, [])
    with graph.inserting_after(G.placeholders(graph)[-1] if given else node):
        made = graph.create_node("call_function", op, (node, *rest), name=f"offload_{tag.name}")
    _describe(made, node, _run_fake(op, (G.value(node), *rest)))
    with graph.inserting_before(G.output_node(graph)):
        _wait(graph, torch.ops.fxckpt.wait_offload.default, made, node)
    return made


def _reload(graph: fx.Graph, saved: fx.Node, offload: fx.Node, original: fx.Node, tag: G.Tag) -> None:
    op = torch.ops.fxckpt.reload.default
    val = G.tensor(original)
    assert val is not None
    readers = set(saved.users)
    first = next(n for n in graph.nodes if n in readers)
    handle = G.value(offload)
    args: tuple[Any, ...] = (saved, val.device, tag.name, *_layout(val), [])
    with graph.inserting_before(first):
        made = graph.create_node("call_function", op, args, name=f"reload_{tag.name}")
        _describe(made, original, _run_fake(op, (handle, *args[1:])))
        for reader in readers:
            reader.replace_input_with(saved, made)
        _wait(graph, torch.ops.fxckpt.wait_reload.default, made, saved)
    G.set_value(saved, handle)
    saved._rename(offload.name)
    saved.target = saved.name


def _layout(val: torch.Tensor) -> tuple[list[int] | None, list[Any] | None]:
    """The order of dimensions, outermost first, of a tensor without gaps; of any other one, its strides.

    An order is enough where sizes vary from step to step: they are known from the handle. So it comes back without gaps
    where strides vary that do not follow from the sizes.
    """
    sizes, strides = [G.hint(n) for n in val.size()], [G.hint(n) for n in val.stride()]
    order = sorted(range(val.dim()), key=lambda dim: (-strides[dim], dim))
    step = 1
    for dim in reversed(order):
        if strides[dim] != step and all(isinstance(n, int) for n in val.stride()):
            return None, list(val.stride())
        step *= max(sizes[dim], 1)
    return order, None


def _wait(graph: fx.Graph, op: Any, started: fx.Node, other: fx.Node) -> None:
    made = graph.create_node("call_function", op, (started, other, []), name=f"wait_{started.name}")
    _describe(made, started, None)


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
