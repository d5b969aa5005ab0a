"""The Dynamo backend of a transformed model: marks each captured graph, then hands it on to the real backend."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from fxckpt import graph as G
from fxckpt import torch_private
from fxckpt.capture import marks
from fxckpt.errors import CaptureError, UnsupportedError
from fxckpt.record import Frame
from fxckpt.runtime.cuda import NO_CUDA_GRAPHS
from fxckpt.use import state as states
from fxckpt.use.absent import dependence, keep_absent
from fxckpt.use.state import Compilation, Inspected, State

INDUCTOR_OPTIONS = {"score_fusion_memory_threshold": 1 << 60}
"""Defaults that ``torch.compile(options=...)`` overrides. Horizontal fusions (of kernels that only share an input)
reach across regions and keep several regions' values alive at once. Fusions of a producer with its consumer stay."""
KEEP_LAYOUT = {"layout_optimization": False}
"""For graphs whose convolutions read inputs only, as patch embeddings do. Inductor would copy these inputs to channels
last and save the copies for the backward in place of the inputs, which are in memory anyway."""


def plain_backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
    """Run the rewritten graphs with PyTorch's ordinary kernels, each value freed after its last use."""
    return torch_private.aot_backend(_execute, _execute, gm, example_inputs)


def _execute(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
    G.loosen_views(gm.graph)
    return torch_private.boxed(gm)


class MarkingBackend:
    """Stands before the backend that ``torch.compile`` was given.

    Dynamo reuses compiled code between equal backends only, so code of the original model, or of another transform,
    that was compiled from the same frames is never run for this one.
    """

    def __init__(self, state: State, inner: Callable[..., Any]) -> None:
        self._state = weakref.ref(state)  # Dynamo's caches outlive models: they must not keep one alive
        self.plain = inner is plain_backend
        self._widely = state.width(self.plain).widely  # Dynamo breaks graphs elsewhere
        self.inner = torch_private.with_inductor_options(inner, INDUCTOR_OPTIONS)
        for name in ("compiler_name", "get_compiler_config", "reset"):  # what Dynamo asks of a backend, if it is there
            if hasattr(inner, name):
                setattr(self, name, getattr(inner, name))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MarkingBackend):
            return False
        return (other._state, other.inner, other._widely) == (self._state, self.inner, self._widely)

    def __hash__(self) -> int:
        return hash((self._state, type(self.inner)))

    @property
    def state(self) -> State:
        """The transformed model's state; it is alive while the model is called."""
        found = self._state()
        if found is None:
            raise CaptureError("fxckpt: a graph is captured for a transformed model that no longer exists.")
        return found

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        """Compile a graph that Dynamo captured; its partition runs the rewrite."""
        state = self.state
        if state.settings.offload is not None and torch_private.wants_cuda_graphs(self.inner):
            _refuse_cuda_graphs(example_inputs)
        captured = torch_private.captured_root_module()
        root = self._root(state, captured)
        reached = torch_private.guard_modules(self._alike, "fxckpt: layers recomputed alike")
        marks.mark(gm, state.frame_key(root, reached))
        captures, hits = state.captures, torch_private.cache_hits()
        frame = state.frame(root)
        inner = self.inner
        if _convolves_inputs_only(gm):
            inner = torch_private.with_inductor_options(inner, KEEP_LAYOUT)
        with states.compiling(Compilation(state, root, frame)):
            compiled = inner(gm, example_inputs)
        if state.captures == captures and torch_private.cache_hits() > hits:
            state.pending.append(_recapture(self, gm, root, frame))
        if self.plain and state.captures == captures + 1:
            depends = dependence(state.records[-1])
            if depends is not None and depends.matters:
                return keep_absent(compiled, depends)
        return compiled

    def _root(self, state: State, captured: nn.Module | None) -> nn.Module | None:
        """The module of the model whose method's frame is captured, or in whose call a function's frame is."""
        inside = {id(module) for module in state.model.modules()}
        if captured is not None and id(captured) in inside:
            return captured
        return next((m for m in torch_private.active_modules() if id(m) in inside), None)

    def _alike(self, module: nn.Module) -> Callable[[Any], bool] | None:
        """Whether another module's layers are treated as those of `module` are; None for one of another model."""
        held, wanted = self._state, self.state.treatment_pattern(module)
        if not wanted:
            return None

        def same_treatment(other: Any) -> bool:
            alive = held()
            return alive is not None and alive.treatment_pattern(other) == wanted

        return same_treatment


def _refuse_cuda_graphs(inputs: Sequence[Any]) -> None:
    if any(isinstance(x, torch.Tensor) and x.is_cuda for x in inputs):
        raise UnsupportedError(NO_CUDA_GRAPHS)


def _convolves_inputs_only(gm: fx.GraphModule) -> bool:
    """Whether each convolution in a graph that Dynamo captured reads an input, perhaps cast or seen otherwise."""
    convolutions = [n for n in gm.graph.nodes if n.target in _CONVOLUTIONS]
    return bool(convolutions) and all(n.args and _from_input(n.args[0]) for n in convolutions)


_CONVOLUTIONS = {torch.conv1d, torch.conv2d, torch.conv3d}


def _from_input(value: Any) -> bool:
    while isinstance(value, fx.Node) and value.op == "call_method" and value.args:
        value = value.args[0]
    return isinstance(value, fx.Node) and value.op == "placeholder"


def _recapture(backend: MarkingBackend, gm: fx.GraphModule, root: nn.Module | None, frame: Frame) -> Callable[[], None]:
    """A function that captures `gm` again for inspection: up to the rewritten graphs, on fake tensors, uncached."""
    copied = torch_private.copy_captured(gm)
    inputs = [G.example_value(n) for n in G.placeholders(gm.graph)]
    context = torch_private.CaptureContext.now()

    def again() -> None:
        compilation = Compilation(backend.state, root, frame, True)
        with states.compiling(compilation), contextlib.suppress(Inspected):
            context.again(lambda: backend.inner(torch_private.copy_captured(copied), inputs))

    return again
