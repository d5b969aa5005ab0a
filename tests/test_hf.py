"""Hugging Face's switches, `Trainer`, PEFT and accelerate over a transformed model."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxckpt
from tests.helpers import Step, assert_close, assert_same, gc_layers, grads, seed_all, train_step
from tests.situations.models import qwen3, tokens
from tests.zoo import build

pytestmark = [
    pytest.mark.filterwarnings(f"ignore::{kind}:{package}")
    for kind, package in (
        ("FutureWarning", "tests"),
        ("UserWarning", "peft"),
        ("UserWarning", "torch"),
        ("UserWarning", "accelerate"),
    )
]

Settings = dict[str, Any]
SWITCHES = ["gradient_checkpointing", "activation_checkpointing"]


def plain_step() -> Step:
    model = qwen3()
    return train_step(model, model, tokens())


def recomputed(t: nn.Module) -> set[str]:
    """Names of the layers that captured graphs recompute."""
    chosen = set(fxckpt.selected_layers(t))
    return {r.layer.name for g in fxckpt.graphs(t) for r in g.regions if r.layer.name in chosen}


def layer_names(*indices: int) -> set[str]:
    return {f"model.layers.{i}" for i in indices}


def is_on(t: Any, switch: str) -> bool:
    return bool(getattr(t, f"is_{switch}"))


# ---- switches -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_dict", [False, True])
@pytest.mark.parametrize("switch", SWITCHES)
def test_switches_steer(switch: str, in_dict: bool) -> None:
    model: Any = qwen3()
    t: Any = fxckpt.transform(model)
    want = plain_step()
    chosen = {"every_n_layers": 2, "offload": True}
    getattr(t, f"{switch}_enable")(**({f"{switch}_kwargs": chosen} if in_dict else chosen))
    assert is_on(t, switch) and not is_on(model, switch), "the original's own flags stay as they are"
    assert_close(train_step(t, model, tokens()), want)
    assert recomputed(t) == layer_names(0, 2) and len(fxckpt.graphs(t)[0].transfers) == 2

    getattr(t, f"{switch}_enable")()
    assert_close(train_step(t, model, tokens()), want)
    assert recomputed(t) == layer_names(0, 1, 2, 3) and not fxckpt.graphs(t)[0].transfers
    assert len(fxckpt.graphs(t)) == 1, "graphs of the old settings are forgotten"

    getattr(t, f"{switch}_disable")()
    assert not is_on(t, switch)
    assert_close(train_step(t, model, tokens()), want)
    with pytest.raises(fxckpt.CaptureError, match="switched off"):
        fxckpt.graphs(t)

    getattr(t, f"{switch}_enable")(**{f"{switch}_kwargs": {"use_reentrant": False, "every_n_layers": 4}})
    assert_close(train_step(torch.compile(t, backend="aot_eager"), model, tokens()), want)
    assert recomputed(t) == layer_names(0)


def test_enable_without_arguments_keeps_named_layers() -> None:
    t: Any = fxckpt.transform(qwen3(), layers="model.layers.*.mlp")
    t.activation_checkpointing_enable(every_n_layers=3)
    assert fxckpt.selected_layers(t) == ["model.layers.0.mlp", "model.layers.3.mlp"]


@pytest.mark.parametrize("bad", [{"every_n_layers": 0}, {"offload": "moon"}])
def test_switches_refuse_nonsense(bad: Settings) -> None:
    t: Any = fxckpt.transform(qwen3())
    with pytest.raises(fxckpt.SettingsError):
        t.activation_checkpointing_enable(**bad)
    assert fxckpt.selected_layers(t), "and keep the settings they had"


@pytest.mark.parametrize("every_n", [1, 2])
def test_a_model_that_checkpoints_is_taken_over(every_n: int) -> None:
    model: Any = qwen3()
    model.activation_checkpointing_enable(every_n_layers=every_n)
    flags = {n: m.gradient_checkpointing for n, m in gc_layers(model).items()}
    assert sum(flags.values()) == 4 // every_n
    ran: list[int] = []
    model.model.layers[0].mlp.register_forward_hook(lambda *_: ran.append(1))
    t = fxckpt.transform(model, every_n=2)
    for run in (t, torch.compile(t, backend="aot_eager")):
        ran.clear()
        assert_close(train_step(run, model, tokens()), plain_step())
        assert len(ran) <= 1, "not checkpointed twice"
        assert {n: m.gradient_checkpointing for n, m in gc_layers(model).items()} == flags
    assert recomputed(t) == layer_names(0, 2)

    class Boom(Exception):
        pass

    def explode(*_: Any) -> None:
        raise Boom

    handle = model.register_forward_hook(explode)
    with pytest.raises(Boom):
        t(**tokens())
    handle.remove()
    assert {n: m.gradient_checkpointing for n, m in gc_layers(model).items()} == flags


@pytest.mark.parametrize("explicit", [None, True, False])
def test_use_cache_in_training(explicit: bool | None, caplog: pytest.LogCaptureFixture) -> None:
    model: Any = qwen3(use_cache=True)
    t: Any = fxckpt.transform(model)
    extra = {} if explicit is None else {"use_cache": explicit}
    out = t(**tokens(), **extra)
    assert out.past_key_values is None and model.config.use_cache
    assert ("use_cache" in caplog.text) == (explicit is True)
    out.loss.backward()
    assert_close(grads(model), plain_step().grads)
    with torch.no_grad():
        assert t(**tokens()).past_key_values.get_seq_length() == 16
    t.eval()
    assert t(**tokens()).past_key_values.get_seq_length() == 16, "outside training as the model does"


# ---- Trainer --------------------------------------------------------------------------------------------------------


def train(model: nn.Module, folder: Path, **settings: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights after three steps of the real Trainer."""
    from transformers import Trainer, TrainingArguments

    rows = [{k: v[0] for k, v in tokens(b=1, seed=s).items()} for s in range(12)]
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=3,
        logging_steps=1,
        learning_rate=1e-2,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        seed=3,
        disable_tqdm=True,
        **settings,
    )
    seed_all()
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 3
    return losses, {n: p.detach().clone() for n, p in model.named_parameters()}


CHECKPOINTING: Settings = {
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"every_n_layers": 2, "offload": True},
}
COMPILED: dict[str, Settings] = {
    "plain": {},
    "aot_eager": {"torch_compile": True, "torch_compile_backend": "aot_eager"},
    "inductor": {"torch_compile": True},
}


@pytest.mark.parametrize("compiled", ["plain", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_trainer(compiled: str, tmp_path: Path) -> None:
    losses, weights = train(qwen3(), tmp_path)
    model = qwen3()
    t = fxckpt.transform(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got, got_weights = train(t, tmp_path, **CHECKPOINTING, **COMPILED[compiled])
    assert got == pytest.approx(losses, rel=1e-5)
    assert_close(got_weights, weights, rtol=1e-3, atol=1e-4)
    assert recomputed(t) == layer_names(0, 2)
    assert all(len(g.transfers) == 2 for g in fxckpt.graphs(t))
    assert len(fxckpt.graphs(t)) == 1, "one graph for all steps"


def test_trainer_saves_a_plain_model(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    t: Any = fxckpt.transform(qwen3())
    Trainer(model=t, args=TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True)).save_model()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same(dict(loaded.state_dict()), dict(t.state_dict()))


# ---- PEFT, accelerate -----------------------------------------------------------------------------------------------


def lora(model: nn.Module) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, init_lora_weights=False)
    return peft.get_peft_model(model, config)


@pytest.mark.parametrize(("inputs", "compiled"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("outside", ["transform", "peft"])
def test_lora_both_ways_round(outside: str, inputs: bool, compiled: bool) -> None:
    plain = lora(qwen3())
    want = train_step(plain, plain, tokens())
    assert sum(g is not None for g in want.grads.values()) == 4 * 2 * 2
    if outside == "transform":
        model = lora(qwen3())
        t = whole = fxckpt.transform(model, every_n=2, offload=True)
    else:
        t = fxckpt.transform(qwen3(), every_n=2, offload=True)
        whole = lora(t)
    if inputs:
        whole.enable_input_require_grads()
    got = train_step(torch.compile(whole, backend="aot_eager") if compiled else whole, whole, tokens())
    assert_close(got, want, rtol=1e-5, atol=1e-7)
    prefix = "base_model.model." if outside == "transform" else ""
    assert recomputed(t) == {prefix + name for name in layer_names(0, 2)}
    assert any(g.transfers for g in fxckpt.graphs(t))


def test_lora_with_the_models_switch() -> None:
    """As Trainer does it: get_peft_model over t, then the switch on the outside."""
    plain = lora(qwen3())
    want = train_step(plain, plain, tokens())
    t = fxckpt.transform(qwen3())
    whole = lora(t)
    whole.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"every_n_layers": 2, "offload": True})
    assert_close(train_step(whole, whole, tokens()), want, rtol=1e-5, atol=1e-7)
    assert recomputed(t) == layer_names(0, 2) and fxckpt.graphs(t)[0].transfers


@pytest.mark.parametrize("compiled", [False, True])
def test_accelerate_with_bf16(compiled: bool) -> None:
    accelerate = pytest.importorskip("accelerate")

    def step(transformed: bool) -> tuple[Step, nn.Module]:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # Trainer has set one up
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
    assert recomputed(t) == layer_names(0, 2)
    assert any(n.meta["val"].dtype == torch.bfloat16 for n in fxckpt.graphs(t)[0].saved)
