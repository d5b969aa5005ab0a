"""A call of a transformed model.

``forward`` of a transformed model runs as plain Python, also under ``torch.compile(t)``: Dynamo's frame evaluation is
paused, the call is prepared, and the ORIGINAL model's forward is compiled, with the backend ``torch.compile`` was
given behind a :class:`~fxckpt.use.backend.MarkingBackend`, or with the plain backend outside ``torch.compile``. So
the captured frames, graphs and guards are those of ``torch.compile(model)``.

Where ``t`` is called inside a function that Dynamo is already tracing, ``forward`` is inlined instead and marks its
nodes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx.traceback import annotate
from torch.utils import _pytree as pytree

from fxckpt import torch_private
from fxckpt.capture import marks
from fxckpt.errors import CaptureError, FxckptError, UnsupportedError
from fxckpt.runtime.store import calling, is_called
from fxckpt.torch_private import UserBackend
from fxckpt.use import hf
from fxckpt.use.backend import MarkingBackend, plain_backend
from fxckpt.use.check import check_captured, check_nothing_plain, check_saves
from fxckpt.use.state import State

PLAIN = UserBackend(plain_backend, fullgraph=False, recompile_limit=64)
"""Outside ``torch.compile``. Its users did not ask for a compiler, so its limit is high; each entry is a captured
graph."""


Forward = Callable[..., Any]


def call(
    state: State, callback: Any, args: tuple[Any, ...], kwargs: dict[str, Any], replaced: Forward | None = None
) -> Any:
    """Run the model; `callback` is Dynamo's, as it was before frame evaluation was paused.

    `replaced` is captured in place of the model's forward, where there is one (``use/replaced.py``); it has no budget.
    """
    if not torch.is_grad_enabled() or not state.settings.enabled or is_called(state.store):
        return under(callback, state.model.forward, args, kwargs)
    user = torch_private.user_backend(callback) or PLAIN
    if replaced is None:
        state.keep_budget(args, kwargs, compiled=torch_private.is_inductor(user.compile))
    if state.settings.offload is not None and torch_private.is_inductor(user.compile):
        _refuse_hooks()
    with hf.switches_off(state.model) as taken_over:
        cached = taken_over and (replaced is None or hf.accepts(replaced, "use_cache"))
        kwargs = hf.without_cache(state.model, kwargs, cached)
        return _step(state, user, replaced or state.model.forward, args, kwargs)


def _step(state: State, user: UserBackend, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a step; where not all of it is captured, anew as Dynamo does by default, or, where that was so, widely.

    Calls outside ``torch.compile`` may try both at any time, others at the first step.
    """
    plain = user is PLAIN
    width = state.width(plain)
    again = snapshot(state.model) if width.is_open else None
    before = len(state.records)
    try:
        out = _checked(state, user, forward, args, kwargs)
        width.is_open = plain and width.is_open
        return out
    except CaptureError as error:
        if again is None or not again():
            raise
        failed = error.with_traceback(None)  # whose frames hold the step's tensors
    with state.lock:
        del state.records[before:]
    width.widely, width.is_open = not width.widely, False  # from now on, if that helps
    try:
        return _checked(state, user, forward, args, kwargs)
    except Exception:
        width.widely, width.is_open = not width.widely, True
        if plain:  # this one was by default
            raise
    raise failed from failed.__cause__


def _checked(state: State, user: UserBackend, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a step, and check that what was to be rewritten is."""
    state.calls += 1
    state.store.begin_step()
    captures, frames, start = state.captures, torch_private.frames_seen(), torch_private.next_sequence_number()
    with calling(state.store):
        out = _run(state, user, forward, args, kwargs)
    recorded = [t for t in _tensors(out) if t.grad_fn is not None and t.grad_fn._sequence_nr() >= start]
    if recorded and (state.captures != captures or not state.found or torch_private.frames_seen() != frames):
        check_captured(state)
        check_saves(state)
        check_nothing_plain(state, recorded, start)
    for tensor in recorded:
        tensor.register_hook(_no_create_graph)
    return out


def _refuse_hooks() -> None:
    if torch_private.hooks_on_saved_tensors():
        raise UnsupportedError(
            "fxckpt: hooks on saved tensors (torch.autograd.graph.save_on_cpu and the like) and offload= both move "
            "what is saved. Under torch.compile use one of them; t(**batch) itself takes both."
        )


def inlined(state: State, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `forward` inside a frame that Dynamo is tracing, with the model's mark on what it computes."""
    if not torch.is_grad_enabled() or not state.settings.enabled:
        return forward(*args, **kwargs)
    torch.ops.fxckpt.rewrite(state.key)
    with annotate({marks.ANNOTATION: state.number}):
        return forward(*args, **kwargs)


def under(callback: Any, function: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `function` with Dynamo's callback as it was."""
    torch_private.set_eval_frame(callback)
    try:
        return function(*args, **kwargs)
    finally:
        torch_private.set_eval_frame(None)


def _run(state: State, user: UserBackend, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    stance = torch_private.bypassing_stance()
    if stance is not None:
        raise CaptureError(
            f"fxckpt: under torch.compiler.set_stance({stance}) this call may run without the rewrite. Set the stance "
            "'default', or call the original model."
        )
    compiled = _compiled(state, forward, user)
    plain = user is PLAIN
    try:
        with torch_private.capturing(state.recurrent, widely=state.width(plain).widely, hooks=plain):
            return compiled(*args, **kwargs)
    except torch_private.RecompileLimit as error:
        raise CaptureError(
            f"fxckpt: Dynamo gave up compiling a part of the model ({error}); it would run without the rewrite. Raise "
            "torch._dynamo.config.recompile_limit, or find what changes from call to call (TORCH_LOGS=recompiles)."
        ) from None
    except Exception as error:
        ours = torch_private.own_error(error, FxckptError)
        if ours is not None:
            raise ours from None  # Dynamo wraps what a backend raises
        if plain and (torch_private.is_capture_failure(error) or torch_private.depends_on_data(error)):
            raise CaptureError(
                f"fxckpt: Dynamo cannot capture this call of {type(state.model).__name__}, so its step cannot be "
                "rewritten. Either the call is wrong, and fails on the original model too, or train the original "
                f"model, since torch.compile(model) fails alike. The reason: {error}"
            ) from error
        raise


def snapshot(model: torch.nn.Module) -> Callable[[], bool]:
    """A function that sets the random state back to now, and says whether the model's buffers are as they are now."""
    buffers = [(buffer, buffer._version) for buffer in model.buffers() if not buffer.is_inference()]
    on_cuda = torch.cuda.is_initialized()
    devices = {p.device for p in model.parameters() if p.is_cuda} if on_cuda else set()
    states = [(device, torch.cuda.get_rng_state(device)) for device in devices]
    cpu = torch.get_rng_state()

    def back() -> bool:
        torch.set_rng_state(cpu)
        for device, state in states:
            torch.cuda.set_rng_state(state, device)
        return all(buffer._version == version for buffer, version in buffers)

    return back


def _compiled(state: State, forward: Forward, user: UserBackend) -> Forward:
    """The original forward, compiled for this state and this backend; made once for each."""
    function = getattr(forward, "__func__", forward)
    backend = MarkingBackend(state, user.compile)
    key = (function, backend, user.fullgraph, user.recompile_limit)
    found = state.compiled.get(key)
    if found is None:
        if any(p.device.type == "cpu" for p in state.model.parameters()):
            torch_private.prepare(user.compile)
        framed = function if hasattr(function, "__code__") else _in_frame(function)
        # After graph breaks a frame is compiled once for kept and once for recomputed layers.
        kinds = len(set(state.treatments().values()))
        limit = (user.recompile_limit or torch_private.recompile_limit()) * kinds
        afresh = user is not PLAIN and state.compiled_width.widely
        found = state.compiled[key] = torch_private.compile_frame(
            framed, backend, fullgraph=user.fullgraph, recompile_limit=limit, afresh=afresh
        )
    if function is forward:
        return found
    owner = forward.__self__  # type: ignore[attr-defined]
    return lambda *args, **kwargs: found(owner, *args, **kwargs)


def _in_frame(function: Forward) -> Forward:
    """A callable object as a function: Dynamo wants a frame."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return forward


def _no_create_graph(grad: torch.Tensor) -> None:
    if torch.is_grad_enabled():
        raise UnsupportedError(
            "fxckpt: a backward with create_graph=True (a double backward, such as a gradient penalty) went through a "
            "rewritten graph, which has no second derivative. Call the original model for this term."
        )


def _tensors(out: Any) -> Iterator[torch.Tensor]:
    for leaf in pytree.tree_leaves(out):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            for field in dataclasses.fields(leaf):
                yield from _tensors(getattr(leaf, field.name, None))
