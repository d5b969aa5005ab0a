"""Shrinking transformers configurations, and registering models built from them."""

from __future__ import annotations

import dataclasses
import enum
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.zoo.registry import HEADS, HID, LAYERS, SEED, VOCAB, Batch, Built, is_rate, register

_H = dict.fromkeys(
    [
        "hidden_size",
        "d_model",
        "n_embd",
        "n_embed",
        "embed_dim",
        "dim",
        "embedding_size",
        "emb_dim",
        "embedding_dim",
        "decoder_hidden_size",
        "encoder_hidden_size",
        "projection_dim",
        "model_dim",
    ],
    HID,
)
_F = dict.fromkeys(
    [
        "intermediate_size",
        "ffn_dim",
        "d_ff",
        "encoder_ffn_dim",
        "decoder_ffn_dim",
        "ffn_hidden_size",
        "mlp_dim",
        "hidden_dim",
        "feed_forward_size",
    ],
    2 * HID,
)
_F.update(
    dict.fromkeys(
        [
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "shared_intermediate_size",
            "expert_intermediate_size",
            "dense_intermediate_size",
            "n_inner",
        ],
        HID,
    )
)
_L = dict.fromkeys(
    [
        "num_hidden_layers",
        "n_layer",
        "n_layers",
        "num_layers",
        "encoder_layers",
        "decoder_layers",
        "num_decoder_layers",
        "num_encoder_layers",
        "depth",
        "encoder_num_layers",
        "decoder_num_layers",
    ],
    LAYERS,
)
_A = dict.fromkeys(
    [
        "num_attention_heads",
        "n_head",
        "n_heads",
        "num_heads",
        "encoder_attention_heads",
        "decoder_attention_heads",
        "encoder_num_attention_heads",
        "decoder_num_attention_heads",
    ],
    HEADS,
)
_A.update(num_key_value_heads=2, num_kv_heads=2, encoder_num_key_value_heads=2, decoder_num_key_value_heads=2)
_P = dict.fromkeys(
    [
        "max_position_embeddings",
        "n_positions",
        "max_seq_len",
        "max_sequence_length",
        "n_ctx",
        "context_length",
        "max_source_positions",
        "max_target_positions",
    ],
    VOCAB,
)
_MISC = {
    "vocab_size": VOCAB,
    "head_dim": HID // HEADS,
    "d_kv": HID // HEADS,
    "sliding_window": 8,
    "use_cache": False,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "image_size": 32,
    "patch_size": 8,
    "rotary_dim": 4,
    "type_vocab_size": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "mamba_expand": 2,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_chunk_size": 8,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_dt_rank": 4,
    "state_size": 8,
    "time_step_rank": 4,
    "ssm_state_size": 8,
}
GENERIC: dict[str, Any] = {**_H, **_F, **_L, **_A, **_P, **_MISC}


def tiny_config(cls: Any, _vocab: int | None = None, **over: Any) -> Any:
    """`cls` with its size fields shrunk by GENERIC; `over` wins, and may hold dicts for sub-configurations.

    A field is only shrunk where its default is set (None means "derived"); use `over` for the rest and
    pass `field=KEEP` to keep a default that GENERIC would change.
    """
    defaults = cls()
    kw: dict[str, Any] = {}
    names = [f.name for f in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else list(vars(defaults))
    subs = getattr(cls, "sub_configs", {}) or {}
    for n in names:
        if n in subs or n in over or n not in GENERIC:
            continue
        v = getattr(defaults, n, None)
        if v is None or isinstance(v, (dict, list, tuple)) or isinstance(v, bool) != isinstance(GENERIC[n], bool):
            continue
        kw[n] = GENERIC[n]
    vocab = over.get("vocab_size", kw.get("vocab_size", _vocab))
    for n in subs:
        o = over.pop(n, {})
        if o is KEEP:
            continue
        sub = getattr(defaults, n, None)
        if isinstance(o, dict):
            scls = type(sub) if "model_type" not in o else config_class(o["model_type"])
            if scls is type(None):
                if not o:
                    continue
                raise ValueError(f"{cls.__name__}.{n} has no default; give a model_type")
            o = tiny_config(scls, vocab, **{k: v for k, v in o.items() if k != "model_type"})
        kw[n] = o
    if vocab is None:
        for n in subs:
            vocab = vocab or getattr(kw.get(n), "vocab_size", None)
    if vocab:  # special tokens must lie inside the small vocabulary
        nxt = vocab - 1
        for n in names:
            if n in over or not (n.endswith(("_token_id", "_token_index", "_id")) or n in ("mask_token_id",)):
                continue
            v = getattr(defaults, n, None)
            if isinstance(v, int) and not isinstance(v, bool) and v >= vocab:
                kw[n] = nxt
                nxt -= 1
            elif isinstance(v, list) and v and all(isinstance(x, int) for x in v):
                kw[n] = [min(x, nxt) for x in v]
    kw.update({k: v for k, v in over.items() if v is not KEEP})
    return cls(**kw)


class _Keep(enum.Enum):  # copies of an enumeration's member are itself
    KEEP = enum.auto()


KEEP = _Keep.KEEP  # as an override: leave this field at its default


class WithLoss(nn.Module):
    """Gives a loss, `loss_fn(output)`, to a model that computes none (or one needing scipy)."""

    def __init__(self, model: nn.Module, loss_fn: Callable[[Any], torch.Tensor]) -> None:
        super().__init__()
        self.model, self.loss_fn = model, loss_fn

    def forward(self, **batch: Any) -> dict[str, torch.Tensor]:
        return {"loss": self.loss_fn(self.model(**batch))}

    def gradient_checkpointing_enable(self, *a: Any, **k: Any) -> Any:
        return self.model.gradient_checkpointing_enable(*a, **k)


def config_class(model_type: str) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type]


def hf(
    name: str,
    family: str,
    model_type: str,
    cls: str,
    batch: Callable[[Any], Batch],
    note: str = "",
    post: Callable[[nn.Module], Any] | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    **over: Any,
) -> None:
    """Register a transformers model: class name, batch function, configuration overrides.

    `post(model)` runs on the finished model, and `loss(output)` replaces the model's own loss.
    """

    def fn(dropout: bool) -> Built:
        import transformers

        transformers.logging.set_verbosity_error()
        cfg = tiny_config(
            config_class(model_type), **{k: (dict(v) if isinstance(v, dict) else v) for k, v in over.items()}
        )
        if not dropout:
            zero_dropout_config(cfg)
        model_cls = getattr(transformers, cls)
        torch.manual_seed(SEED)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = model_cls(cfg)
        if post:
            post(model)
        if loss is not None:
            model = WithLoss(model, loss)
        return model, batch(cfg)

    register(name, family, fn, model_type, note, cls)


def zero_dropout_config(cfg: Any) -> None:
    """Set every dropout-like rate of a configuration and its sub-configurations to 0."""
    for k, v in list(vars(cfg).items()):
        if is_rate(k, v):
            setattr(cfg, k, 0.0)
        elif "drop" in k and isinstance(v, (list, tuple)) and v and all(isinstance(x, float) for x in v):
            setattr(cfg, k, type(v)(0.0 for _ in v))
        elif k == "apply_spec_augment":
            setattr(cfg, k, False)
        elif k in ("mask_time_prob", "mask_feature_prob"):  # SpecAugment, drawn with numpy
            setattr(cfg, k, 0.0)
        elif hasattr(v, "to_dict") and hasattr(v, "model_type"):
            zero_dropout_config(v)
