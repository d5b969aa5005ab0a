"""Layers of less usual operators, recomputed and offloaded, give the numbers of eager; and a plan is made of them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.scan import scan

import fxckpt
from tests.helpers import assert_close, assert_same, train_step
from tests.situations.models import Batch, stack

D = 32
SEQUENCE, IMAGE = (2, 16, D), (2, D, 8, 8)


class Layer(nn.Module):
    """A residual layer around `mix`; its input is of `shape`."""

    shape: tuple[int, ...] = SEQUENCE

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mix(x)


# ---- operators that call graphs ---------------------------------------------------------------------------------


class Branches(Layer):
    def mix(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = torch.cond(x.sum() > 0, lambda x: self.a(x).tanh(), lambda x: self.b(x).sin(), (x,))
        return made


class Recurrence(Layer):
    def mix(self, x: torch.Tensor) -> torch.Tensor:
        def step(state: torch.Tensor, now: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            state = torch.tanh(state + now)
            return state, state.clone()

        made: torch.Tensor = scan(step, torch.zeros_like(x[:, 0]), self.a(x), dim=1)[1]
        return made


class ProductsSoFar(Layer):
    def mix(self, x: torch.Tensor) -> torch.Tensor:
        rates = torch.sigmoid(self.a(x))
        made: torch.Tensor = associative_scan(lambda p, q: p * q, rates, dim=1, combine_mode="generic")
        return made


class OwnCheckpoint(Layer):
    def mix(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = torch.utils.checkpoint.checkpoint(
            lambda x: self.b(self.a(x).tanh()), x, use_reentrant=False
        )
        return made


class DropPath(Layer):
    """A random operator that is no dropout: its random state is kept by an operator that calls a graph."""

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.a(x), 0.1) * x.new_empty(len(x), 1, 1).bernoulli_(0.5)


class OwnGradient(Layer):
    def mix(self, x: torch.Tensor) -> torch.Tensor:
        grad = torch.func.grad(lambda w: (x @ w).square().mean())(self.a.weight)
        return x @ (self.a.weight - 0.1 * grad)


class Mapped(Layer):
    def mix(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = torch.vmap(lambda row: self.a(row).tanh())(x)
        return made


# ---- values and weights of other kinds --------------------------------------------------------------------------


class ComplexRotation(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("turns", torch.polar(torch.ones(16, D // 2), torch.rand(16, D // 2)))

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(torch.view_as_complex(self.a(x).unflatten(-1, (-1, 2))) * self.turns).flatten(-2)


class Fourier(Layer):
    def mix(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.irfft(torch.fft.rfft(self.a(x), dim=1) * 0.5, n=x.shape[1], dim=1)


class PowerIteration(Layer):
    """Its weight's buffers change in the forward, and the weight is made of them."""

    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.spectral_norm(self.a)

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x).tanh()


class OldWeightNorm(Layer):
    """Its weight is an attribute that a hook computes: no parameter, and not to be copied."""

    def __init__(self) -> None:
        super().__init__()
        nn.utils.weight_norm(self.a)

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x).tanh()


class FrozenIntegers(Layer):
    """A quantised base and an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(-127, 127, (D, D), dtype=torch.int8))
        self.register_buffer("scale", torch.rand(D, 1) / 127)

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.float() * self.scale) + self.b(self.a(x))


@torch.library.custom_op("fxckpt_tests::swish", mutates_args=())
def swish(x: torch.Tensor, slope: float) -> torch.Tensor:
    return x * torch.sigmoid(slope * x)


def swish_backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
    gate = torch.sigmoid(ctx.slope * x)  # type: ignore[attr-defined]
    return grad * (gate + x * ctx.slope * gate * (1 - gate)), None  # type: ignore[attr-defined]


def swish_setup(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[torch.Tensor, float], output: object) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.slope = inputs[1]  # type: ignore[attr-defined]


swish.register_fake(lambda x, slope: torch.empty_like(x))
swish.register_autograd(swish_backward, setup_context=swish_setup)


class CustomOperator(Layer):
    def mix(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = torch.ops.fxckpt_tests.swish(self.a(x), 1.7)
        return made


# ---- images -----------------------------------------------------------------------------------------------------


class ChannelsLast(Layer):
    """As in ConvNeXt: a convolution by channel, and linear layers over a permuted view."""

    shape = IMAGE

    def __init__(self) -> None:
        super().__init__()
        self.by_channel = nn.Conv2d(D, D, 7, padding=3, groups=D)

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        y = self.by_channel(x.to(memory_format=torch.channels_last)).permute(0, 2, 3, 1)
        return self.b(F.gelu(self.a(y))).permute(0, 3, 1, 2)


class Samples(Layer):
    """As in deformable attention: where it reads is learnt."""

    shape = IMAGE

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        where = torch.tanh(self.a(x.permute(0, 2, 3, 1)))[..., :2]
        return F.grid_sample(x, where, align_corners=False)


class PoolAndBack(Layer):
    shape = IMAGE

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        pooled, where = F.max_pool2d(self.a(x.movedim(1, -1)).movedim(-1, 1), 2, return_indices=True)
        return F.max_unpool2d(pooled, where, 2) + F.interpolate(pooled, size=(8, 8), mode="bilinear")


# ---- routing: sizes that data tell ------------------------------------------------------------------------------


class Experts(Layer):
    """Each expert sees the tokens routed to it; how many there are, data tell."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(D, 4), nn.ModuleList(nn.Linear(D, D) for _ in range(4))

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.gate(tokens).softmax(-1).topk(2, -1)
        made = torch.zeros_like(tokens)
        for i, expert in enumerate(self.experts):
            row, column = torch.where(chosen == i)
            made = made.index_add(0, row, expert(tokens[row]) * weights[row, column, None])
        return made.view_as(x)


class GroupedExperts(Layer):
    """Tokens in the order of their experts, and one product over all groups."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.weights = nn.Linear(D, 4), nn.Parameter(torch.randn(4, D, D) * 0.1)

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        weight, chosen = self.gate(tokens).softmax(-1).max(-1)
        order = chosen.argsort()
        ends = F.one_hot(chosen, 4).sum(0).cumsum(0).int()
        made = F.grouped_mm(tokens[order].bfloat16(), self.weights.bfloat16(), offs=ends).float()
        return (torch.zeros_like(tokens).index_copy(0, order, made) * weight[:, None]).view_as(x)


# ---- the tests --------------------------------------------------------------------------------------------------


KINDS = Layer.__subclasses__()
PLANNED = [Branches, Recurrence, DropPath, OldWeightNorm, GroupedExperts]  # how much Experts hold, data tell
CALL_GRAPHS = [Branches, DropPath]


def built(kind: type[Layer]) -> tuple[nn.Module, Batch]:
    return stack(kind, n=3, shape=kind.shape)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_numbers_are_those_of_eager(kind: type[Layer]) -> None:
    model, batch = built(kind)
    want = train_step(model, model, batch)
    model, batch = built(kind)
    t = fxckpt.transform(model, layers=kind, every_n=1, offload=True, verify=True)
    got = train_step(t, model, batch)
    if kind is PoolAndBack:  # its gradients' order of summation is another in the graph, as under aot_eager
        assert_close(got, want)
    else:
        assert_same(got, want)
    (record,) = fxckpt.graphs(t)
    assert (len(record.regions), len(record.transfers)) == (3, 2)


@pytest.mark.parametrize("kind", CALL_GRAPHS, ids=lambda kind: kind.__name__)
def test_compiled_numbers_are_those_of_the_compiled_model(kind: type[Layer]) -> None:
    model, batch = built(kind)
    want = train_step(torch.compile(model), model, batch)
    torch._dynamo.reset()
    model, batch = built(kind)
    t = fxckpt.transform(model, layers=kind, every_n=1, offload=True, verify=True)
    assert_close(train_step(torch.compile(t), model, batch), want)


@pytest.mark.parametrize("kind", PLANNED, ids=lambda kind: kind.__name__)
def test_a_plan_says_what_the_step_moves(kind: type[Layer]) -> None:
    model, batch = built(kind)
    plan = fxckpt.plan(model, batch, layers=kind, every_n=1, offload=True)
    t = fxckpt.transform(model, layers=kind, every_n=1, offload=True)
    train_step(t, model, batch)
    assert plan.offloaded_bytes == fxckpt.explain(t).offloaded_bytes > 0
