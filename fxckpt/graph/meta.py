"""The keys of ``node.meta``: PyTorch's, read here alone, and the rewrite's own mark on a node, :class:`Tag`."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fxckpt.graph.structure import is_tangent, output_node, placeholders

_OWN_KEY = "fxckpt"
_NAMES_KEY = "fxckpt_names"


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
    NAMED = "named"
    """Inside a recomputed region, and saved because its policy says so."""
    KEPT = "kept"
    """Inside a region that is kept: leaves device memory if the partitioner chooses to save it."""


@dataclass(frozen=True)
class Tag:
    """The rewrite's mark on a node.

    Attributes:
        kind: what the value is to the rewrite.
        regions: indices of the regions the value belongs to (interior, named, kept) or is read by (boundary).
        name: of what may be offloaded, the name of its transfer nodes, such as ``layers_3_input``.
        offload: whether it leaves device memory, where it is saved.
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


def given_names(node: fx.Node) -> tuple[str, ...]:
    """The names that the model's author gave the value of `node`."""
    names: tuple[str, ...] = node.meta.get(_NAMES_KEY, ())
    return names


def give_name(node: fx.Node, name: str) -> None:
    """Put one more name on the value of `node`."""
    node.meta[_NAMES_KEY] = (*given_names(node), name)


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


def is_opaque(node: fx.Node) -> bool:
    """Whether `node` stands for an object that is neither tensor nor number, such as a process group."""
    val = value(node)
    return val is not None and not isinstance(val, (torch.Tensor, list, tuple, bool, int, float, complex, str, *_SIZES))


_SIZES = (torch.SymInt, torch.SymFloat, torch.SymBool)


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


def backward_nodes(graph: fx.Graph) -> set[fx.Node]:
    """All nodes of a joint graph that depend on a tangent or were recorded in the backward."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if is_tangent(node) or (node.op == "call_function" and not is_forward(node)):
            found.add(node)
        elif node.op == "call_function" and any(i in found for i in node.all_input_nodes):
            found.add(node)
    return found


def is_recomputed(node: fx.Node) -> bool:
    """Whether `node` of a backward graph computes a value of a recomputed region again."""
    found = tag(node)
    return node.op == "call_function" and found is not None and found.kind is Kind.INTERIOR


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
