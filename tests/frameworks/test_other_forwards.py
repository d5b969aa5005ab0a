"""Libraries that put another forward on the model they are given: on ``t`` it is rewritten, whatever it calls."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxckpt
from tests.helpers import Step, assert_close, recomputed, train_step
from tests.situations.models import qwen3, tokens

COMPILERS: dict[str, Callable[[nn.Module], Any]] = {
    "plain": lambda t: t,
    "aot_eager": lambda t: torch.compile(t, backend="aot_eager"),
}


def around(model: Any) -> None:
    """Adds to what the model does, as accelerate's casts do."""
    inner = model.forward.__func__ if hasattr(model.forward, "__func__") else model.forward

    @functools.wraps(inner)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = inner(self, *args, **kwargs)
        out.loss = out.loss * 2
        return out

    model.forward = types.MethodType(forward, model)


def beside(model: Any) -> None:
    """Calls the model's parts itself, as TRL's fused heads do, unless told otherwise."""
    inner = model.forward

    @functools.wraps(type(model).forward)
    def forward(self: Any, *args: Any, fused: bool = True, labels: Any = None, **kwargs: Any) -> Any:
        if not fused:
            return inner(*args, labels=labels, **kwargs)
        hidden = self.base_model(*args, **kwargs).last_hidden_state[:, :-1]
        logits = self.get_output_embeddings()(hidden)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())}

    model.forward = types.MethodType(forward, model)


def function(model: Any) -> None:
    """No method, but a function."""
    inner = model.forward
    model.forward = lambda **batch: inner(**batch)


def twice(model: Any) -> None:
    around(model)
    around(model)


def both(model: Any) -> None:
    beside(model)
    function(model)


WAYS: dict[str, Callable[[Any], None]] = {w.__name__: w for w in (around, beside, function, twice, both)}


def reference(way: str) -> Step:
    model = qwen3(2)
    WAYS[way](model)
    return train_step(model, model, tokens())


@pytest.mark.parametrize(
    ("way", "compiler"), [*((way, "plain") for way in WAYS), ("around", "aot_eager"), ("beside", "aot_eager")]
)
def test_it_is_rewritten(way: str, compiler: str) -> None:
    model = qwen3(2)
    t = fxckpt.transform(model, every_n=2, offload=True, verify=True)
    WAYS[way](t)
    run = COMPILERS[compiler](t)
    for _ in range(2):
        assert_close(train_step(run, model, tokens()), reference(way), rtol=1e-5, atol=1e-6)
    assert recomputed(t) == {"model.layers.0"}
    assert fxckpt.stats(t).offloads == 1
    assert "forward" not in vars(model)


@pytest.mark.parametrize("compiler", COMPILERS)
def test_one_that_does_now_this_and_now_that(compiler: str) -> None:
    model = qwen3(2)
    t = fxckpt.transform(model, every_n=2, offload=True)
    beside(t)
    run = COMPILERS[compiler](t)
    want = train_step(qwen3_ := qwen3(2), qwen3_, tokens())
    for fused in (False, True, False):
        assert_close(train_step(run, model, {**tokens(), "fused": fused}), want, rtol=1e-5, atol=1e-6)
        assert fxckpt.stats(t).offloads == 1


def test_without_gradients_it_runs_as_it_is() -> None:
    t: Any = fxckpt.transform(qwen3(2))
    beside(t)
    with torch.no_grad():
        out = t(**tokens())
    assert not out["loss"].requires_grad and fxckpt.selected_layers(t)
    with pytest.raises(fxckpt.CaptureError, match="No graph"):
        fxckpt.graphs(t)


def test_numbers_are_drawn_as_if_nothing_had_begun_anew() -> None:
    def drawing(model: Any) -> None:
        def forward(self: Any, input_ids: Any, **kwargs: Any) -> Any:
            embedded = nn.functional.dropout(self.get_input_embeddings()(input_ids), 0.3)
            return {"loss": self.base_model(inputs_embeds=embedded).last_hidden_state.square().mean()}

        model.forward = types.MethodType(forward, model)

    plain, model = qwen3(2), qwen3(2)
    drawing(plain)
    t = fxckpt.transform(model, every_n=2, offload=True)
    drawing(t)
    assert_close(train_step(t, model, tokens()), train_step(plain, plain, tokens()), rtol=1e-5, atol=1e-7)
    assert recomputed(t)


def test_a_budget_is_refused_and_a_plan_is_taken() -> None:
    t: Any = fxckpt.transform(qwen3(2), budget="1GiB")
    beside(t)
    with pytest.raises(fxckpt.UnsupportedError, match=r"another forward.*fxckpt\.plan.*plan=plan"):
        t(**tokens())
    t = fxckpt.transform(qwen3(2), budget="1GiB")
    around(t)
    t(**tokens()).loss.backward()
    assert fxckpt.chosen_plan(t).budget_bytes == 1 << 30


def test_buffers_that_change_before_the_first_layer() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x).tanh()
            return x.sum()

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for block in self.blocks:
            x = block(x).tanh()
        return x.sum()

    t: Any = fxckpt.transform(Counting(), layers=[nn.Linear])
    t.forward = types.MethodType(forward, t)
    with pytest.raises(fxckpt.CaptureError, match="changed buffers"):
        t(torch.ones(2, 4))
    assert not any(m._forward_pre_hooks for m in t.modules()), "what watched the layers is gone"
