"""Which model, which batch of it, and where and how it runs."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fxckpt.errors import SettingsError

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True)
class ModelSpec:
    """A training step. Every process of a benchmark builds the same one from it.

    Raises:
        SettingsError: a value means nothing.
    """

    model: str
    """A transformers model type, a folder with ``config.json``, or ``file.py:function``."""
    batch: int = 2
    """Rows of the batch."""
    seq: int = 128
    """Tokens of a row; of a speech model, the tokens of its labels. Image models have none."""
    dtype: str | None = None
    """Element type of weights and inputs; None is float32, or what the function of a file gives."""
    device: str = "cpu"
    """``"cpu"`` or ``"cuda"``."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the transformers configuration that differ from its defaults; nested for configurations in it."""
    layers: tuple[str, ...] = ()
    """Name patterns of the boundary layers of a model without ``GradientCheckpointingLayer``, for fxckpt's variants."""
    dropout: bool = False
    """Leave dropout rates of a transformers model as configured; False sets all of them to 0."""
    trust_remote_code: bool = False
    """Run the code that lies in a folder beside ``config.json`` and that this names, as transformers does when told."""
    seed: int = 0
    """Of weights, batch, and the random stream of each step."""

    def __post_init__(self) -> None:
        for name in ("batch", "seq"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise SettingsError(f"{name}={value!r}: it must be a whole number of at least 1.")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise SettingsError(f"dtype={self.dtype!r}: use one of {', '.join(DTYPES)}.")
        check_device(self.device)

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """The element type asked for, or None."""
        return None if self.dtype is None else DTYPES[self.dtype]

    def to_dict(self) -> dict[str, Any]:
        """All fields, for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> ModelSpec:
        """The inverse of :meth:`to_dict`."""
        return cls(**{**fields, "layers": tuple(fields.get("layers", ()))})


def check_device(device: str) -> None:
    """Refuse what is no device of this machine.

    Raises:
        SettingsError: it is none.
    """
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise SettingsError(f'device={device!r}: use "cpu" or "cuda".')
    if device != "cpu" and not torch.cuda.is_available():
        raise SettingsError(f"device={device!r}: PyTorch sees no CUDA device here; use device cpu.")


def parse_overrides(texts: Iterable[str]) -> dict[str, Any]:
    """``["hidden_size=64", "vision_config.image_size=32"]`` as a nested dict. Values are JSON, or else text.

    Raises:
        SettingsError: one is not ``key=value``, or two contradict each other.
    """
    found: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(parts):
            raise SettingsError(f"--set {text!r}: write key=value, such as hidden_size=256.")
        inner = found
        for part in parts[:-1]:
            inner = inner.setdefault(part, {})
            if not isinstance(inner, dict):
                raise SettingsError(f"--set {text!r}: {part} is set to a value already.")
        if parts[-1] in inner:
            raise SettingsError(f"--set {text!r}: {key.strip()} is set twice.")
        inner[parts[-1]] = _value(value.strip())
    return found


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return {"True": True, "False": False, "None": None}.get(text, text)
