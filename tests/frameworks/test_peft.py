"""PEFT around a transformed model and the other way round: LoRA, its dropout, adapters that change, frozen integers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxckpt
from tests.helpers import assert_close, recomputed, train_step
from tests.situations.models import qwen3, tokens

peft = pytest.importorskip("peft")


def lora(model: nn.Module, dropout: float = 0.0) -> Any:
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=dropout, init_lora_weights=False)
    return peft.get_peft_model(model, config)


def layer_names(*indices: int) -> set[str]:
    return {f"model.layers.{i}" for i in indices}


@pytest.mark.parametrize(("inputs", "compiled"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("outside", ["transform", "peft"])
def test_lora_both_ways_round(outside: str, inputs: bool, compiled: bool) -> None:
    plain = lora(qwen3(2))
    want = train_step(plain, plain, tokens())
    assert sum(g is not None for g in want.grads.values()) == 2 * 2 * 2
    if outside == "transform":
        model = lora(qwen3(2))
        t = whole = fxckpt.transform(model, every_n=2, offload=True)
    else:
        t = fxckpt.transform(qwen3(2), every_n=2, offload=True)
        whole = lora(t)
    if inputs:
        whole.enable_input_require_grads()
    got = train_step(torch.compile(whole, backend="aot_eager") if compiled else whole, whole, tokens())
    assert_close(got, want, rtol=1e-5, atol=1e-7)
    prefix = "base_model.model." if outside == "transform" else ""
    assert recomputed(t) == {prefix + name for name in layer_names(0)}
    assert any(g.transfers for g in fxckpt.graphs(t))


def test_lora_with_the_models_switch() -> None:
    """As Trainer does it: get_peft_model over t, then the switch on the outside."""
    plain = lora(qwen3(2))
    want = train_step(plain, plain, tokens())
    t = fxckpt.transform(qwen3(2))
    whole = lora(t)
    whole.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"every_n_layers": 2, "offload": True})
    assert_close(train_step(whole, whole, tokens()), want, rtol=1e-5, atol=1e-7)
    assert recomputed(t) == layer_names(0) and fxckpt.graphs(t)[0].transfers


@pytest.mark.parametrize("inside", [False, True])
def test_dropout_of_adapters(inside: bool) -> None:
    """The same numbers are dropped when a layer is computed again."""
    plain = lora(qwen3(2), dropout=0.3)
    want = train_step(plain, plain, tokens())
    whole = lora(fxckpt.transform(qwen3(2), offload=True), 0.3) if inside else lora(qwen3(2), 0.3)
    run = whole if inside else fxckpt.transform(whole, offload=True)
    assert_close(train_step(run, whole, tokens()), want, rtol=1e-5, atol=1e-7)
    assert not torch.equal(train_step(run, whole, tokens(), seed=8).loss, want.loss)


def test_adapters_are_changed_merged_and_saved(tmp_path: Path) -> None:
    t = fxckpt.transform(qwen3(2), every_n=2, offload=True)
    plain = qwen3(2)
    both = [lora(t), lora(plain)]
    for whole in both:
        torch.manual_seed(1)
        whole.add_adapter("other", peft.LoraConfig(r=2, target_modules=["o_proj"], init_lora_weights=False))
    for name in ("default", "other", "default"):
        for whole in both:
            whole.set_adapter(name)
        got, want = (train_step(whole, whole, tokens()) for whole in both)
        assert_close(got, want, rtol=1e-5, atol=1e-7)
        assert fxckpt.stats(t).offloads == 1
    with both[0].disable_adapter(), torch.no_grad():
        assert_close({"loss": both[0](**tokens()).loss}, {"loss": qwen3(2)(**tokens()).loss}, rtol=1e-5, atol=1e-6)
    both[0].save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(qwen3(2), tmp_path)
    want_logits = both[0].eval()(**tokens()).logits
    assert_close({"logits": again.eval()(**tokens()).logits}, {"logits": want_logits}, rtol=1e-5, atol=1e-6)
    merged = both[0].merge_and_unload()
    assert_close({"logits": merged.eval()(**tokens()).logits}, {"logits": want_logits}, rtol=1e-4, atol=1e-5)


class Int8(nn.Module):
    """A frozen linear layer with weights of eight bits and a scale for each row, as quantised bases have."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.weight = nn.Parameter((linear.weight.detach() / scale).round().to(torch.int8), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.weight.to(x.dtype) * self.scale).t()


def quantised() -> nn.Module:
    """Eight bits in the layers; trained is what is added to each of their products."""

    class Adapted(nn.Module):
        def __init__(self, base: Int8) -> None:
            super().__init__()
            self.base, self.drop = base, nn.Dropout(0.2)
            self.down = nn.Linear(base.in_features, 4, bias=False)
            self.up = nn.Linear(4, base.out_features, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + self.up(self.down(self.drop(x)))  # type: ignore[no-any-return]

    model = qwen3(2).requires_grad_(False)
    torch.manual_seed(2)
    for layer in model.model.layers:  # type: ignore[union-attr]
        for name in ("q_proj", "v_proj", "o_proj"):
            setattr(layer.self_attn, name, Adapted(Int8(getattr(layer.self_attn, name))))
    return model.train()


@pytest.mark.parametrize("compiled", [False, True])
def test_frozen_weights_of_eight_bits(compiled: bool) -> None:
    plain, model = quantised(), quantised()
    want = train_step(plain, plain, tokens())
    t: Any = fxckpt.transform(model, every_n=2, offload=True)
    t.enable_input_require_grads()
    got = train_step(torch.compile(t, backend="aot_eager") if compiled else t, model, tokens())
    if not compiled:
        assert_close(got, want, rtol=1e-5, atol=1e-7)
    else:  # a compiler draws other numbers for dropout
        assert {n for n, g in got.grads.items() if g is not None} == {n for n, g in want.grads.items() if g is not None}
    assert recomputed(t) == layer_names(0) and fxckpt.stats(t).offloads == 1
