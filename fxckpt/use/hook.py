"""The rewrite inside AOTAutograd: which joint graphs are ours, and what is done with them."""

from __future__ import annotations

from typing import Any

from torch import fx

from fxckpt import torch_private
from fxckpt.capture import marks
from fxckpt.errors import CaptureError, UnsupportedError
from fxckpt.pipeline import rewrite
from fxckpt.record import GraphRecord
from fxckpt.torch_private import JointCapture
from fxckpt.use import state as states
from fxckpt.use.state import Compilation, Inspected, Joint, State


def install() -> None:
    """Let AOTAutograd show us every joint graph; once a process. Graphs of other models are not touched."""
    torch_private.install_partition_hook(_on_joint_graph)


def _on_joint_graph(gm: fx.GraphModule, capture: JointCapture) -> Any:
    compilation = states.current() or _inlined(gm)
    if compilation is None:
        return None
    state = compilation.state
    state.captures += 1
    request = state.request(capture, compilation.root, compilation.frame)

    def run(partition: Any, joint: fx.GraphModule, inputs: Any, kwargs: dict[str, Any]) -> Any:
        captured = None
        if state.joints is not None:
            context = torch_private.CaptureContext.now()
            captured = torch_private.snapshot(joint)
            state.joints.append(Joint(compilation, capture, context, partition, captured, inputs, dict(kwargs)))
        forward, backward, record = rewrite(partition, joint, inputs, kwargs, request, captured)
        state.add(record)
        if compilation.inlined:
            _check_inlined(state, record)
        if compilation.inspect_only:
            raise Inspected
        return forward, backward

    return run


def _inlined(gm: fx.GraphModule) -> Compilation | None:
    """A transformed model that was called inside somebody else's compiled function; its nodes carry its number."""
    found = [s for number in sorted(marks.numbers(gm.graph)) if (s := states.find(number)) is not None]
    if len(found) > 1:
        names = ", ".join(type(s.model).__name__ for s in found)
        raise UnsupportedError(
            f"fxckpt: several transformed models ({names}) are called inside one compiled function, and one graph "
            "takes one of them. Compile each for itself, torch.compile(t), or transform one module that holds both."
        )
    if not found:
        return None
    if found[0].settings.budget is not None:
        raise UnsupportedError(
            f"fxckpt: {type(found[0].model).__name__} is called inside a compiled function before its budget was "
            "planned for. Make the plan first, fxckpt.plan(model, batch, budget=..., compiled=True), and give it: "
            "fxckpt.transform(model, plan=plan)."
        )
    return Compilation(found[0], frame=found[0].frame(None, inlined=True), inlined=True)


def _check_inlined(state: State, record: GraphRecord) -> None:
    wanted = [n for n, t in state.treatments().items() if t.recompute]
    if wanted and not any(r.layer.name in wanted for r in record.regions):
        raise CaptureError(
            f"fxckpt: a compiled function that calls {type(state.model).__name__} contains no call of a layer to be "
            f"recomputed ({', '.join(wanted[:5])}). Name other layers, or call the original model."
        )
