"""Hooks of modules, of parameters and of saved tensors, set by the user."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import fxckpt
from tests.helpers import DEVICE, assert_close, assert_same, grads, train_step
from tests.situations.models import Residual, Stack, Tanh, TwiceUsed, stack

TIGHT = {"rtol": 1e-4, "atol": 1e-6}


def test_gradient_hook_of_a_shared_block_fires_once() -> None:
    """Source: pytorch/pytorch#81296, microsoft/FocalNet#4, huggingface/accelerate#2017.

    Rule: with one block used twice in a step, the accumulated-gradient hook of each parameter fires once per backward,
    and gradients match eager.
    """

    def make() -> tuple[TwiceUsed, torch.Tensor, Counter[str]]:
        torch.manual_seed(0)
        model, calls = TwiceUsed().to(DEVICE), Counter()
        for name, p in model.named_parameters():
            p.register_post_accumulate_grad_hook(lambda p, name=name: calls.update([name]))
        return model, torch.randn(7, 16, device=DEVICE), calls

    plain, x, calls = make()
    plain(x=x).backward()
    assert len(calls) == 4 and set(calls.values()) == {1}
    model, x, calls = make()
    fxckpt.transform(model, every_n=1, offload=True, layers=[Tanh])(x=x).backward()
    assert_close(grads(model), grads(plain), **TIGHT)
    assert len(calls) == 4 and set(calls.values()) == {1}, calls


def hook_up(model: Stack) -> list[int]:
    """Forward hooks on every block that scale its output, a pre-hook inside one; returns the blocks hooks have seen."""
    calls: list[int] = []

    def scale(i: int, out: torch.Tensor) -> torch.Tensor:
        calls.append(i)
        return out * 1.25

    for i, b in enumerate(model.blocks):
        b.register_forward_hook(lambda m, args, out, i=i: scale(i, out))
    model.blocks[2].a.register_forward_pre_hook(lambda m, args: (args[0] * 0.5,))
    return calls


@pytest.mark.parametrize("every_n", [1, 2])
def test_module_hooks_run_once(every_n: int) -> None:
    """Source: pytorch/pytorch#134310, #117758, #159359.

    Rule: hooks registered before the transform see each layer once per step and their changes to the output count; or
    the transform refuses the model with a clear error.
    """
    unhooked, batch = stack()
    unhooked(**batch).backward()
    plain, batch = stack()
    calls = hook_up(plain)
    plain(**batch).backward()
    want = grads(plain)
    assert calls == [0, 1, 2, 3]
    assert any(not torch.allclose(want[k], v) for k, v in grads(unhooked).items())

    model, batch = stack()
    calls = hook_up(model)
    try:
        t = fxckpt.transform(model, every_n=every_n, offload=True, layers=[Residual])
        t(**batch).backward()
        model.zero_grad(set_to_none=True)
        calls.clear()
        t(**batch).backward()
    except fxckpt.FxckptError:
        return
    assert_close(grads(model), want, **TIGHT)
    assert sorted(calls) == [0, 1, 2, 3], f"each hook must run once per step: {calls}"


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_inside_the_callers_save_on_cpu(backend: str | None) -> None:
    """Source: pytorch/pytorch#113263, #116221, #130972.

    Rule: inside the caller's save_on_cpu, gradients equal eager.
    """
    plain, batch = stack()
    plain(**batch).backward()
    model, batch = stack()
    t = fxckpt.transform(model, every_n=2, offload=True, layers=[Residual])
    step = torch.compile(t, backend=backend) if backend else t
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        with torch.autograd.graph.save_on_cpu():
            loss = step(**batch)
        loss.backward()
        assert_close(grads(model), grads(plain), **TIGHT)


def test_unpack_runs_only_in_backward() -> None:
    """Source: pytorch/pytorch#113263, #116221, #130972.

    Rule: inside counting pack and unpack hooks, gradients equal eager and unpack runs only in backward.
    """
    plain, batch = stack()
    plain(**batch).backward()
    model, batch = stack()
    t = fxckpt.transform(model, every_n=2, offload=True, layers=[Residual])
    t(**batch).backward()
    model.zero_grad(set_to_none=True)
    phase, unpacked = "forward", set()

    def unpack(x: torch.Tensor) -> torch.Tensor:
        unpacked.add(phase)
        return x

    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), unpack):
        loss = t(**batch)
    phase = "backward"
    loss.backward()
    assert_close(grads(model), grads(plain), **TIGHT)
    assert unpacked <= {"backward"}


def test_hooks_that_come_and_go_after_the_capture() -> None:
    """Rule: `t(**batch)` runs a hook from the step after it was registered to the one before it is removed."""
    plain, batch = stack()
    model, _ = stack()
    found = []
    for m, run in ((plain, plain), (model, fxckpt.transform(model, layers=[Residual], offload=True))):
        steps = [train_step(run, m, batch)]
        handles = [
            m.blocks[1].register_forward_hook(lambda _, args, out: out * 2),
            m.blocks[2].a.register_forward_pre_hook(lambda _, args: (args[0] + 1,)),
        ]
        steps.append(train_step(run, m, batch))
        for handle in handles:
            handle.remove()
        steps.append(train_step(run, m, batch))
        found.append(steps)
    for got, want in zip(found[1], found[0], strict=True):
        assert_same(got, want)
    assert not torch.equal(found[0][0].loss, found[0][1].loss)
