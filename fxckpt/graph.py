"""What fxckpt knows about FX nodes: the only module that spells a ``node.meta`` key.

PyTorch's keys are read here (``val``, ``nn_module_stack``, ``recompute``, ...), and one key of our own, ``fxckpt``, is
written: the :class:`Tag` that the rewrite puts on a node and that survives into the forward and backward graph.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

aten = torch.ops.aten

_OWN_KEY = "fxckpt"


class Kind(enum.Enum):
    """What the rewrite made of a forward value."""

    INTERIOR = "interior"
    """Inside a recomputed region: never crosses from the forward to the backward graph."""
    BOUNDARY = "boundary"
    """A recomputed region starts from it: saved."""
    FREE = "free"
    """Does not depend on a parameter and is cheap: recomputed from small graph inputs."""
    STATE = "state"
    """Copy of a graph input that the step itself changes: saved before the change."""


@dataclass(frozen=True)
class Tag:
    """The rewrite's mark on a node.

    Attributes:
        kind: what the value is to the rewrite.
        regions: indices of the regions the value belongs to (interior) or is read by (boundary).
        name: for a boundary, the name of its transfer nodes, such as ``layers_3_input``.
        offload: for a boundary, whether it leaves device memory.
    """

    kind: Kind
    regions: tuple[int, ...] = ()
    name: str = ""
    offload: bool = False


def tag(node: fx.Node) -> Tag | None:
    """The rewrite's mark on `node`, or None."""
    return node.meta.get(_OWN_KEY)


def set_tag(node: fx.Node, value: Tag) -> None:
    """Put the rewrite's mark on `node`."""
    node.meta[_OWN_KEY] = value


def clear_tag(node: fx.Node) -> None:
    """Take the rewrite's mark off `node`."""
    node.meta.pop(_OWN_KEY, None)


def value(node: fx.Node) -> Any:
    """The fake tensor, number or tuple that `node` stands for, or None."""
    return node.meta.get("val")


def example_value(node: fx.Node) -> Any:
    """What Dynamo recorded a placeholder of its own graph to stand for (a fake tensor or a number)."""
    return node.meta.get("example_value", node.meta.get("val"))


def set_value(node: fx.Node, val: Any) -> None:
    """Set what `node` stands for."""
    node.meta["val"] = val


def tensor(node: fx.Node) -> torch.Tensor | None:
    """The fake tensor that `node` stands for, or None where it is no tensor."""
    val = value(node)
    return val if isinstance(val, torch.Tensor) else None


def copy_provenance(source: fx.Node, target: fx.Node) -> None:
    """Give `target`, a node made by a pass, the stack trace and module stack of `source`."""
    for key in ("stack_trace", "nn_module_stack", "fwd_nn_module_stack", "original_aten", "custom", "partitioner_tag"):
        if key in source.meta:
            target.meta[key] = source.meta[key]


def module_stack(node: fx.Node, key: str = "nn_module_stack") -> list[tuple[int, int, str, type]]:
    """The module calls `node` was traced in, outermost first: (id of the module, call number, path, class).

    Dynamo keys the stack by the module's ``id()`` and appends ``@k`` to the k-th further call of one module. A gradient
    has that of its forward node under the `key` ``"fwd_nn_module_stack"``.
    """
    calls = []
    for name, (path, cls) in (node.meta.get(key) or {}).items():
        ident, _, call = str(name).partition("@")
        if ident.isdigit():
            calls.append((int(ident), int(call) if call.isdigit() else 0, path, cls))
    return calls


def annotation(node: fx.Node, key: str) -> Any:
    """What ``torch.fx.traceback.annotate`` left on `node` under `key`, or None."""
    return (node.meta.get("custom") or {}).get(key)


def is_forward(node: fx.Node) -> bool:
    """Whether the joint graph's tracer recorded `node` in the forward."""
    backward = ("is_backward", "must_be_in_backward")  # the latter: changes of inputs made by a backward
    return node.op == "call_function" and node.meta.get("partitioner_tag") not in backward


def is_offload(node: fx.Node) -> bool:
    """Whether `node` moves an activation to the host."""
    return node.target is torch.ops.fxckpt.offload.default


def is_reload(node: fx.Node) -> bool:
    """Whether `node` brings an activation back to its device."""
    return node.target is torch.ops.fxckpt.reload.default


def is_order(node: fx.Node) -> bool:
    """Whether `node` only orders others: what reads its value behind it waits for what else it reads."""
    return node.target is torch.ops.fxckpt.after.default


def is_transfer(node: fx.Node) -> bool:
    """Whether `node` is an offload or a reload."""
    return is_offload(node) or is_reload(node)


def is_tangent(node: fx.Node) -> bool:
    """Whether `node` is a gradient of an output, an input of the backward."""
    return node.op == "placeholder" and "tangents" in str(node.target)


def backward_nodes(graph: fx.Graph) -> set[fx.Node]:
    """All nodes of a joint graph that depend on a tangent or were recorded in the backward."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if is_tangent(node) or (node.op == "call_function" and not is_forward(node)):
            found.add(node)
        elif node.op == "call_function" and any(i in found for i in node.all_input_nodes):
            found.add(node)
    return found


def policy(node: fx.Node) -> CheckpointPolicy | None:
    """The partitioner's recompute tag on `node`: ours, or one left by ``torch.utils.checkpoint``."""
    return node.meta.get("recompute")


def must_recompute(node: fx.Node) -> bool:
    """Whether `node` carries a tag that makes the partitioner recompute it."""
    return policy(node) in (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def keeps_saved(node: fx.Node) -> bool:
    """Whether a selective-checkpoint policy asked for `node` to be saved."""
    return policy(node) in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)


def set_policy(node: fx.Node, choice: CheckpointPolicy) -> None:
    """Tell the partitioner what to do with `node`.

    A checkpoint group number left by ``torch.utils.checkpoint`` is dropped: the partitioner would turn a tagged value
    into a saved one where two such groups meet.
    """
    node.meta["recompute"] = choice
    node.meta.pop("ac_graph_id", None)


def clear_policy(node: fx.Node) -> None:
    """Take the partitioner's tag off `node`."""
    node.meta.pop("recompute", None)
    node.meta.pop("ac_graph_id", None)


def nbytes(node: fx.Node) -> int:
    """Bytes of the tensors that `node` stands for; symbolic sizes count with the value they were traced with."""
    return sum(tensor_nbytes(v) for v in _tensors(value(node)))


def tensor_nbytes(val: torch.Tensor) -> int:
    """Bytes of a tensor's own elements (an expanded tensor counts once per element shown)."""
    return hint(val.numel()) * val.dtype.itemsize


def storage_nbytes(val: torch.Tensor) -> int:
    """Bytes of the storage that keeps a tensor alive: dimensions of stride 0 count once."""
    count = 1
    for size, stride in zip(val.shape, val.stride(), strict=True):
        count *= 1 if hint(stride) == 0 else hint(size)
    return count * val.dtype.itemsize


def hint(number: Any) -> int:
    """An int from an int or a symbolic int (the value it was traced with; 0 where that is unknown)."""
    if isinstance(number, int):
        return number
    node = getattr(number, "node", None)
    known = node.hint if node is not None and node.has_hint() else None
    return int(known) if known is not None else 0


def _tensors(val: Any) -> Iterator[torch.Tensor]:
    if isinstance(val, torch.Tensor):
        yield val
    elif isinstance(val, (list, tuple)):
        for item in val:
            yield from _tensors(item)


_VIEW_OPS = frozenset(
    {
        aten.alias,
        aten.as_strided,
        aten.detach,
        aten.diagonal,
        aten.expand,
        aten.permute,
        aten.select,
        aten.slice,
        aten.split,
        aten.split_with_sizes,
        aten.squeeze,
        aten.t,
        aten.transpose,
        aten.unbind,
        aten.unfold,
        aten.unsqueeze,
        aten.view,
        aten._unsafe_view,
        aten.lift_fresh,
    }
)


def overload_packet(node: fx.Node) -> Any:
    """The operator without its overload (``aten.view`` for ``aten.view.default``), or the target itself."""
    return getattr(node.target, "overloadpacket", node.target)


def is_getitem(node: fx.Node) -> bool:
    """Whether `node` picks one result out of an operator's several."""
    return node.op == "call_function" and node.target is operator.getitem


def is_view(node: fx.Node) -> bool:
    """Whether `node` shares the storage of its first input."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and overload_packet(source) in _VIEW_OPS
    return overload_packet(node) in _VIEW_OPS


def view_base(node: fx.Node) -> fx.Node:
    """The node whose storage `node` shares, through any chain of views; `node` itself where it owns its storage."""
    while is_view(node):
        source = node.args[0]
        if not isinstance(source, fx.Node):
            break
        node = source
    return node


def is_partial_view(node: fx.Node) -> bool:
    """Whether `node` shows less than the storage it shares."""
    base, shown = view_base(node), tensor(node)
    whole = tensor(base)
    if base is node or shown is None or whole is None:
        return False
    return tensor_nbytes(shown) < storage_nbytes(whole)


def draws_random(node: fx.Node) -> bool:
    """Whether `node` reads the random number generator."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    return bool(argument(node, "dropout_p") != 0.0)  # attention without dropout draws nothing


def argument(node: fx.Node, name: str) -> Any:
    """The value `node` passes for its operator's argument `name`, its default, or None where there is no such one."""
    for position, declared in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if declared.name == name:
            given = node.args[position] if position < len(node.args) else declared.default_value
            return node.kwargs.get(name, given)
    return None


def binds_unbacked_symbol(node: fx.Node) -> bool:
    """Whether a size that depends on data is born at `node`; such a node must run once only."""
    return bool(node.meta.get("unbacked_bindings"))


def source_line(node: fx.Node, outside: Callable[[str], bool] | None = None) -> str:
    """``file.py:123, in forward: code`` of the innermost user frame that made `node`, or an empty string.

    Args:
        node: any node.
        outside: files for which this holds are passed over; by default torch's own.
    """
    skip = outside or (lambda path: "/torch/" in path)
    lines = (node.meta.get("stack_trace") or "").splitlines()
    frames = [i for i, line in enumerate(lines) if line.strip().startswith('File "')]
    for i in reversed(frames):
        path = lines[i].split('"')[1]
        if skip(path):
            continue
        number = lines[i].partition(", line ")[2].partition(",")[0]
        where = lines[i].partition(", in ")[2].strip()
        code = lines[i + 1].strip() if i + 1 < len(lines) else ""
        return f"{'/'.join(path.split('/')[-2:])}:{number} in {where}: {code}"
    return ""


def placeholders(graph: fx.Graph) -> list[fx.Node]:
    """The inputs of a graph, in order."""
    return [n for n in graph.nodes if n.op == "placeholder"]


def output_node(graph: fx.Graph) -> fx.Node:
    """The output node of a graph."""
    return graph.output_node()


def output_args(graph: fx.Graph) -> list[Any]:
    """What a graph returns, flat and in order."""
    returned = output_node(graph).args[0]
    return list(returned) if isinstance(returned, (list, tuple)) else [returned]


def snapshot(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph module that later passes on the original do not change; parameters are shared."""
    made = fx.GraphModule(gm, _copy_graph(gm.graph))
    made.meta.update(gm.meta)
    return made


def _copy_graph(graph: fx.Graph) -> fx.Graph:
    made = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    result = made.graph_copy(graph, mapping)
    made.output(result)
    output_node(made).meta.update(output_node(graph).meta)
    return made


def walk_inputs(starts: Iterable[fx.Node], into: Callable[[fx.Node], bool]) -> set[fx.Node]:
    """`starts` and all nodes they depend on, followed as long as `into(node)` holds."""
    found: set[fx.Node] = set()
    todo = list(starts)
    while todo:
        node = todo.pop()
        if node in found or not into(node):
            continue
        found.add(node)
        todo.extend(node.all_input_nodes)
    return found


def tangent_positions(graph: fx.Graph) -> dict[fx.Node, int] | None:
    """For each tangent of a joint graph, the position of its output among the forward's outputs.

    AOTAutograd describes inputs and outputs (``desc``); None where it does not, or where a tangent belongs to no
    output.
    """
    described = list(output_node(graph).meta.get("desc") or ())
    found: dict[fx.Node, int] = {}
    for node in placeholders(graph):
        if is_tangent(node):
            output = getattr(node.meta.get("desc"), "output", None)
            if output is None or output not in described:
                return None
            found[node] = described.index(output)
    return found


def loosen_views(graph: fx.Graph) -> None:
    """Let every ``view`` copy where it must.

    Some CPU kernels return other strides than their fake implementations promise, so that a view that was legal in
    the trace is not on the real tensor; the values are the same either way.
    """
    for node in graph.find_nodes(op="call_function", target=aten.view.default):
        node.target = aten.reshape.default
