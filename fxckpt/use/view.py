"""The transformed model: the original seen through another ``forward``.

A view is an instance of a subclass made for it alone, with the same name, whose instances share the original's
``__dict__``: same modules, parameters, buffers, hooks and attributes. Only :class:`_Own` attributes are the view's own.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fxckpt import torch_private
from fxckpt.config import Settings, parse_offload
from fxckpt.errors import FxckptError, SettingsError, UnsupportedError
from fxckpt.use import hf, hook, replaced
from fxckpt.use.call import call, inlined
from fxckpt.use.state import State


def make_view(model: nn.Module, settings: Settings) -> nn.Module:
    """A model of the same class over the same parameters whose calls are rewritten according to `settings`."""
    hook.install()
    state = State(model, settings)
    base = type(model)
    namespace: dict[str, Any] = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "_fxckpt_state": state,
        "_fxckpt_own": {},
        "forward": _OwnForward("forward", _forward_of(model, state)),
        "_compiled_call_impl": _Own("_compiled_call_impl", None),
        "__new__": lambda cls, *args, **kwargs: base(*args, **kwargs),  # a further instance is no view of this original
        "__deepcopy__": _deepcopy,
        "__reduce_ex__": _reduce,
        "_replicate_for_data_parallel": _no_replica,
        **_switches(base),
    }
    view_class = type(base.__name__, (base,), namespace)
    view_class.forward = namespace["forward"]  # type: ignore[attr-defined]  # transformers' layers wrap it on subclassing
    view: nn.Module = object.__new__(view_class)  # FSDP2 classes override __new__
    view.__dict__ = model.__dict__
    return view


def state_of(view: nn.Module) -> State:
    """The state of a transformed model, also through wrappers that keep it as ``_orig_mod`` or ``module``.

    Raises:
        FxckptError: `view` is not a transformed model.
    """
    step: Any = view
    for _ in range(8):
        found = getattr(type(step), "_fxckpt_state", None)
        if isinstance(found, State):
            return found
        inner = getattr(step, "_orig_mod", None) or getattr(step, "module", None)
        if not isinstance(inner, nn.Module):
            break
        step = inner
    raise FxckptError(f"{type(view).__name__} is not a transformed model: pass what fxckpt.transform(...) returned.")


class _Own:
    """A view's own attribute, kept with its class and not in the ``__dict__`` shared with the original.

    On the class it is the default itself, so that ``inspect.signature(type(t).forward)`` answers as the original's.
    """

    def __init__(self, name: str, default: Any) -> None:
        self.name = name
        self.default = default

    def __get__(self, view: Any, owner: Any = None) -> Any:
        if view is None:
            return self.default
        own = type(view)._fxckpt_own
        if self.name in own:
            return own[self.name]
        return self.default.__get__(view) if self.default is not None else None

    def __set__(self, view: Any, value: Any) -> None:
        type(view)._fxckpt_own[self.name] = value

    def __delete__(self, view: Any) -> None:
        type(view)._fxckpt_own.pop(self.name, None)


class _OwnForward(_Own):
    """The view's ``forward``. One that is put in its place is rewritten, too."""

    def __set__(self, view: Any, value: Any) -> None:
        if getattr(value, "__func__", value) is self.default:
            self.__delete__(view)
        else:
            super().__set__(view, replaced.rewritten(type(view)._fxckpt_state, value))


torch_private.run_natively(_Own.__get__)


def _forward_of(model: nn.Module, state: State) -> Callable[..., Any]:
    """The forward of a view of `model`, with the signature of the original's."""
    has_cache = hf.takes(model, "use_cache")

    def in_frame(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        on = torch.is_grad_enabled() and state.settings.enabled
        if on and has_cache and model.training and hf.cache_is_default(model, kwargs):
            kwargs = {**kwargs, "use_cache": False}
        return inlined(state, model.forward, args, kwargs)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return in_frame(args, kwargs)
        callback = torch_private.set_eval_frame(None)
        try:
            replaced.reached(state)
            return call(state, callback, args, kwargs)
        finally:
            torch_private.set_eval_frame(callback)

    torch_private.run_natively(forward)
    forward.__doc__ = model.forward.__doc__
    forward.__signature__ = _signature(model)  # type: ignore[attr-defined]
    return forward


def _signature(model: nn.Module) -> inspect.Signature:
    """The signature of the model's forward, with the model itself in front."""
    bound, unbound = inspect.signature(model.forward), inspect.signature(type(model).forward)
    parameters = list(bound.parameters.values())
    if parameters == list(unbound.parameters.values())[1:]:
        return unbound
    if all(p.name != "self" for p in parameters):  # a forward of the instance's own
        parameters.insert(0, inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY))
    return bound.replace(parameters=parameters)


def _deepcopy(self: Any, memo: dict[int, Any]) -> nn.Module:
    state = type(self)._fxckpt_state
    made = make_view(copy.deepcopy(state.model, memo), state.settings)
    memo[id(self)] = made
    return made


def _reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
    state = type(self)._fxckpt_state
    return make_view, (state.model, state.settings)


def _no_replica(self: Any) -> nn.Module:
    raise UnsupportedError(
        "fxckpt: nn.DataParallel runs replicas of a model, and a transformed model has none. Use "
        "DistributedDataParallel, or one device a process (CUDA_VISIBLE_DEVICES)."
    )


# --- Hugging Face's switches on a view --------------------------------------------------------------------------------


def _steer(self: Any, every_n_layers: int, offload: Any) -> None:
    state: State = type(self)._fxckpt_state
    chosen = dataclasses.replace(
        state.settings, every_n=every_n_layers, offload=parse_offload(offload), policy=None, budget=None, enabled=True
    )
    _reset(state, chosen)


def _reset(state: State, settings: Settings) -> None:
    if settings != state.settings:
        state.reset(settings)


_CHECKPOINT_OPTIONS = {"use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop"}
"""Options of ``torch.utils.checkpoint``: taken, and without meaning for a rewritten graph."""


def _enable(self: Any, kwargs: Any = None, every_n_layers: int = 1, offload: Any = False, **more: Any) -> None:
    given = {**(kwargs or {}), **more}
    every_n_layers = given.pop("every_n_layers", every_n_layers)
    offload = given.pop("offload", offload)
    unknown = sorted(set(given) - _CHECKPOINT_OPTIONS)
    if unknown:
        raise SettingsError(
            f"checkpointing switch: unknown {', '.join(unknown)}; fxckpt takes every_n_layers, offload."
        )
    _steer(self, every_n_layers, offload)
    if getattr(self, "_hf_peft_config_loaded", False):
        self.enable_input_require_grads()


def _disable(self: Any) -> None:
    state: State = type(self)._fxckpt_state
    _reset(state, dataclasses.replace(state.settings, enabled=False))


def _switches(base: type) -> dict[str, Any]:
    """Overrides of those switches that the model's class has."""

    def gradient_checkpointing_enable(
        self: Any, gradient_checkpointing_kwargs: Any = None, every_n_layers: int = 1, offload: Any = False, **more: Any
    ) -> None:
        """Steer fxckpt: recompute every `every_n_layers`-th layer, with or without `offload`."""
        _enable(self, gradient_checkpointing_kwargs, every_n_layers, offload, **more)

    def activation_checkpointing_enable(
        self: Any,
        activation_checkpointing_kwargs: Any = None,
        every_n_layers: int = 1,
        offload: Any = False,
        **more: Any,
    ) -> None:
        """Steer fxckpt: recompute every `every_n_layers`-th layer, with or without `offload`."""
        _enable(self, activation_checkpointing_kwargs, every_n_layers, offload, **more)

    on = property(lambda self: type(self)._fxckpt_state.settings.enabled)
    overrides = {
        "gradient_checkpointing_enable": gradient_checkpointing_enable,
        "activation_checkpointing_enable": activation_checkpointing_enable,
        "gradient_checkpointing_disable": _disable,
        "activation_checkpointing_disable": _disable,
        "is_gradient_checkpointing": on,
        "is_activation_checkpointing": on,
    }
    return {name: made for name, made in overrides.items() if hasattr(base, name)}
