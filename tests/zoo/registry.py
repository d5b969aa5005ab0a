"""The registry of tiny models: what an entry is, how it is built, and where its loss is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Batch = dict[str, Any]
Built = tuple[nn.Module, Batch]

SEED = 0
VOCAB = 128
HID = 32
LAYERS = 4
HEADS = 4
SEQ = 16
BATCH = 2


@dataclass(frozen=True)
class Entry:
    """One tiny model; `model_type` and `model_class` are transformers' names, None for plain PyTorch."""

    name: str
    family: str
    fn: Callable[[bool], Built]
    model_type: str | None = None
    note: str = ""
    model_class: str | None = None

    def build(self, dropout: bool = False) -> Built:
        """(model in train mode, batch), the same weights and data on every call."""
        torch.manual_seed(SEED)
        model, batch = self.fn(dropout)
        if not dropout:
            zero_dropout(model)
        return model.train(), batch


REGISTRY: dict[str, Entry] = {}


def register(
    name: str,
    family: str,
    fn: Callable[[bool], Built],
    model_type: str | None = None,
    note: str = "",
    model_class: str | None = None,
) -> None:
    if name in REGISTRY:
        raise ValueError(f"duplicate entry {name}")
    REGISTRY[name] = Entry(name, family, fn, model_type, note, model_class)


def build(name: str, dropout: bool = False) -> Built:
    """(model in train mode, batch) of an entry.

    `dropout=False` sets every dropout-like rate (configuration fields, nn.Dropout.p, float attributes) to 0;
    `dropout=True` leaves the configuration's defaults alone.
    """
    return REGISTRY[name].build(dropout)


def get_loss(out: Any) -> torch.Tensor:
    """Scalar loss of whatever an entry returns: `.loss`, `["loss"]`, the first of a tuple, or a bare tensor."""
    loss = getattr(out, "loss", None)
    if loss is None and isinstance(out, dict):
        loss = out["loss"]
    if loss is None and isinstance(out, (tuple, list)):
        loss = out[0]
    if loss is None and isinstance(out, torch.Tensor):
        loss = out
    if loss is None:
        raise ValueError(f"no loss in {type(out).__name__}")
    return loss.mean()


def is_rate(name: str, value: Any) -> bool:
    """Whether an attribute looks like a dropout probability."""
    return "drop" in name and isinstance(value, float)


def zero_dropout(model: nn.Module) -> None:
    """Set every dropout-like probability of the built model to 0."""
    for m in model.modules():
        if isinstance(m, nn.modules.dropout._DropoutNd):
            m.p = 0.0
        for k, v in list(vars(m).items()):
            if is_rate(k, v):
                setattr(m, k, 0.0)
