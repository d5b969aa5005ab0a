"""Another forward on a transformed model: ``t.forward = ...``, as libraries do to add to what a model does.

It may come to the transformed model's own forward, as one that casts results does. Then that is where the rewrite is.
Or it calls the model's parts itself, as one with another loss does, and would train without the rewrite: then the whole
of it is captured, and rewritten like a model's forward. Which of the two it is shows when it runs for the first time:
where a layer that is to be rewritten is called otherwise than by the transformed model's forward, the call ends there
and begins anew.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import types
from collections.abc import Iterator
from typing import Any

import torch

from fxckpt import torch_private
from fxckpt.errors import CaptureError, UnsupportedError
from fxckpt.runtime.store import is_called
from fxckpt.use.call import Forward, call, inlined, snapshot, under
from fxckpt.use.state import State

_watched = threading.local()


class _PassedBy(BaseException):
    """A layer was called otherwise than by the forward of the transformed model that it is watched for."""


def rewritten(state: State, replaced: Forward) -> Forward:
    """What a call of the transformed model of `state` runs in place of `replaced`, which was put on it."""
    function: Forward = replaced.__func__ if isinstance(replaced, types.MethodType) else replaced
    whole = False  # whether `replaced` passes by the transformed model's own forward

    def run(given: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal whole
        if torch.compiler.is_dynamo_compiling():
            return inlined(state, function, given, kwargs)
        callback = torch_private.set_eval_frame(None)
        try:
            if not torch.is_grad_enabled() or not state.settings.enabled or is_called(state.store):
                return under(callback, function, given, kwargs)
            if not whole and torch_private.user_backend(callback) is None:
                again = snapshot(state.model)
                try:
                    with _watch(state):
                        return function(*given, **kwargs)
                except _PassedBy:
                    whole = True
                if not again():
                    raise CaptureError(
                        "fxckpt: the forward that was put on the transformed model changed buffers of it before it "
                        "called a layer that is to be rewritten. Put it on the model before fxckpt.transform."
                    )
            if state.settings.budget is not None:
                raise UnsupportedError(
                    "fxckpt: another forward was put on the transformed model, and a budget is planned for the "
                    "model's own. Make the plan first, fxckpt.plan(model, batch, budget=...), and give it: "
                    "fxckpt.transform(model, plan=plan)."
                )
            return call(state, callback, given, kwargs, function)
        finally:
            torch_private.set_eval_frame(callback)

    def forward(*given: Any, **kwargs: Any) -> Any:
        return run(given, kwargs)

    torch_private.run_natively(run)
    torch_private.run_natively(forward)
    functools.update_wrapper(forward, function)
    return types.MethodType(forward, replaced.__self__) if isinstance(replaced, types.MethodType) else forward


@contextlib.contextmanager
def _watch(state: State) -> Iterator[None]:
    """In this context a call of a layer raises :class:`_PassedBy`, but for calls by the transformed model's forward."""
    if getattr(_watched, "state", None) is state:
        yield
        return

    def passed_by(*_: Any) -> None:
        raise _PassedBy

    handles = [layer.module.register_forward_pre_hook(passed_by, prepend=True) for layer in state.layers()]
    before = getattr(_watched, "state", None), getattr(_watched, "handles", [])
    _watched.state, _watched.handles = state, handles
    try:
        yield
    finally:
        reached(state)
        _watched.state, _watched.handles = before


def reached(state: State) -> None:
    """The forward of the transformed model is called, so its layers may be."""
    if getattr(_watched, "state", None) is state:
        for handle in _watched.handles:
            handle.remove()
