"""What the forward keeps, the peak of a step, and what dropped forwards leave behind."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxckpt
from tests.helpers import DEVICE, Memory, assert_close, grads, measured
from tests.situations.models import Batch, Residual, sigmoid_sin, stack

TIGHT = {"rtol": 1e-4, "atol": 1e-6}


# ---- shared blocks, traversed twice ------------------------------------------------------------------------------


class ContextBlock(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 8 * d), nn.Linear(8 * d, d)
        self.cross = nn.Linear(d, d)

    def forward(self, x: torch.Tensor, context: torch.Tensor | None = None) -> torch.Tensor:
        if context is not None:
            x = x + torch.tanh(self.cross(context))
        return x + self.down(F.gelu(self.up(self.norm(x))))


class TwoPass(nn.Module):
    """The same blocks, once without and once with a context."""

    def __init__(self, d: int = 64, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ContextBlock(d) for _ in range(depth))
        self.eager_checkpoint = False

    def run(self, x: torch.Tensor, context: torch.Tensor | None) -> torch.Tensor:
        for b in self.blocks:
            if self.eager_checkpoint:
                x = torch.utils.checkpoint.checkpoint(b, x, context, use_reentrant=False)
            else:
                x = b(x, context)
        return x

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        return self.run(x, None).square().mean() + self.run(x.flip(0), context).square().mean()


def two_pass() -> tuple[TwoPass, Batch]:
    torch.manual_seed(0)
    model = TwoPass().to(DEVICE)
    return model, {"x": torch.randn(1024, 64, device=DEVICE), "context": torch.randn(1024, 64, device=DEVICE)}


def warm_peak(model: nn.Module, run: Callable[..., Any], batch: Batch) -> int:
    """Peak of a step whose gradients exist already."""
    model.zero_grad(set_to_none=False)
    return measured(lambda: run(**batch).backward())[1].peak


def test_shared_blocks_traversed_twice_peak_near_eager_checkpointing() -> None:
    """Source: pytorch/pytorch#193193.

    Rule: with shared blocks traversed twice in one step, the compiled backward peaks no higher than 1.3x eager
    per-block checkpointing, and gradients match eager.
    """
    model, batch = two_pass()
    model(**batch).backward()
    want = grads(model)
    plain_peak = warm_peak(model, model, batch)
    model.eager_checkpoint = True
    eager_peak = warm_peak(model, model, batch)
    assert_close(grads(model), want)
    assert eager_peak < 0.5 * plain_peak

    model, batch = two_pass()
    step = torch.compile(fxckpt.transform(model, every_n=1, offload=False, layers=[ContextBlock]))
    step(**batch).backward()
    assert_close(grads(model), want, rtol=1e-3, atol=1e-5)
    peak = warm_peak(model, step, batch)
    assert peak <= 1.3 * eager_peak, (peak, eager_peak)


# ---- debugging backends ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_debug_backend_does_not_undo_checkpointing(backend: str) -> None:
    """Source: pytorch/pytorch#160773.

    Rule: whatever the compile backend, what the forward keeps stays near eager checkpointing (at most 1.5x) instead of
    growing back to the plain amount, or the compile stops with a clear error; never silently plain.
    """

    def make() -> tuple[nn.Module, Batch]:
        return stack(lambda: Residual(32, wide=8, act=sigmoid_sin), shape=(2048, 32))

    model, batch = make()
    loss, plain = measured(lambda: model(**batch))
    loss.backward()
    want = grads(model)
    model.eager_checkpoint = True
    _, kept = measured(lambda: model(**batch))
    assert kept.held < 0.4 * plain.held

    model, batch = make()
    step = torch.compile(fxckpt.transform(model, every_n=1, offload=False, layers=[Residual]), backend=backend)
    try:
        step(**batch).backward()
    except fxckpt.FxckptError:
        return
    assert_close(grads(model), want, **TIGHT)
    model.zero_grad(set_to_none=True)
    loss, memory = measured(lambda: step(**batch))
    assert memory.held <= 1.5 * kept.held, (memory, kept)
    loss.backward()
    assert_close(grads(model), want, **TIGHT)


# ---- forwards without a backward ---------------------------------------------------------------------------------


class TwoHeads(nn.Module):
    """A trunk whose output is one loss, and a side branch on top of it whose output is another."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual(32) for _ in range(3))
        self.side = nn.ModuleList(Residual(32) for _ in range(2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for b in self.blocks:
            x = b(x)
        y = x
        for b in self.side:
            y = b(y)
        return x.square().mean(), y.square().mean()


def test_dropped_forwards_leave_nothing() -> None:
    """Source: huggingface/trl#4280, #5737, #5700, meta-pytorch/torchtune#2709, InternLM/xtuner#2088.

    Rule: forwards whose backward never runs, or runs for one of two heads only, keep no memory once dropped, and the
    following normal step is right.
    """

    def make() -> tuple[nn.Module, Batch]:
        torch.manual_seed(0)
        return TwoHeads().to(DEVICE), {"x": torch.randn(512, 32, device=DEVICE)}

    def messy(model: nn.Module, run: Callable[..., Any], batch: Batch, rounds: int) -> None:
        for _ in range(rounds):
            run(**batch)  # never differentiated
            main, side = run(**batch)
            main.backward()  # the side branch's saved tensors are never asked for
            del main, side
        model.zero_grad(set_to_none=True)
        gc.collect()

    def final(model: nn.Module, run: Callable[..., Any], batch: Batch) -> dict[str, torch.Tensor | None]:
        main, side = run(**batch)
        (main + side).backward()
        return grads(model)

    model, batch = make()
    messy(model, model, batch, 2)
    want = final(model, model, batch)

    model, batch = make()
    t = fxckpt.transform(model, every_n=1, offload=True, layers=[Residual])
    messy(model, t, batch, 2)
    _, memory = measured(lambda: messy(model, t, batch, 5))
    one_boundary = 512 * 32 * 4
    assert memory.held <= one_boundary, f"{memory.held} bytes still held after five dropped forwards"
    assert_close(final(model, t, batch), want, **TIGHT)


# ---- the interval ------------------------------------------------------------------------------------------------


def test_smaller_interval_keeps_less() -> None:
    """Source: pytorch/pytorch#197838, #126320.

    Rule: what the forward keeps and the step's peak never grow when every_n gets smaller, and the recompute peak stays
    below the plain model's.
    """

    def make() -> tuple[nn.Module, Batch]:
        return stack(lambda: Residual(32, wide=8), n=8, shape=(1024, 32))

    def measure(model: nn.Module, run: Callable[..., Any], batch: Batch) -> Memory:
        run(**batch).backward()
        model.zero_grad(set_to_none=False)
        loss, forward = measured(lambda: run(**batch))
        del loss
        return Memory(forward.held, measured(lambda: run(**batch).backward())[1].peak)

    model, batch = make()
    plain = measure(model, model, batch)
    seen = []
    for every_n in (1, 2, 4, 8):
        model, batch = make()
        t = fxckpt.transform(model, every_n=every_n, offload=False, layers=[Residual])
        seen.append(measure(model, t, batch))
    slack = 1024 * 32 * 4
    for a, b in zip(seen, [*seen[1:], plain], strict=True):
        assert a.held <= b.held + slack and a.peak <= b.peak + slack, (seen, plain)
    assert seen[0].held < 0.3 * plain.held and seen[0].peak < 0.5 * plain.peak, (seen, plain)
