"""Graph modules whose Python code is generated when it is first asked for: most graphs between passes never run.

Stands on ``torch.fx._lazy_graph_module``, which Inductor uses to the same end.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module

from fxckpt import graph


def code_on_demand() -> AbstractContextManager[None]:
    """Within this context graph modules that PyTorch's partitioner makes generate code when they are first called."""
    return _use_lazy_graph_module(True)


def generate_code(gm: fx.GraphModule) -> None:
    """Let `gm.forward` run its graph as it is now."""
    gm.recompile()
    _LazyGraphModule.force_recompile(gm)


def snapshot(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph module that later passes on the original do not change; parameters are shared."""
    made = _LazyGraphModule(gm, graph.copy_graph(gm.graph))
    made.meta.update(gm.meta)
    return made
