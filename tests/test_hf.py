"""Hugging Face's switches, `Trainer`, PEFT and accelerate over a transformed model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fxckpt
from tests.helpers import Step, assert_close, gc_layers, grads, recomputed, train_step
from tests.situations.models import qwen3, tokens

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

    getattr(t, f"{switch}_enable")()
    assert recomputed(t) == layer_names(0, 1, 2, 3), "what was captured before is there again"

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
