"""After a call: was everything rewritten that was to be? A lost rewrite is an error, never a plain run."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from fxckpt.decide import saves
from fxckpt.decide.policy import Given
from fxckpt.errors import CaptureError, SettingsError
from fxckpt.use.state import State


def check_captured(state: State) -> None:
    """Raise where a call that autograd recorded has left no region of any layer that was to be recomputed.

    Raises:
        CaptureError: Dynamo is off, or the layers ran outside its graphs.
    """
    if state.pending:  # from a compile cache, whose entries carry our key
        state.found = True
    if state.found:
        return
    name = type(state.model).__name__
    if not state.captures:
        raise CaptureError(
            f"fxckpt: a call of {name} with gradients was not captured by Dynamo, so nothing was rewritten. Is Dynamo "
            "off (TORCHDYNAMO_DISABLE, torch.compiler.set_stance, torch.compiler.disable on forward)? Switch it on. Or "
            "does it leave all of it alone (TORCH_LOGS=graph_breaks tells)? Then call the original model."
        )
    wanted = _wanted(state)
    found = {r.layer.name for record in state.records for r in record.regions}
    state.found = not wanted or any(n in found for n in wanted)
    if not state.found:
        raise CaptureError(
            f"fxckpt: no captured graph of {name} contains a call of a layer to be recomputed ({_some(wanted)}). The "
            "layers were not called, or Dynamo ran them outside its graphs (TORCH_LOGS=graph_breaks tells why). Name "
            "other layers, or call the original model."
        )


def check_saves(state: State) -> None:
    """Raise where ``save=`` names what no recomputed layer of the captured graphs has.

    Raises:
        SettingsError: the message names what they have.
    """
    policy = state.settings.policy
    if isinstance(policy, Given) and policy.checked:
        return
    wanted = {entry for t in state.treatments().values() for entry in t.save or ()}
    missing = sorted(wanted - {entry for record in state.records for entry in record.plan.matched})
    if not missing or state.pending:  # graphs from a compile cache were looked at when they were made
        return
    inside = [n for r in state.records for region in r.regions for n in region.nodes]
    raise SettingsError(
        f"fxckpt: save={missing} names nothing that the recomputed layers of {type(state.model).__name__} compute. "
        f"They compute {', '.join(saves.known(inside))}."
    )


def check_nothing_plain(state: State, outputs: Iterable[torch.Tensor], start: int) -> None:
    """Raise where a part of a layer that was to be recomputed ran outside captured graphs.

    Its parameters then hang on ordinary autograd nodes, not on that of a captured graph.

    Args:
        state: of the transformed model.
        outputs: what the call returned, as far as autograd recorded it.
        start: number of the first autograd node that the call made.

    Raises:
        CaptureError: such a part was found; the message names the layers.
    """
    owners = _parameter_owners(state)
    plain: set[str] = set()
    todo = [t.grad_fn for t in outputs]
    seen = set()
    while todo:
        node = todo.pop()
        if node is None or node in seen or node._sequence_nr() < start:
            continue
        seen.add(node)
        captured = node.name() == "CompiledFunctionBackward"
        for following, _ in node.next_functions:
            variable = getattr(following, "variable", None)  # of a node that accumulates into a leaf
            if variable is None:
                todo.append(following)
            elif not captured and id(variable) in owners:
                plain.add(owners[id(variable)])
    if plain:
        raise CaptureError(
            "fxckpt: Dynamo ran a part of layers that were to be recomputed outside its graphs "
            f"({_some(sorted(plain))}); what it keeps would stay. torch.compiler.disable, a backward hook on a module "
            "in the layer, or code that Dynamo cannot trace, such as a loop over what a tensor holds, do this "
            "(TORCH_LOGS=graph_breaks tells which). Remove it, or leave these layers out."
        )


def _parameter_owners(state: State) -> dict[int, str]:
    """Name of the recomputed layer for each parameter that such a layer alone holds, by ``id()``."""
    wanted = set(_wanted(state))
    inside: dict[int, str] = {}
    within: set[int] = set()
    for layer in state.layers():
        if layer.name in wanted:
            inside |= {id(p): layer.name for p in layer.module.parameters()}
            within |= {id(m) for m in layer.module.modules()}
    for module in state.model.modules():
        if id(module) not in within:
            for parameter in module.parameters(recurse=False):
                inside.pop(id(parameter), None)
    return inside


def _wanted(state: State) -> list[str]:
    return [n for n, t in state.treatments().items() if t.recompute]


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
