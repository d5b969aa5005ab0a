"""Plain PyTorch entries (no transformers class anywhere, except in plain_gc_layer)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from tests.zoo.batches import ids, rnd
from tests.zoo.plain_tokens import (
    BufferBlock,
    CustomFnBlock,
    DataclassModel,
    GroupedModel,
    KwargsModel,
    LoRAAllModel,
    LoRAModel,
    NestedDictModel,
    SharedLoop,
    SkipFlagModel,
    StochasticDepthModel,
    TiedModel,
    TokenModel,
    TupleBlockModel,
    TupleModel,
    gc_layer_model,
)
from tests.zoo.plain_towers import (
    ConvTower,
    EncoderStack,
    LSTMStack,
    MLPTower,
    Seq2SeqTorch,
    SequentialTower,
    TwoTowers,
    UNet,
)
from tests.zoo.registry import HID, Batch, register


def _tokens() -> Batch:
    return {"x": ids(), "y": torch.roll(ids(), 1, 1)}


def _vectors() -> Batch:
    return {"x": rnd(8, HID), "y": torch.arange(8) % 4}


def _pictures() -> Batch:
    return {"x": rnd(4, 3, 16, 16), "y": torch.arange(4) % 4}


MODELS: list[tuple[str, Callable[[float], nn.Module], Callable[[], Batch], str]] = [
    ("transformer_encoder", lambda p: EncoderStack(p), _tokens, ""),
    ("transformer_encoder_postnorm", lambda p: EncoderStack(p, False), _tokens, ""),
    ("nn_transformer", Seq2SeqTorch, _tokens, ""),
    ("mlp_tower", MLPTower, _vectors, ""),
    ("sequential_tower", SequentialTower, _vectors, ""),
    ("conv_tower_bn", lambda p: ConvTower(), _pictures, "BatchNorm statistics, in-place ReLU"),
    ("lstm_stack", LSTMStack, _tokens, ""),
    ("gru_stack", lambda p: LSTMStack(p, nn.GRU), _tokens, ""),
    ("unet", lambda p: UNet(), _pictures, "long skips"),
    ("token_model", TokenModel, _tokens, ""),
    ("token_model_16", lambda p: TokenModel(p, n=16), _tokens, ""),
    ("shared_loop", SharedLoop, _tokens, "one block called 4 times"),
    ("tied_embeddings", TiedModel, _tokens, ""),
    ("returns_tuple", TupleModel, _tokens, "all hidden states are outputs"),
    ("returns_dataclass", DataclassModel, _tokens, ""),
    ("returns_nested_dict", NestedDictModel, _tokens, ""),
    ("kwargs_block", KwargsModel, _tokens, ""),
    ("tuple_block", TupleBlockModel, _tokens, ""),
    ("skip_by_flag", SkipFlagModel, _tokens, "2 of 6 blocks never run: their grads are None"),
    ("stochastic_depth", StochasticDepthModel, _tokens, "draws random numbers also at dropout=False"),
    ("lora_upper_half", LoRAModel, _tokens, "lower half needs no grad"),
    ("lora_all", LoRAAllModel, _tokens, ""),
    ("buffer_block", lambda p: TokenModel(p, block=BufferBlock), _tokens, "buffer updated in the forward"),
    ("custom_autograd_fn", lambda p: TokenModel(p, block=CustomFnBlock), _tokens, ""),
    ("two_towers", TwoTowers, _vectors, ""),
    ("grouped_blocks", GroupedModel, _tokens, "nested ModuleLists"),
    ("gc_layer", gc_layer_model, _tokens, "GradientCheckpointingLayer in a plain nn.Module"),
]


def _register(name: str, make: Callable[[float], nn.Module], batch: Callable[[], Batch], note: str) -> None:
    register("plain_" + name, "plain", lambda dropout: (make(0.1 if dropout else 0.0), batch()), note=note)


for _row in MODELS:
    _register(*_row)
