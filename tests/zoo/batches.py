"""Batches, all drawn from their own generator: the same data whatever the model consumed of the global stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.zoo.registry import BATCH, SEQ, VOCAB, Batch

MakeBatch = Callable[[Any], Batch]


def gen() -> torch.Generator:
    return torch.Generator().manual_seed(1234)


def ids(n: int = BATCH, s: int = SEQ, vocab: int = VOCAB, low: int = 5, high: int | None = None) -> torch.Tensor:
    """Token ids in `[low, high)`, shape `(n, s)`."""
    return torch.randint(low, high or (vocab - 16), (n, s), generator=gen())


def rnd(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=gen())


def text(cfg: Any, s: int = SEQ, mask: bool = True, labels: bool = True) -> Batch:
    """Token ids with right padding in the second row, as a collator would give them."""
    x = ids(s=s)
    b = {"input_ids": x}
    y = x.clone()
    if mask:
        m = torch.ones_like(x)
        m[1, -3:] = 0
        y[1, -3:] = -100
        b["attention_mask"] = m
    if labels:
        b["labels"] = y
    return b


def text_nomask(cfg: Any) -> Batch:
    return text(cfg, mask=False)


def seq2seq(cfg: Any) -> Batch:
    x = ids()
    m = torch.ones_like(x)
    m[1, -3:] = 0
    return {"input_ids": x, "attention_mask": m, "labels": ids(s=12)}


def image(cfg: Any, n_labels: int = 2, size: int = 32, channels: int = 3) -> Batch:
    return {"pixel_values": rnd(BATCH, channels, size, size), "labels": torch.arange(BATCH) % n_labels}


def image64(cfg: Any) -> Batch:
    return image(cfg, size=64)


def masked_image(size: int = 32, patch: int = 8) -> MakeBatch:
    n = (size // patch) ** 2

    def make(cfg: Any) -> Batch:
        m = torch.zeros(BATCH, n, dtype=torch.bool)
        m[:, ::2] = True
        return {"pixel_values": rnd(BATCH, 3, size, size), "bool_masked_pos": m}

    return make


def semantic(size: int = 32, classes: int = 2) -> MakeBatch:
    def make(cfg: Any) -> Batch:
        return {
            "pixel_values": rnd(BATCH, 3, size, size),
            "labels": torch.randint(0, classes, (BATCH, size, size), generator=gen()),
        }

    return make


def pixels_only(size: int = 32) -> MakeBatch:
    return lambda cfg: {"pixel_values": rnd(BATCH, 3, size, size)}


def video(frames: int = 4, size: int = 32) -> MakeBatch:
    return lambda cfg: {"pixel_values": rnd(BATCH, frames, 3, size, size), "labels": torch.arange(BATCH) % 2}


def wave_cls(cfg: Any) -> Batch:
    return {"input_values": rnd(BATCH, 1600), "labels": torch.arange(BATCH) % 2}


def wave_ctc(cfg: Any) -> Batch:
    return {"input_values": rnd(BATCH, 1600), "labels": ids(s=3, high=30)}


def features(key: str = "input_features", t: int = 32, n: int = 16) -> MakeBatch:
    def make(cfg: Any) -> Batch:
        return {key: rnd(BATCH, t, n), "labels": torch.arange(BATCH) % 2}

    return make


def box_loss(out: Any) -> torch.Tensor:
    """Stand-in for the Hungarian matching loss of detection models, which needs scipy."""
    return out.logits.float().square().mean() + out.pred_boxes.mean()


def clip_batch(cfg: Any) -> Batch:
    return {"input_ids": ids(), "pixel_values": rnd(BATCH, 3, 32, 32), "return_loss": True}


def vlm(
    n_tokens: int,
    token_id: str | int = "image_token_id",
    pixel_shape: tuple[int, ...] = (BATCH, 3, 32, 32),
    extra: Callable[[Any, torch.Tensor], Batch] | None = None,
    s: int = 32,
) -> MakeBatch:
    """Text with a run of `n_tokens` image placeholders in each row."""

    def make(cfg: Any) -> Batch:
        x = ids(s=s)
        tid = getattr(cfg, token_id) if isinstance(token_id, str) else token_id
        x[:, 2 : 2 + n_tokens] = tid
        y = x.clone()
        y[x == tid] = -100
        b = {"input_ids": x, "attention_mask": torch.ones_like(x), "labels": y, "pixel_values": rnd(*pixel_shape)}
        if extra:
            b.update(extra(cfg, x))
        return b

    return make
