"""accelerate: a transformed model is prepared, unwrapped, accumulated over, saved and loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxckpt
from tests.frameworks.test_trainer import rows, weights
from tests.helpers import Step, assert_close, assert_same, grads, recomputed, seed_all
from tests.situations.models import qwen3, tokens
from tests.zoo import build

accelerate = pytest.importorskip("accelerate")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # Trainer has set one up
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("compiled", [False, True])
def test_accelerate_with_bf16(compiled: bool) -> None:
    def step(transformed: bool) -> tuple[Step, nn.Module]:
        model, batch = build("llama")
        target = fxckpt.transform(model, every_n=2, offload=True) if transformed else model
        accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
        optimiser = torch.optim.SGD(target.parameters(), lr=0.1)
        prepared, optimiser = accelerator.prepare(target, optimiser)
        run = torch.compile(prepared, backend="aot_eager") if compiled else prepared
        seed_all()
        out = run(**batch)
        assert out.logits.dtype == torch.float32, "accelerate gives fp32 outputs back"
        accelerator.backward(out.loss)
        taken = grads(model)
        optimiser.step()
        unwrapped = accelerator.unwrap_model(prepared)
        assert isinstance(unwrapped, type(model))
        weights = {n: p.detach().clone() for n, p in model.named_parameters()}
        return Step(out.loss.detach(), taken, weights), target

    want, _ = step(False)
    got, t = step(True)
    assert_close(got, want, rtol=2e-2, atol=2e-3)
    assert recomputed(t) == {"model.layers.0", "model.layers.2"}
    assert any(n.meta["val"].dtype == torch.bfloat16 for n in fxckpt.graphs(t)[0].saved)


def accumulated(model: nn.Module, compiled: bool = False) -> list[float]:
    """Losses of two optimiser steps over four batches each."""
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(rows(16), batch_size=2)  # type: ignore[arg-type]
    run, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    run = torch.compile(run, backend="aot_eager") if compiled else run
    found = []
    for batch in loader:
        with accelerator.accumulate(run):
            loss = run(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(run.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
    assert accelerator.unwrap_model(run, keep_torch_compile=False) is model
    return found


@pytest.mark.parametrize("compiled", [False, True])
def test_accumulation_and_clipping(compiled: bool) -> None:
    plain, t = qwen3(2), fxckpt.transform(qwen3(2), every_n=2, offload=True)
    want, got = accumulated(plain), accumulated(t, compiled)
    assert len(got) == 8 and got == pytest.approx(want, rel=1e-5)
    assert_close(weights(t), weights(plain), rtol=1e-3, atol=1e-4)
    assert recomputed(t) == {"model.layers.0"}


def test_autocast_of_its_own() -> None:
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    t: Any = accelerator.prepare(fxckpt.transform(qwen3(2), every_n=2, offload=True))
    with accelerator.autocast():
        loss = t(**tokens()).loss
    accelerator.backward(loss)
    assert all(p.grad is not None for p in t.parameters()) and fxckpt.stats(t).offloads == 1


def test_a_kept_state_goes_on_exactly(tmp_path: Path) -> None:
    def made() -> tuple[Any, Any, Any]:
        accelerator = accelerate.Accelerator(cpu=True)
        t = fxckpt.transform(qwen3(2, attention_dropout=0.2), offload=True)
        return accelerator, *accelerator.prepare(t, torch.optim.AdamW(t.parameters(), lr=1e-2))

    def step(accelerator: Any, run: Any, optimizer: Any) -> None:
        accelerator.backward(run(**tokens()).loss)
        optimizer.step()
        optimizer.zero_grad()

    seed_all()
    first = made()
    step(*first)
    first[0].save_state(str(tmp_path))
    step(*first)
    second = made()
    second[0].load_state(str(tmp_path))
    step(*second)
    assert_same(weights(second[1]), weights(first[1]))
