"""TRL's trainers, which put a fused head of their own on the model (``tests/frameworks/test_other_forwards.py``)."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxckpt
from tests.frameworks.test_trainer import CHECKPOINTING, COMPILED, Settings, losses, weights
from tests.helpers import assert_close, recomputed
from tests.situations.models import qwen3

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
trl = pytest.importorskip("trl")


def tokenizer() -> Any:
    """Words `w0` to `w60`."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(61))]
    made = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def text(seed: int, length: int) -> str:
    found = torch.randint(0, 61, (length,), generator=torch.Generator().manual_seed(seed))
    return " ".join(f"w{int(i)}" for i in found)


def settings(folder: Path, **more: Any) -> Settings:
    return {
        "output_dir": str(folder),
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 3,
        **more,
    }


def sft(model: nn.Module, folder: Path, **more: Any) -> list[float]:
    from datasets import Dataset

    data = Dataset.from_dict({"text": [text(i, 8 + i % 5) for i in range(12)]})
    args = trl.SFTConfig(**settings(folder, **more))
    run = trl.SFTTrainer(model=model, args=args, train_dataset=data, processing_class=tokenizer())
    run.train()
    return losses(run)


def dpo(model: nn.Module, folder: Path, **more: Any) -> list[float]:
    """Two rows for each prompt, and a reference model that gets no gradient and is transformed as well."""
    from datasets import Dataset

    columns = {
        "prompt": [text(i, 5) for i in range(12)],
        "chosen": [" " + text(100 + i, 6) for i in range(12)],
        "rejected": [" " + text(200 + i, 7) for i in range(12)],
    }
    fixed = qwen3(2)
    reference = fxckpt.transform(fixed) if more.get("gradient_checkpointing") else fixed
    run = trl.DPOTrainer(
        model=model,
        ref_model=reference,
        args=trl.DPOConfig(**settings(folder, **more)),
        train_dataset=Dataset.from_dict(columns),
        processing_class=tokenizer(),
    )
    run.train()
    if reference is not fixed:
        with pytest.raises(fxckpt.CaptureError, match="No graph"):
            fxckpt.graphs(reference)
    return losses(run)


@pytest.mark.parametrize("compiled", ["plain", pytest.param("aot_eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize("train", [sft, dpo])
def test_training(train: Any, compiled: str, tmp_path: Path) -> None:
    plain, t = qwen3(2), fxckpt.transform(qwen3(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        want = train(plain, tmp_path, gradient_checkpointing=False)
        got = train(t, tmp_path, **CHECKPOINTING, **COMPILED[compiled])
    assert len(got) == 3 and got == pytest.approx(want, rel=1e-4)
    assert_close(weights(t), weights(plain), rtol=1e-3, atol=1e-3)
    assert recomputed(t) == {"model.layers.0"}
    assert fxckpt.stats(t).offloads == 1


def test_lora_with_completions(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1, task_type="CAUSAL_LM")
    t = fxckpt.transform(qwen3(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = {}
        for name, model, more in (("t", t, CHECKPOINTING), ("plain", qwen3(2), {"gradient_checkpointing": False})):
            from datasets import Dataset

            torch.manual_seed(0)
            rows = {"prompt": [text(i, 5) for i in range(12)], "completion": [" " + text(50 + i, 6) for i in range(12)]}
            run = trl.SFTTrainer(
                model=model,
                args=trl.SFTConfig(**settings(tmp_path, **more)),
                train_dataset=Dataset.from_dict(rows),
                processing_class=tokenizer(),
                peft_config=config,
            )
            run.train()
            got[name] = losses(run)
    assert got["t"] == pytest.approx(got["plain"], rel=1e-4)
    assert recomputed(t) == {"model.layers.0"}
