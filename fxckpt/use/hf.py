"""Hugging Face's switches, without importing transformers: its own checkpointing is taken over, not run as well."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

log = logging.getLogger("fxckpt")

_lock = threading.Lock()
_depth: Counter[int] = Counter()


@contextlib.contextmanager
def switches_off(model: nn.Module) -> Iterator[bool]:
    """Within this context no module of `model` checkpoints by itself; gives whether the model is in training.

    The flags are shared with the original model, so they are put back at the end; nested and concurrent calls count.
    """
    flagged = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False) is True]
    if not flagged:
        yield model.training
        return
    with _lock:
        for module in flagged:
            _depth[id(module)] += 1
            module.gradient_checkpointing = False  # type: ignore[assignment]
    try:
        yield model.training
    finally:
        with _lock:
            for module in flagged:
                _depth[id(module)] -= 1
                if not _depth[id(module)]:
                    del _depth[id(module)]
                    module.gradient_checkpointing = True  # type: ignore[assignment]


def without_cache(model: nn.Module, kwargs: dict[str, Any], training: bool) -> dict[str, Any]:
    """Call arguments with ``use_cache=False`` in training, as transformers does when it checkpoints."""
    if not training or kwargs.get("use_cache") is False or "past_key_values" in kwargs:
        return kwargs
    if "use_cache" in kwargs:
        log.warning("fxckpt: use_cache=True makes no sense while activations are recomputed; using use_cache=False.")
        return {**kwargs, "use_cache": False}
    if cache_is_default(model, kwargs) and takes(model, "use_cache"):
        return {**kwargs, "use_cache": False}
    return kwargs


def cache_is_default(model: nn.Module, kwargs: dict[str, Any]) -> bool:
    """Whether a call would build a key-value cache only because the model's configuration says so."""
    if "use_cache" in kwargs or "past_key_values" in kwargs:
        return False
    return bool(getattr(getattr(model, "config", None), "use_cache", False))


def takes(model: nn.Module, name: str) -> bool:
    """Whether the model's forward takes a keyword argument `name`."""
    return accepts(model.forward, name)


def accepts(forward: Callable[..., Any], name: str) -> bool:
    """Whether a forward takes a keyword argument `name`."""
    return _parameter_exists(getattr(forward, "__func__", forward), name)


@functools.lru_cache(maxsize=256)
def _parameter_exists(function: Callable[..., Any], name: str) -> bool:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
