"""transformers' Trainer as it is: training, evaluation, checkpoints, resuming, lengths that vary."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import fxckpt
from tests.helpers import assert_close, assert_same, recomputed, seed_all
from tests.situations.models import qwen3, tokens

Settings = dict[str, Any]
CHECKPOINTING: Settings = {
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"every_n_layers": 2, "offload": True},
}
COMPILED: dict[str, Settings] = {
    "plain": {},
    "aot_eager": {"torch_compile": True, "torch_compile_backend": "aot_eager"},
    "inductor": {"torch_compile": True},
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def rows(count: int, length: int | None = 16, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Rows of a data set, of one length, or of lengths from 5 to 40 without a pattern."""
    lengths = [length or 5 + (7919 * i + seed) % 36 for i in range(count)]
    return [{k: v[0].cpu() for k, v in tokens(b=1, s=n, seed=seed + i).items()} for i, n in enumerate(lengths)]


def padded(batch: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    return {
        k: nn.utils.rnn.pad_sequence([row[k] for row in batch], batch_first=True, padding_value=fill[k]) for k in fill
    }


def trainer(model: nn.Module, folder: Path, data: Any = None, **settings: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    arguments: Settings = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "max_steps": 3,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "seed": 3,
        "disable_tqdm": True,
    }
    seed_all()
    data = data or rows(12)
    return Trainer(
        model=model,
        args=TrainingArguments(**arguments | settings),
        train_dataset=data,
        eval_dataset=rows(5, seed=100),
        data_collator=padded,
    )


def losses(found: Any) -> list[float]:
    return [entry["loss"] for entry in found.state.log_history if "loss" in entry]


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize("more", [{}, {"bf16": True}, {"label_smoothing_factor": 0.1}], ids=str)
@pytest.mark.parametrize("compiled", ["plain", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_training(compiled: str, more: Settings, tmp_path: Path) -> None:
    more = {"gradient_accumulation_steps": 4, **more}
    plain, model = qwen3(2), qwen3(2)
    # With smoothed labels the Trainer shifts them where it knows the model's class, which that of a compiled one hides.
    same = COMPILED[compiled] if "label_smoothing_factor" in more else {}
    want = trainer(plain, tmp_path, **more, **same)
    want.train()
    t = fxckpt.transform(model)
    got = trainer(t, tmp_path, **more, **CHECKPOINTING, **COMPILED[compiled])
    got.train()
    assert len(losses(got)) == 3
    assert losses(got) == pytest.approx(losses(want), rel=5e-3 if "bf16" in more else 1e-5)
    if "bf16" not in more:  # where a gradient is about zero, rounding decides about Adam's step
        assert_close(weights(t), weights(plain), rtol=1e-3, atol=1e-4)
    assert recomputed(t) == {"model.layers.0"}
    assert all(len(g.transfers) == 1 for g in fxckpt.graphs(t))
    assert len(fxckpt.graphs(t)) == 1, "one graph for all steps"


def test_a_run_that_is_resumed_goes_on_exactly(tmp_path: Path) -> None:
    """With dropout, whose random numbers the Trainer keeps, too; a model of its own takes the second half."""
    settings: Settings = {**CHECKPOINTING, "max_steps": 6, "save_strategy": "steps", "save_steps": 3}

    def made() -> nn.Module:
        return fxckpt.transform(qwen3(2, attention_dropout=0.2))

    whole = made()
    one = trainer(whole, tmp_path, **settings)
    one.train()
    again = made()
    with torch.no_grad():
        for p in again.parameters():
            p.zero_()  # all there is comes from the checkpoint
    two = trainer(again, tmp_path, **settings)
    two.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert len(losses(one)) == 6 and losses(two)[-3:] == losses(one)[-3:]
    assert_same(weights(again), weights(whole))


def test_a_checkpoint_of_the_model_itself_is_taken(tmp_path: Path) -> None:
    """And the other way round: the state has the names of the model's own."""
    settings: Settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    plain = qwen3(2)
    one = trainer(plain, tmp_path / "plain", **settings)
    one.train()
    t = fxckpt.transform(qwen3(2))
    two = trainer(t, tmp_path / "t", **settings, **CHECKPOINTING)
    two.train(resume_from_checkpoint=str(tmp_path / "plain" / "checkpoint-2"))
    assert_close(weights(t), weights(plain), rtol=1e-3, atol=1e-4)
    back = qwen3(2)
    trainer(back, tmp_path / "back", **settings).train(resume_from_checkpoint=str(tmp_path / "t" / "checkpoint-4"))
    assert_same(weights(back), weights(t))


def test_evaluation_and_prediction(tmp_path: Path) -> None:
    plain, t = qwen3(2), fxckpt.transform(qwen3(2))
    want, got = trainer(plain, tmp_path), trainer(t, tmp_path, **CHECKPOINTING, **COMPILED["aot_eager"])
    for one in (want, got):
        one.train()
    assert got.evaluate()["eval_loss"] == pytest.approx(want.evaluate()["eval_loss"], rel=1e-4)
    some = rows(3, seed=50)
    for a, b in zip(got.predict(some).predictions, want.predict(some).predictions, strict=True):
        torch.testing.assert_close(torch.tensor(a), torch.tensor(b), rtol=1e-3, atol=1e-3)
    assert not t.training and t(**tokens()).logits.requires_grad, "evaluation leaves the model in its mode"


def test_the_best_model_is_loaded(tmp_path: Path) -> None:
    t = fxckpt.transform(qwen3(2))
    both: Settings = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 1, "save_steps": 1}
    got = trainer(t, tmp_path, **both, **CHECKPOINTING, load_best_model_at_end=True, learning_rate=0.5)
    got.train()
    found = [entry["eval_loss"] for entry in got.state.log_history if "eval_loss" in entry]
    assert len(found) == 3 and got.evaluate()["eval_loss"] == pytest.approx(min(found), rel=1e-6)


def test_a_plain_model_is_saved(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    t: Any = fxckpt.transform(qwen3(2))
    got = trainer(t, tmp_path, **CHECKPOINTING)
    got.train()
    got.save_model()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is type(qwen3(2))
    assert_same(dict(loaded.state_dict()), dict(t.state_dict()))
    t.save_pretrained(tmp_path / "other")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "other")
    assert_same({"logits": again.eval()(**tokens()).logits}, {"logits": loaded.eval()(**tokens()).logits})


def compilations(model: nn.Module, folder: Path, steps: int, **settings: Any) -> tuple[int, list[float]]:
    """Graphs compiled in a run over rows of many lengths, and the losses."""
    torch._dynamo.reset()
    counters.clear()
    run = trainer(
        model,
        folder,
        rows(2 * steps, length=None),
        max_steps=steps,
        train_sampling_strategy="group_by_length",
        label_smoothing_factor=0.1,
        learning_rate=1e-3,
        **settings,
    )
    run.train()
    return counters["stats"]["unique_graphs"], losses(run)


@pytest.mark.parametrize("steps", [12, pytest.param(200, marks=pytest.mark.slow)])
def test_lengths_that_vary_compile_no_more_than_the_model_does(steps: int, tmp_path: Path) -> None:
    compiled = COMPILED["inductor" if steps == 200 else "aot_eager"]
    want, plain = compilations(qwen3(2), tmp_path, steps, **compiled)
    got, ours = compilations(fxckpt.transform(qwen3(2)), tmp_path, steps, **compiled, **CHECKPOINTING)
    assert 1 <= got <= want
    assert ours == pytest.approx(plain, rel=1e-3)
