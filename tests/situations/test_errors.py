"""What cannot be done is said: no layers, double backward, operators that write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxckpt
from tests.helpers import DEVICE, Tensors, assert_close, grads
from tests.situations.models import Residual, Tanh, stack

TIGHT = {"rtol": 1e-4, "atol": 1e-6}


class Unused(nn.Module):
    pass


@pytest.mark.parametrize("layers", [None, ["blocks.9"], ["block"], [Unused]])
def test_nothing_to_checkpoint_is_said(layers: list[Any] | None) -> None:
    """Source: deepchem/deepchem#4796, huggingface/transformers#11448, hpcaitech/ColossalAI#5142.

    Rule: no matching layer, an unknown path and an unused class each raise a subclass of FxckptError that names what
    was looked for.
    """
    model, batch = stack()
    named = {} if layers is None else {"layers": layers}
    with pytest.raises(fxckpt.FxckptError) as info:
        fxckpt.transform(model, every_n=1, offload=True, **named)(**batch)
    for looked_for in layers or ():
        assert (looked_for if isinstance(looked_for, str) else looked_for.__name__) in str(info.value)
    if layers is None:
        assert "Residual" in str(info.value), "the error names the candidates in the model"


@pytest.mark.parametrize("layers", [["blocks.1", "blocks.3"], [Residual]])
def test_paths_and_classes_select(layers: list[Any]) -> None:
    """Source: deepchem/deepchem#4796. Rule: paths and classes both select layers."""
    plain, batch = stack()
    plain(**batch).backward()
    model, batch = stack()
    fxckpt.transform(model, every_n=1, offload=True, layers=layers)(**batch).backward()
    assert_close(grads(model), grads(plain), **TIGHT)


# ---- double backward ---------------------------------------------------------------------------------------------


def test_double_backward_is_right_or_refused() -> None:
    """Source: pytorch/pytorch#102223, #90105.

    Rule: with a gradient penalty the transformed model gives eager's second-order gradients or stops with a clear
    error; it never drops the penalty silently.
    """

    def make() -> tuple[nn.Module, torch.Tensor]:
        model, batch = stack(lambda: Tanh(6), n=3, shape=(4, 6))
        return model, batch["x"].requires_grad_()

    def penalised(model: nn.Module, run: Callable[..., Any], x: torch.Tensor) -> Tensors:
        loss = run(x=x)
        (gx,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + 10 * gx.square().sum()).backward()
        return grads(model)

    plain, x = make()
    want = penalised(plain, plain, x)
    first_order, x = make()
    first_order(x=x).backward()
    assert any((want[k] - g).abs().max() > 1e-3 for k, g in grads(first_order).items()), "the penalty must matter"

    model, x = make()
    t = fxckpt.transform(model, every_n=1, offload=True, layers=[Tanh])
    try:
        got = penalised(model, t, x)
    except fxckpt.FxckptError:
        return
    assert_close(got, want, **TIGHT)


# ---- operators that write ----------------------------------------------------------------------------------------


@torch.library.custom_op("fxckpt_tests::add_one_", mutates_args=("t",))
def add_one_(t: torch.Tensor) -> None:
    t.add_(1.0)


class PlusOne(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        torch.ops.fxckpt_tests.add_one_(y)
        return y

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g


class Writing(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.w = nn.Linear(d, d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return PlusOne.apply(self.w(x)) ** 2 * 0.1


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_mutating_custom_operator_is_right_or_refused(backend: str | None) -> None:
    """Source: pytorch/torchtitan#4688.

    Rule: a custom operator that mutates its argument and returns nothing, inside a checkpointed layer, gives eager's
    gradients or a clear error.
    """

    def make() -> tuple[nn.Module, dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        return nn.Sequential(Writing(4), Writing(4)).to(DEVICE), {"input": torch.randn(3, 4, device=DEVICE)}

    plain, batch = make()
    plain(**batch).sum().backward()
    model, batch = make()
    try:
        t = fxckpt.transform(model, every_n=1, offload=True, layers=[Writing])
        (torch.compile(t, backend=backend) if backend else t)(**batch).sum().backward()
    except fxckpt.FxckptError:
        return
    assert_close(grads(model), grads(plain), **TIGHT)
