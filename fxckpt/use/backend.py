"""The Dynamo backend of a transformed model: marks each captured graph, then hands it on to the real backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from fxckpt import torch_private
from fxckpt.capture import marks
from fxckpt.use import state as states
from fxckpt.use.state import State


def plain_backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
    """Run the rewritten graphs with PyTorch's ordinary kernels, each value freed after its last use."""
    return torch_private.aot_backend(_execute, _execute, gm, example_inputs)


def _execute(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
    return torch_private.boxed(gm)


class MarkingBackend:
    """Stands before the backend that ``torch.compile`` was given.

    Dynamo reuses compiled code between equal backends only, so code of the original model, or of another transform, that
    was compiled from the same frames is never run for this one.
    """

    def __init__(self, state: State, inner: Callable[..., Any]) -> None:
        self.state = state
        self.inner = inner
        for name in ("compiler_name", "get_compiler_config", "reset"):  # what Dynamo asks of a backend, if it is there
            if hasattr(inner, name):
                setattr(self, name, getattr(inner, name))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MarkingBackend) and other.state is self.state and other.inner == self.inner

    def __hash__(self) -> int:
        return hash((id(self.state), type(self.inner)))

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        marks.mark(gm, self.state.settings.key())
        with states.compiling(self.state):
            return self.inner(gm, example_inputs)
