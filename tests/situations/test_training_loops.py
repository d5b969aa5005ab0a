"""Loops other than one forward and one backward: evaluation between, caches, two forwards, counters, optimisers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxckpt
from tests.helpers import DEVICE, Tensors, assert_close, assert_same, buffers, grads, measured, seed_all
from tests.situations.models import Batch, Stack, qwen3, stack, tokens

TIGHT = {"rtol": 1e-4, "atol": 1e-6}


# ---- evaluation and training -------------------------------------------------------------------------------------


class NormBlock(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.RMSNorm(d), nn.Linear(d, 3 * d), nn.Linear(3 * d, d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(F.silu(self.a(self.norm(x))))


def test_evaluation_then_training_compiled() -> None:
    """Source: pytorch/pytorch#166926.

    Rule: a compiled transform that first ran evaluation and another batch size still gives eager's gradients in
    training, and evaluation between steps changes nothing.
    """

    def make() -> tuple[Stack, list[torch.Tensor]]:
        model, _ = stack(lambda: NormBlock(16), n=3)
        return model, [torch.randn(n, 16, device=DEVICE) for n in (6, 9, 6)]

    model, xs = make()
    wants = []
    for x in xs:
        with torch.no_grad():
            evaluated = model(x=x)
        model.zero_grad(set_to_none=True)
        model(x=x).backward()
        wants.append((evaluated, grads(model)))

    model, xs = make()
    t = fxckpt.transform(model, every_n=1, offload=True, layers=[NormBlock])
    step = torch.compile(t, backend="aot_eager")
    with torch.no_grad():
        step(x=xs[1])
    for x, (evaluated, want) in zip(xs, wants, strict=True):
        model.zero_grad(set_to_none=True)
        loss = step(x=x)
        with torch.no_grad():
            torch.testing.assert_close(step(x=x), evaluated, **TIGHT)
        loss.backward()
        assert_close(grads(model), want, **TIGHT)


class DropBlock(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(d, 8 * d), nn.Linear(8 * d, d), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(self.drop(torch.tanh(self.a(x))))


class Hidden(Stack):
    """Returns the hidden states instead of a loss."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.hidden(x)


def hidden() -> tuple[Hidden, torch.Tensor]:
    torch.manual_seed(0)
    model = Hidden([DropBlock(16) for _ in range(4)]).to(DEVICE).train()
    return model, torch.randn(256, 16, device=DEVICE)


def test_no_grad_and_inference_mode_change_nothing() -> None:
    """Source: huggingface/trl#4636, huggingface/diffusers#10107, meta-pytorch/tnt#912.

    Rule: under no_grad and inference_mode the outputs equal plain, no warning is raised, dropout follows eval(), and
    training afterwards still matches.
    """

    def cycle(model: nn.Module, run: Callable[..., Any], x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Tensors]:
        model.eval()
        with torch.no_grad():
            a = run(x=x)
        with torch.inference_mode():
            b = run(x=x)
        model.train()
        seed_all(4)
        run(x=x).square().mean().backward()
        return a, b.clone(), grads(model)

    model, x = hidden()
    want_a, want_b, want = cycle(model, model, x)
    assert torch.equal(want_a, want_b)
    model, x = hidden()
    t = fxckpt.transform(model, every_n=2, offload=True, layers=[DropBlock])
    t(x=x).sum().backward()
    model.zero_grad(set_to_none=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        a, b, got = cycle(model, t, x)
    assert not a.requires_grad and a.grad_fn is None
    torch.testing.assert_close(a, want_a, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(b, want_a, rtol=1e-5, atol=1e-6)
    assert_close(got, want, **TIGHT)


def test_no_grad_keeps_nothing() -> None:
    """Source: huggingface/trl#4636. Rule: a forward under no_grad keeps its output and nothing else."""
    model, x = hidden()
    t = fxckpt.transform(model, every_n=1, offload=True, layers=[DropBlock])
    model.eval()
    with torch.no_grad():
        t(x=x)
        out, memory = measured(lambda: t(x=x))
    assert memory.held <= 2 * out.numel() * 4, memory


# ---- caches ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("explicit", [False, True])
def test_use_cache_left_on(explicit: bool) -> None:
    """Source: huggingface/transformers#28056, #30320, huggingface/trl#1798.

    Rule: with use_cache=True in the config, training works, loss and gradients equal plain eager, and any cache handed
    back holds each position once.
    """
    plain = qwen3(use_cache=True)
    want = plain(**tokens())
    want.loss.backward()
    assert want.past_key_values.get_seq_length() == 16

    model = qwen3(use_cache=True)
    t = fxckpt.transform(model, every_n=2, offload=True)
    extra = {"use_cache": True} if explicit else {}
    try:
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            out = t(**tokens(), **extra)
            out.loss.backward()
    except fxckpt.FxckptError:
        assert explicit, "the model's own default must not need a change by the user"
        return
    torch.testing.assert_close(out.loss, want.loss, rtol=1e-5, atol=1e-6)
    assert_close(grads(model), grads(plain), **TIGHT)
    cache = getattr(out, "past_key_values", None)
    assert cache is None or cache.get_seq_length() in (0, 16)


# ---- several forwards --------------------------------------------------------------------------------------------


def joint(run: Callable[..., Any], batches: list[Batch]) -> None:
    """One loss of two forwards, as in preference training."""
    a, b = run(**batches[0]).loss, run(**batches[1]).loss
    (-F.logsigmoid(b - a)).backward()


def crossed(run: Callable[..., Any], batches: list[Batch]) -> None:
    """Two forwards, then their backwards in the same order: the first saved is the first used."""
    a, b = run(**batches[0]).loss, run(**batches[1]).loss
    a.backward()
    b.backward()


def accumulated(run: Callable[..., Any], batches: list[Batch]) -> None:
    for b in batches:
        (run(**b).loss / len(batches)).backward()


@pytest.mark.parametrize("mode", [joint, crossed, accumulated])
def test_two_forwards_before_a_backward(mode: Callable[[Callable[..., Any], list[Batch]], None]) -> None:
    """Source: meta-pytorch/torchtune#2083, huggingface/trl#4236.

    Rule: two forwards before one backward, backward in another order, and gradient accumulation over three
    micro-batches all equal eager.
    """
    batches = [tokens(seed=s) for s in (1, 2, 3)]
    plain = qwen3()
    mode(plain, batches)
    model = qwen3()
    mode(fxckpt.transform(model, every_n=2, offload=True), batches)
    assert_close(grads(model), grads(plain), **TIGHT)


# ---- state that moves in the forward -----------------------------------------------------------------------------


class MoE(nn.Module):
    """Routes to two of the experts, and counts tokens and steps in buffers."""

    def __init__(self, d: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(d, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, d, 2 * d) / d**0.5)
        self.down = nn.Parameter(torch.randn(experts, 2 * d, d) / d**0.5)
        self.register_buffer("counts", torch.zeros(experts))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        probs = torch.softmax(self.router(x), -1)
        _, idx = probs.topk(2, -1)
        chosen = torch.zeros_like(probs).scatter(-1, idx, 1.0)
        with torch.no_grad():
            self.counts += chosen.sum(0)
            self.steps += 1
        aux = (chosen.mean(0) * probs.mean(0)).sum()
        y = torch.einsum("td,edh->teh", x, self.up).relu()
        y = torch.einsum("teh,ehd->ted", y, self.down)
        return x + ((probs * chosen).unsqueeze(-1) * y).sum(1), aux


class MoENet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MoE(8, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total: Any = 0.0
        for b in self.blocks:
            x, aux = b(x)
            total = total + aux
        return x.square().mean() + 0.01 * total


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_expert_counters_advance_once(backend: str | None) -> None:
    """Source: NVIDIA/Megatron-LM#1330, pytorch/torchtitan#4772.

    Rule: per-expert token counters kept as buffers advance once per step, and the auxiliary loss and gradients equal
    eager.
    """

    def make() -> tuple[MoENet, torch.Tensor]:
        torch.manual_seed(0)
        return MoENet().to(DEVICE).train(), torch.randn(20, 8, device=DEVICE)

    def two_steps(model: nn.Module, run: Callable[..., Any], x: torch.Tensor) -> tuple[torch.Tensor, Tensors, Tensors]:
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            loss = run(x=x)
            loss.backward()
        return loss.detach(), grads(model), buffers(model)

    model, x = make()
    want_loss, want, want_buffers = two_steps(model, model, x)
    assert want_buffers["blocks.0.counts"].sum() == 2 * 20 * 2 and want_buffers["blocks.0.steps"] == 2
    model, x = make()
    t = fxckpt.transform(model, every_n=1, offload=True, layers=[MoE])
    loss, got, got_buffers = two_steps(model, torch.compile(t, backend=backend) if backend else t, x)
    torch.testing.assert_close(loss, want_loss, **TIGHT)
    assert_close(got, want, **TIGHT)
    assert_same(got_buffers, want_buffers)


# ---- unused parameters -------------------------------------------------------------------------------------------


class SideBlock(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.used, self.unused, self.side = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + torch.tanh(self.used(x)), self.side(x)


class SideNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(SideBlock(6) for _ in range(4))
        self.spare = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for b in self.blocks:
            x, side = b(x)
        return x.square().mean(), side


@pytest.mark.parametrize("every_n", [1, 2])
def test_unused_parameters_stay_none(every_n: int) -> None:
    """Source: pytorch/pytorch#97030, #79171.

    Rule: parameters of an unused branch inside and outside checkpointed layers keep grad None, and one AdamW step with
    weight decay leaves them untouched.
    """

    def make() -> tuple[SideNet, torch.Tensor]:
        torch.manual_seed(0)
        return SideNet().to(DEVICE), torch.randn(4, 6, device=DEVICE)

    def weights(model: nn.Module) -> dict[str, torch.Tensor]:
        return {n: p.detach().clone() for n, p in model.named_parameters()}

    def one_update(model: nn.Module, run: Callable[..., Any], x: torch.Tensor) -> tuple[Tensors, Tensors]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        run(x=x)[0].backward()
        g = grads(model)
        optimizer.step()
        return g, weights(model)

    model, x = make()
    start = weights(model)
    want, want_end = one_update(model, model, x)
    for n, w in want.items():
        assert (w is None) == (".used." not in n) and torch.equal(start[n], want_end[n]) == (w is None)
    model, x = make()
    t = fxckpt.transform(model, every_n=every_n, offload=True, layers=[SideBlock])
    got, end = one_update(model, t, x)
    assert_close(got, want, **TIGHT)  # None in the same places
    assert_close(end, want_end, rtol=1e-3, atol=1e-5)
