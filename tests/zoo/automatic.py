"""Tiny models made from a class alone: a configuration shrunk by its fields, a batch by the signature of ``forward``.

What the fields and the signature do not tell stands in ``by_hand``.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from tests.zoo import registry
from tests.zoo.batches import ids, rnd
from tests.zoo.by_hand import BATCHES, FIELDS, VARIANTS
from tests.zoo.registry import BATCH, HEADS, SEED, SEQ, VOCAB, Batch, Built, zero_dropout
from tests.zoo.shrink import GENERIC, WithLoss, tiny_config, zero_dropout_config

LAYERS = 2
LAYER_COUNTS = {name for name, value in GENERIC.items() if value == registry.LAYERS and "layer" in name}
PREFERRED = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "Model", "Encoder")
"""Ends of class names: what is tried first."""


def model_classes(module: ModuleType) -> Iterator[type[nn.Module]]:
    """The pretrained models of a modelling file, whole ones first, then parts of them."""
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, PreTrainedModel)
        and value.__module__ == module.__name__
        and value.config_class is not None
        and not value.__name__.endswith("PreTrainedModel")
    ]
    return iter(sorted(found, key=_rank))


def _rank(cls: type) -> int:
    ends = [i for i, end in enumerate(PREFERRED) if cls.__name__.endswith(end)]
    return ends[0] if ends else len(PREFERRED)


def variants(cls: type[nn.Module]) -> list[dict[str, Any]]:
    """Further fields of the configurations to make a class with; none, then those by hand."""
    return [{}, *VARIANTS.get(cls.__name__, [])]


def build(cls: type[nn.Module], variant: dict[str, Any]) -> Built:
    """(model in train mode, batch): the mean square of all that the model returns is its loss."""
    import transformers

    transformers.logging.set_verbosity_error()
    config = configuration(cls, variant)
    torch.manual_seed(SEED)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = cls(config)
    zero_dropout(model)
    return WithLoss(model, squares).train(), batch_of(cls, config)


def configuration(cls: Any, variant: dict[str, Any]) -> Any:
    """A small configuration for a model class."""
    fields = _merged(_merged(fields_of(cls.config_class), FIELDS.get(cls.__name__, {})), variant)
    config = tiny_config(cls.config_class, **fields)
    zero_dropout_config(config)
    return config


def fields_of(config_class: Any) -> dict[str, Any]:
    """What is set by hand for a configuration class and those within it."""
    over = copy.deepcopy(FIELDS.get(config_class.__name__, {}))
    defaults = config_class()
    names = vars(defaults)
    if "kv_lora_rank" in names:  # latent attention has as many heads of keys as of queries
        over.setdefault("num_key_value_heads", HEADS)
    for name in LAYER_COUNTS & names.keys():
        over.setdefault(name, LAYERS)
    for name in getattr(config_class, "sub_configs", None) or {}:
        part = over.get(name, {})
        if isinstance(getattr(defaults, name, None), PreTrainedConfig) and isinstance(part, dict):
            over[name] = _merged(fields_of(type(getattr(defaults, name))), part)
    return over


def _merged(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = copy.deepcopy(under)
    for key, value in over.items():
        inner = merged.get(key)
        nested = isinstance(inner, dict) and isinstance(value, dict) and not key.startswith("rope")
        merged[key] = _merged(inner, value) if nested else copy.deepcopy(value)
    return merged


def squares(out: Any) -> torch.Tensor:
    """The mean square of every tensor with a gradient that a model returns, added up."""
    found = [t.float().square().mean() for t in tensors(out) if t.is_floating_point() and t.requires_grad]
    if not found:
        raise ValueError("nothing that the model returns has a gradient")
    return torch.stack(found).sum()


def tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from tensors(part)
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from tensors(part)


def batch_of(cls: Any, config: Any) -> Batch:
    """What the forward of a class takes, as far as its names tell."""
    if cls.__name__ in BATCHES:
        return BATCHES[cls.__name__](config)
    takes = inspect.signature(cls.forward).parameters
    text = config.get_text_config()
    batch: Batch = {}
    if "input_ids" in takes:
        batch["input_ids"] = _tokens(text)
    if "attention_mask" in takes and batch:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    if "decoder_input_ids" in takes:
        batch["decoder_input_ids"] = _tokens(config.get_text_config(decoder=True), 12)
    if "pixel_values" in takes:
        batch["pixel_values"] = _image(config)
    if "pixel_values_videos" in takes and "pixel_values" not in takes:
        batch["pixel_values_videos"] = _image(config, frames=4)
    if "input_values" in takes:
        batch["input_values"] = rnd(BATCH, 1600)
    if "input_features" in takes:
        batch["input_features"] = rnd(BATCH, 32, getattr(config, "num_mel_bins", None) or 16)
    if "bbox" in takes:
        batch["bbox"] = torch.tensor([1, 2, 5, 6]).expand(BATCH, SEQ, 4).clone()
    if "grid_thw" in takes and "hidden_states" in takes:  # patches, each unrolled: two images of four by four
        side, depth = config.patch_size, getattr(config, "temporal_patch_size", 1)
        channels = getattr(config, "in_channels", None) or getattr(config, "in_chans", None) or 3
        batch["hidden_states"] = rnd(BATCH * 16, channels * depth * side * side)
        batch["grid_thw"] = torch.tensor([[1, 4, 4]] * BATCH)
    if not batch and "inputs_embeds" in takes:
        batch["inputs_embeds"] = rnd(BATCH, SEQ, config.hidden_size)
    if not batch and "hidden_states" in takes:
        batch["hidden_states"] = rnd(BATCH, SEQ, config.hidden_size)
    if "return_dict" in takes or "kwargs" in takes:
        batch["return_dict"] = True
    return batch


def _tokens(text: Any, length: int = SEQ) -> torch.Tensor:
    vocab = getattr(text, "vocab_size", None) or VOCAB
    return ids(s=length, vocab=vocab, high=max(vocab - 16, 6))


def _image(config: Any, frames: int | None = None) -> torch.Tensor:
    vision = getattr(config, "vision_config", None) or getattr(config, "backbone_config", None) or config
    size = getattr(vision, "image_size", None) or getattr(config, "image_size", None) or 32
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    channels = getattr(vision, "num_channels", None) or 3
    frames = frames or getattr(vision, "num_frames", None)
    return rnd(BATCH, *(() if frames is None else (frames,)), channels, height, width)
