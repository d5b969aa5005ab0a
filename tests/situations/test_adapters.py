"""Frozen bases with adapters, written by hand and by PEFT."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxckpt
from tests.helpers import assert_close, grads, train_step
from tests.situations.models import qwen3, qwen3_lora, tokens

TIGHT = {"rtol": 1e-4, "atol": 1e-6}


def test_lora_dropout_same_seed() -> None:
    """Source: huggingface/peft#3020. Rule: with LoRA dropout, plain execution with the same seed equals eager."""
    plain = qwen3_lora(p=0.1, layers=2)
    want = train_step(plain, plain, tokens(), seed=11)
    model = qwen3_lora(p=0.1, layers=2)
    got = train_step(fxckpt.transform(model, every_n=1, offload=True), model, tokens(), seed=11)
    torch.testing.assert_close(got.loss, want.loss, rtol=1e-5, atol=1e-6)
    assert_close(got, want, **TIGHT)


def test_lora_dropout_compiled_runs() -> None:
    """Source: huggingface/peft#3020. Rule: compiled, it trains without error and gives every adapter a gradient."""
    plain = qwen3_lora(p=0.1, layers=1)
    want = train_step(plain, plain, tokens())
    model = qwen3_lora(p=0.1, layers=1)
    got = train_step(torch.compile(fxckpt.transform(model, every_n=1, offload=True)), model, tokens())
    for name, g in got.grads.items():
        if want.grads[name] is None:
            assert g is None, name
        else:
            assert g is not None and torch.isfinite(g).all() and g.any(), name


def test_lora_compiled_without_dropout_matches() -> None:
    """Source: huggingface/peft#3020. Rule: dropout 0 compiled equals plain."""
    plain = qwen3_lora(p=0.0, layers=1)
    want = train_step(plain, plain, tokens())
    model = qwen3_lora(p=0.0, layers=1)
    got = train_step(torch.compile(fxckpt.transform(model, every_n=1, offload=True)), model, tokens())
    torch.testing.assert_close(got.loss, want.loss, rtol=1e-4, atol=1e-5)
    assert_close(got, want, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("every_n", [1, 2])
@pytest.mark.parametrize("hook", [False, True])
def test_adapters_over_a_frozen_embedding(every_n: int, hook: bool) -> None:
    """Source: huggingface/transformers#42489, huggingface/peft#137, open-unlearning#178, Megatron-Bridge#5586.

    Rule: without enable_input_require_grads, every adapter in every layer gets eager's gradient and frozen weights get
    none; with it, the numbers are the same.
    """
    plain = qwen3_lora(p=0.0)
    plain(**tokens()).loss.backward()
    want = grads(plain)
    assert sum(g is not None for g in want.values()) == 4 * 2 * 2
    model = qwen3_lora(p=0.0)
    if hook:
        model.enable_input_require_grads()
    fxckpt.transform(model, every_n=every_n, offload=True)(**tokens()).loss.backward()
    assert_close(grads(model), want, **TIGHT)  # None in the same places


def test_real_peft() -> None:
    """Source: huggingface/peft#137. Rule: a transformed PEFT model gives the plain PEFT model's gradients."""
    peft = pytest.importorskip("peft")

    def build() -> nn.Module:
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, init_lora_weights=False)
        return peft.get_peft_model(qwen3(), config)

    plain = build()
    plain(**tokens()).loss.backward()
    model = build()
    fxckpt.transform(model, every_n=1, offload=True)(**tokens()).loss.backward()
    assert_close(grads(model), grads(plain), **TIGHT)
