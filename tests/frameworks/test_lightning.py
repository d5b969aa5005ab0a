"""A Lightning module with a transformed model in it: fit, precision, accumulation, clipping, checkpoints."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxckpt
from tests.frameworks.test_trainer import rows, weights
from tests.helpers import assert_close, assert_same, recomputed, seed_all
from tests.situations.models import qwen3

lightning = pytest.importorskip("lightning")
warnings.filterwarnings("ignore", module="lightning")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

Base: Any = lightning.LightningModule


class Module(Base):  # type: ignore[misc]
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], index: int) -> None:
        self.log("val", self.model(**batch).loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(model: nn.Module, folder: Path, compiled: bool = False, resume: str | None = None, **more: Any) -> Any:
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "max_steps": 3,
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 0.5,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
    }
    seed_all()
    module = Module(torch.compile(model, backend="aot_eager") if compiled else model)  # type: ignore[arg-type]
    loader = torch.utils.data.DataLoader(rows(16), batch_size=2)  # type: ignore[arg-type]
    run = lightning.Trainer(**settings | more)
    run.fit(module, loader, torch.utils.data.DataLoader(rows(4, seed=9), batch_size=2), ckpt_path=resume)  # type: ignore[arg-type]
    return run, module


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("compiled", [False, True])
def test_fit(compiled: bool, precision: str, tmp_path: Path) -> None:
    plain, t = qwen3(2), fxckpt.transform(qwen3(2), every_n=2, offload=True)
    _, want = fit(plain, tmp_path, precision=precision)
    _, got = fit(t, tmp_path, compiled, precision=precision)
    exact = precision == "32-true"
    assert len(got.losses) == 6 and got.losses == pytest.approx(want.losses, rel=1e-5 if exact else 5e-3)
    if exact:
        assert_close(weights(t), weights(plain), rtol=1e-3, atol=1e-4)
    assert recomputed(t) == {"model.layers.0"} and fxckpt.stats(t).offloads == 1


def test_a_checkpoint_goes_on_exactly(tmp_path: Path) -> None:
    whole = fxckpt.transform(qwen3(2), offload=True)
    fit(whole, tmp_path, max_steps=8)  # two epochs
    first = fxckpt.transform(qwen3(2), offload=True)
    run, _ = fit(first, tmp_path, max_steps=4)
    run.save_checkpoint(tmp_path / "half.ckpt")
    second = fxckpt.transform(qwen3(2), offload=True)
    fit(second, tmp_path, max_steps=8, resume=str(tmp_path / "half.ckpt"))
    assert_same(weights(second), weights(whole))
