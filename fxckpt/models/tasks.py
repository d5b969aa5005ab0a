"""What a transformers architecture is trained for, and a random batch for it.

A task is found by the auto classes of transformers that know the architecture's configuration. Another task is one more
line in ``TASKS``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fxckpt.errors import SettingsError
from fxckpt.models.spec import ModelSpec

Batch = dict[str, Any]
"""Keyword arguments of the model's forward."""


@dataclass(frozen=True)
class Task:
    """One kind of training."""

    auto: str
    """Name of the auto class that builds the model."""
    mapping: str
    """Name of transformers' mapping from configurations to models of this kind."""
    batch: Callable[[Any, ModelSpec, torch.Generator], Batch]
    """A random batch from the configuration."""


def find_task(transformers: Any, config: Any, architecture: str | None = None) -> Task:
    """The task of a configuration: that of `architecture` where it names a class of one, else the first that fits.

    Raises:
        SettingsError: none fits.
    """
    fitting: dict[str, Task] = {}
    for task in TASKS:
        found = getattr(transformers, task.mapping).get(type(config), ())
        for model_class in found if isinstance(found, tuple | list) else (found,):
            fitting.setdefault(model_class.__name__, task)
    if not fitting:
        known = ", ".join(task.auto.removeprefix("AutoModelFor") for task in TASKS)
        raise SettingsError(
            f"{config.model_type!r} is for none of the tasks that a batch can be made for ({known}): "
            "write a function that returns (model, batch), and give it as file.py:function."
        )
    return fitting.get(architecture or "") or next(iter(fitting.values()))


def task_of_code(auto_map: Mapping[str, str]) -> Task:
    """The task of a folder with code of its own, by what its configuration says of that.

    Raises:
        SettingsError: it is for none.
    """
    found = next((task for task in TASKS if task.auto in auto_map), None)
    if found is None:
        raise SettingsError(
            f"The code of the folder is for none of the tasks that a batch can be made for ({', '.join(auto_map)}): "
            "write a function that returns (model, batch), and give it as file.py:function."
        )
    return found


def _tokens(config: Any, spec: ModelSpec, generator: torch.Generator, field: str = "max_position_embeddings") -> Any:
    """Random token ids, none of them padding: models look for padding, and warn or mask."""
    text = config.get_text_config()
    limit = getattr(text, field, None)
    if isinstance(limit, int) and spec.seq > limit:
        raise SettingsError(f"seq={spec.seq} is more than the model's {field} of {limit}: set it with --set {field}=n.")
    ids = torch.randint(min(3, text.vocab_size - 1), text.vocab_size, (spec.batch, spec.seq), generator=generator)
    padding = getattr(text, "pad_token_id", None)
    return ids if padding is None else ids.masked_fill_(ids == padding, (padding + 1) % text.vocab_size)


def _text(config: Any, spec: ModelSpec, generator: torch.Generator) -> Batch:
    ids = _tokens(config, spec, generator)
    return {"input_ids": ids, "labels": ids.clone()}


def _text_to_text(config: Any, spec: ModelSpec, generator: torch.Generator) -> Batch:
    return {"input_ids": _tokens(config, spec, generator), "labels": _tokens(config, spec, generator)}


def _text_class(config: Any, spec: ModelSpec, generator: torch.Generator) -> Batch:
    return {"input_ids": _tokens(config, spec, generator), **_classes(config, spec, generator)}


def _image_class(config: Any, spec: ModelSpec, generator: torch.Generator) -> Batch:
    size = getattr(config, "image_size", None) or 224
    height, width = size if isinstance(size, list | tuple) else (size, size)
    shape = (spec.batch, getattr(config, "num_channels", 3), height, width)
    return {"pixel_values": torch.randn(shape, generator=generator), **_classes(config, spec, generator)}


def _speech_to_text(config: Any, spec: ModelSpec, generator: torch.Generator) -> Batch:
    frames, mel = getattr(config, "max_source_positions", None), getattr(config, "num_mel_bins", None)
    if frames is None or mel is None:
        raise SettingsError(
            f"{config.model_type!r} takes speech in another form than Whisper: "
            "write a function that returns (model, batch), and give it as file.py:function."
        )
    features = torch.randn((spec.batch, mel, 2 * frames), generator=generator)
    return {"input_features": features, "labels": _tokens(config, spec, generator, "max_target_positions")}


def _classes(config: Any, spec: ModelSpec, generator: torch.Generator) -> Batch:
    return {"labels": torch.randint(0, config.num_labels, (spec.batch,), generator=generator)}


# The first that knows a configuration wins: encoder-decoders are known as causal models too, and encoders like BERT.
TASKS: tuple[Task, ...] = (
    Task("AutoModelForSpeechSeq2Seq", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING", _speech_to_text),
    Task("AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", _text_to_text),
    Task("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING", _text),
    Task("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING", _text),
    Task("AutoModelForImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING", _image_class),
    Task("AutoModelForSequenceClassification", "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING", _text_class),
)
