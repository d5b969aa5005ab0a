"""How a captured graph says that it belongs to a transformed model.

``torch.ops.fxckpt.rewrite(key)`` stands at the head of every graph that Dynamo captures from a transformed model. It
takes no tensor and returns none, so AOTAutograd drops it, and three things follow:

- its `key` (the settings and the hash of fxckpt's source) is part of the graph's text, so a compile cache never gives
  an artefact of other settings;
- a backend that runs the captured graph as it is (``backend="eager"``, a user's own without AOTAutograd) runs the op,
  which raises: a lost rewrite is an error;
- a frame that Dynamo gave up on runs the op as plain Python, and raises too.

Where the model is called inside somebody else's compiled function, its nodes also carry the model's number in this
process as an annotation.
"""

from __future__ import annotations

import torch
from torch import fx

from fxckpt import graph as G
from fxckpt.errors import BackendError

ANNOTATION = "fxckpt"

_library = torch.library.Library("fxckpt", "FRAGMENT")
_library.define("rewrite(str key) -> ()")


@torch.library.impl(_library, "rewrite", "CompositeExplicitAutograd")
def _rewrite(key: str) -> None:
    raise BackendError(
        "fxckpt: a graph of a transformed model was about to run without the rewrite. Either the torch.compile backend "
        "does not use AOTAutograd (as backend='eager' does not), or Dynamo gave up compiling the call (for instance at "
        "its recompile limit). Use the default backend, 'aot_eager' or another one built on AOTAutograd, call the "
        "model without torch.compile, or raise torch._dynamo.config.recompile_limit."
    )


torch.library.register_fake("fxckpt::rewrite", lambda key: None, lib=_library)


def mark(gm: fx.GraphModule, key: str) -> None:
    """Put the mark at the head of a graph captured by Dynamo; once."""
    if any(n.target is torch.ops.fxckpt.rewrite.default for n in gm.graph.nodes):
        return
    first = next((n for n in gm.graph.nodes if n.op != "placeholder"), None)
    if first is None:
        return
    with gm.graph.inserting_before(first):
        gm.graph.call_function(torch.ops.fxckpt.rewrite.default, (key,))
    gm.recompile()


def numbers(graph: fx.Graph) -> set[int]:
    """The numbers of the transformed models that the nodes of a joint graph are annotated with."""
    return {k for n in graph.nodes if isinstance(k := G.annotation(n, ANNOTATION), int)}
