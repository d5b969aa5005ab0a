"""Loops of one's own: scaled gradients, fused optimisers, averages, clipping, functional calls, swapped tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fxckpt
from tests.frameworks.test_trainer import weights
from tests.helpers import DEVICE, Step, assert_close, assert_same, grads, recomputed, seed_all, train_step
from tests.situations.models import qwen3, tokens

KIND = DEVICE.split(":")[0]
COMPILERS: dict[str, Callable[[nn.Module], Any]] = {
    "plain": lambda t: t,
    "aot_eager": lambda t: torch.compile(t, backend="aot_eager"),
}


def transformed(**settings: Any) -> nn.Module:
    return fxckpt.transform(qwen3(2), **{"every_n": 2, "offload": True, **settings})


def train(model: nn.Module, run: Any, make: Callable[..., torch.optim.Optimizer], steps: int = 3) -> list[float]:
    """A loop with float16 gradients scaled, clipped, and accumulated over two batches."""
    seed_all()
    optimizer, scaler, found = make(model.parameters()), torch.amp.GradScaler(KIND, init_scale=2.0**10), []
    for step in range(steps):
        for half in range(2):
            with torch.autocast(KIND, dtype=torch.bfloat16):
                loss = run(**tokens(seed=2 * step + half)).loss
            scaler.scale(loss / 2).backward()
            found.append(loss.item())
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        assert norm.isfinite()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
    return found


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "SGD, foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
}


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_scaled_gradients(optimizer: str, compiler: str) -> None:
    plain, t = qwen3(2), transformed()
    want = train(plain, plain, OPTIMIZERS[optimizer])
    got = train(t, COMPILERS[compiler](t), OPTIMIZERS[optimizer])
    assert got == pytest.approx(want, rel=5e-3)
    assert recomputed(t) == {"model.layers.0"}


def test_gradients_that_overflow_are_skipped_as_without() -> None:
    for model in (qwen3(2), transformed()):
        before = weights(model)
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler(KIND, init_scale=3e38)
        scaler.scale(model(**tokens()).loss * 1e5).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() < 3e38
        assert_same(weights(model), before)


def test_averages_of_the_weights() -> None:
    """An average keeps a copy of the transformed model, which is one, too."""
    found = []
    for model in (qwen3(2), transformed()):
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for step in range(3):
            optimizer.zero_grad()
            model(**tokens(seed=step)).loss.backward()
            optimizer.step()
            ema.update_parameters(model)
        found.append((weights(ema.module), train_step(ema.module, ema.module, tokens())))
    assert_close(found[1][0], found[0][0], rtol=1e-4, atol=1e-5)
    assert_close(found[1][1], found[0][1], rtol=1e-3, atol=1e-5)


def functional(run: nn.Module, model: nn.Module) -> Step:
    """A step with other weights than the model's, whose gradients go to these."""
    given = {n: (p.detach() * 1.1).requires_grad_() for n, p in model.named_parameters()}
    loss = torch.func.functional_call(run, given, (), tokens()).loss
    loss.backward()
    assert all(p.grad is None for p in model.parameters())
    return Step(loss.detach(), {n: p.grad for n, p in given.items()})


def test_functional_calls() -> None:
    plain, t = qwen3(2), transformed()
    assert_close(functional(t, t), functional(plain, plain), atol=1e-7)
    assert recomputed(t) == {"model.layers.0"} and fxckpt.stats(t).offloads == 1
    assert_close(train_step(t, t, tokens()), train_step(plain, plain, tokens()), atol=1e-7)


def test_swapped_tensors() -> None:
    plain, t = qwen3(2), transformed()
    want = [train_step(plain, plain, tokens())]
    got = [train_step(t, t, tokens())]
    for model, found in ((plain, want), (t, got)):
        model.zero_grad(set_to_none=True)
        for p in model.parameters():
            torch.utils.swap_tensors(p, nn.Parameter(p.detach() * 0.9))
        found.append(train_step(model, model, tokens()))
    for g, w in zip(got, want, strict=True):
        assert_close(g, w, atol=1e-7)


@pytest.mark.parametrize("compiler", COMPILERS)
def test_tied_weights(compiler: str) -> None:
    plain, model = qwen3(2, tie_word_embeddings=True), qwen3(2, tie_word_embeddings=True)
    t = fxckpt.transform(model, every_n=2, offload=True)
    assert_close(train_step(COMPILERS[compiler](t), model, tokens()), train_step(plain, plain, tokens()))
    assert len(list(t.parameters())) == len(list(plain.parameters()))


def test_hooks_of_parameters_and_of_modules() -> None:
    """Gradients are changed, and seen once for each step."""
    found = []
    for model in (qwen3(2), transformed()):
        seen: list[str] = []
        for name, p in model.named_parameters():
            p.register_hook(lambda g: g * 2)
            p.register_post_accumulate_grad_hook(lambda _, name=name, seen=seen: seen.append(name))
        model.register_full_backward_hook(lambda *_, seen=seen: seen.append("whole"))
        found.append((train_step(model, model, tokens()), sorted(seen)))
    assert_close(found[1][0], found[0][0], atol=1e-7)
    assert found[1][1] == found[0][1]


def test_an_optimizer_in_the_backward() -> None:
    """Each parameter's own optimiser steps as soon as its gradient is there, and the gradient goes."""
    found = []
    for model in (qwen3(2), transformed()):
        own = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

        def step(p: torch.Tensor, own: Any = own) -> None:
            own[p].step()
            own[p].zero_grad(set_to_none=True)

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(step)
        for seed in range(2):
            model(**tokens(seed=seed)).loss.backward()
        assert all(p.grad is None for p in model.parameters()) and not any(g is not None for g in grads(model).values())
        found.append(weights(model))
    assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)
