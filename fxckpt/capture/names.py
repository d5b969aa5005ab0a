"""``fxckpt.name(value, "label")``: the model's author names a value, so that ``save=("label",)`` can save it.

While a training step is captured, the name is an operator in the graph, ``torch.ops.fxckpt.named``, since it has to
outlive what compilers do to a graph before it is rewritten. :func:`take_names` takes it out again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxckpt import graph as G
from fxckpt.errors import SettingsError

_library = torch.library.Library("fxckpt", "FRAGMENT")
_library.define("named(Tensor value, str label) -> Tensor")


@torch.library.impl(_library, "named", "CompositeExplicitAutograd")
def _name(value: torch.Tensor, label: str) -> torch.Tensor:
    return value.clone()  # an operator may not return what it was given


def _name_backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
    return gradient, None


torch.library.register_fake("fxckpt::named", lambda value, label: value.clone(), lib=_library)
torch.library.register_autograd("fxckpt::named", _name_backward, lib=_library)


def name(value: torch.Tensor, label: str) -> torch.Tensor:
    """Name a value of a model, so that ``fxckpt.transform(model, save=(label,))`` saves it in recomputed layers.

    Example::

        def forward(self, x):
            hidden = fxckpt.name(self.up(x).relu(), "hidden")
            return x + self.down(hidden)

    Outside ``torch.compile`` and without gradients it does nothing. In a model that is compiled without
    ``fxckpt.transform`` it costs a copy.

    Args:
        value: a tensor of any shape and type.
        label: its name; several values may have the same.

    Returns:
        `value`, to be used in its place.

    Raises:
        SettingsError: `label` is no name.
    """
    if not isinstance(label, str) or not label:
        raise SettingsError(f"fxckpt.name(value, {label!r}): a name is a text.")
    if torch.compiler.is_compiling() and torch.is_grad_enabled():
        return torch.ops.fxckpt.named(value, label)  # type: ignore[no-any-return]
    return value


def take_names(graph: fx.Graph) -> None:
    """Take the operators of :func:`name` out of a joint graph, and put the names on the values.

    Leaves: names on nodes, which :func:`fxckpt.graph.given_names` tells.
    """
    for node in graph.find_nodes(op="call_function", target=torch.ops.fxckpt.named.default):
        value, label = node.args
        G.give_name(value, label)
        node.replace_all_uses_with(value)
        graph.erase_node(node)
