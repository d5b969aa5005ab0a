"""A rewrite that was asked for is done or refused, in the corners where it could get lost unseen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxckpt


class Block(fxckpt.GradientCheckpointingLayer):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x).tanh()


class Disabled(Block):
    @torch.compiler.disable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x).tanh()


def hooked() -> Block:
    block = Block()
    block.lin.register_full_backward_hook(lambda module, grad_input, grad_output: None)
    return block


def broken_helper(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    torch._dynamo.graph_break()
    return torch.tanh(x @ weight)


class WithHelper(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return broken_helper(x, self.lin.weight).sin()


@pytest.mark.parametrize("other", [Disabled, hooked])
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_a_layer_outside_the_graphs_is_told(other: Callable[[], nn.Module], backend: str | None) -> None:
    """A captured layer beside it does not hide it."""
    t = fxckpt.transform(nn.Sequential(Block(), other(), Block()))
    run = t if backend is None else torch.compile(t, backend=backend)
    with pytest.raises(fxckpt.CaptureError, match="outside its graphs"):
        run(torch.randn(2, 8))


class Switch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.eager = Block(), Block(), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        run = torch.compiler.disable(self.b) if self.eager else self.b
        return run(self.a(x))


def test_a_later_call_that_takes_another_path_is_told() -> None:
    model = Switch()
    t = fxckpt.transform(model)
    t(torch.randn(2, 8)).sum().backward()
    model.eager = True
    with pytest.raises(fxckpt.CaptureError, match="outside its graphs"):
        t(torch.randn(2, 8))


def test_functions_called_by_a_layer_after_a_graph_break_are_in_its_region() -> None:
    t = fxckpt.transform(nn.Sequential(WithHelper(), Block()), verify=True)
    t(torch.randn(2, 8)).sum().backward()
    assert all(record.regions for record in fxckpt.graphs(t))


def test_gradients_that_start_inside_a_frozen_model_are_rewritten() -> None:
    """As `enable_input_require_grads` does on a frozen base."""
    model = nn.Sequential(nn.Embedding(10, 8), Block()).requires_grad_(False)
    model[0].register_forward_hook(lambda module, args, out: out.requires_grad_())
    t = fxckpt.transform(model)
    assert t(torch.tensor([1])).requires_grad and fxckpt.graphs(t)[0].regions


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.scale = Block(), nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> Any:
        return self.block(x), (x + 1) * self.scale


class Head(Encoder):
    def forward(self, x: torch.Tensor) -> Any:
        return x.view(-1), self.block(x), x.detach() * self.scale


def test_absent_gradients_of_one_model_do_not_touch_another() -> None:
    """An output that is a view of the input leads to the upstream model's node, which is not this call's."""
    encoder, head = Encoder(), Head()
    hidden, _ = fxckpt.transform(encoder)(torch.randn(4, 8))
    fxckpt.transform(head)(hidden)[1].sum().backward()
    assert encoder.block.lin.weight.grad is not None and head.block.lin.weight.grad is not None
    assert encoder.scale.grad is None and head.scale.grad is None


class PassThrough(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> Any:
        return self.block(x), z


def test_a_tensor_that_passes_through_gets_no_hook() -> None:
    w = torch.randn(8, requires_grad=True)
    z = w * 2
    fxckpt.transform(PassThrough())(torch.randn(2, 8), z)
    (first,) = torch.autograd.grad(z.pow(2).sum(), w, create_graph=True)
    first.sum().backward()


@torch.library.custom_op("fxckpt_tests::drop_half", mutates_args=())
def drop_half(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    mask = torch.bernoulli(torch.full_like(x, 0.5))
    return x * mask, mask


drop_half.register_fake(lambda x: (torch.empty_like(x), torch.empty_like(x)))
drop_half.register_autograd(
    lambda ctx, grad, _: grad * ctx.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output[1]),
)


class Dropping(fxckpt.GradientCheckpointingLayer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.fxckpt_tests.drop_half(x * 2)[0]


@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
def test_custom_operators_run_again_under_their_random_state(backend: str | None) -> None:
    """Nobody says of a custom operator whether it draws random numbers."""
    x = torch.ones(16, 8, requires_grad=True)
    t = fxckpt.transform(nn.Sequential(Dropping()), verify=True)
    y = (t if backend is None else torch.compile(t, backend=backend))(x)
    y.sum().backward()
    assert x.grad is not None and torch.equal(y != 0, x.grad != 0)


class Counting(Block):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * (1 + self.calls)


def test_a_step_counter_on_a_layer_does_not_end_plain_training() -> None:
    model = nn.Sequential(Counting(), Counting())
    t = fxckpt.transform(model)
    for _ in range(70):
        t(torch.randn(2, 8)).sum().backward()
    assert model[0].calls == 70 and len(fxckpt.graphs(t)) <= 3


outsider = nn.Linear(8, 8).requires_grad_(False)


def helper_of_an_outsider(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    torch._dynamo.graph_break()
    return module(x).sin()


class WithOutsider(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return helper_of_an_outsider(outsider, super().forward(x))


def test_frames_of_modules_outside_the_model_are_not_guarded_by_its_layers() -> None:
    t = fxckpt.transform(nn.Sequential(WithOutsider(), WithOutsider()), every_n=2)
    for _ in range(3):
        t(torch.randn(2, 8)).sum().backward()
    assert len(fxckpt.graphs(t)) <= 8
