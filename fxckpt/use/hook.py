"""The rewrite inside AOTAutograd: which joint graphs are ours, and what is done with them."""

from __future__ import annotations

from typing import Any

from torch import fx

from fxckpt import torch_private
from fxckpt.capture import marks
from fxckpt.pipeline import rewrite
from fxckpt.torch_private import JointCapture
from fxckpt.use import state as states
from fxckpt.use.state import Compilation, Inspected


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
        forward, backward, record = rewrite(partition, joint, inputs, kwargs, request)
        state.add(record)
        if compilation.inspect_only:
            raise Inspected
        return forward, backward

    return run


def _inlined(gm: fx.GraphModule) -> Compilation | None:
    """A transformed model that was called inside somebody else's compiled function; its nodes carry its number."""
    found = [s for number in sorted(marks.numbers(gm.graph)) if (s := states.find(number)) is not None]
    return Compilation(found[0]) if found else None
