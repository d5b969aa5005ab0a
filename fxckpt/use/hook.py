"""The rewrite inside AOTAutograd: which joint graphs are ours, and what is done with them."""

from __future__ import annotations

from typing import Any

from torch import fx

from fxckpt import graph as G
from fxckpt import torch_private
from fxckpt.capture import marks
from fxckpt.pipeline import rewrite
from fxckpt.torch_private import JointCapture
from fxckpt.use import state as states


def install() -> None:
    """Let AOTAutograd show us every joint graph; once a process. Graphs of other models are not touched."""
    torch_private.install_partition_hook(_on_joint_graph)


def _on_joint_graph(gm: fx.GraphModule, capture: JointCapture) -> Any:
    state = states.current()
    if state is None:
        keys = marks.keys(gm.graph)
        if not keys:
            return None
        state = states.find(keys, {ident for n in gm.graph.nodes for ident, *_ in G.module_stack(n)})
        if state is None:
            return None
    state.captures += 1
    request = state.request(capture, torch_private.captured_root_module())
    owner = state

    def run(partition: Any, joint: fx.GraphModule, inputs: Any, kwargs: dict[str, Any]) -> Any:
        forward, backward, record = rewrite(partition, joint, inputs, kwargs, request)
        owner.add(record)
        return forward, backward

    return run
