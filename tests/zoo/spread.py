"""The spread of entries that CI runs: every family, each quick to build and step.

Beside the usual cases it holds the ways in which models use their layers differently.
"""

from __future__ import annotations

CI_SPREAD = [
    # decoders: the usual one, dropout by default, keys and values that go beside the return value, layers called often
    "llama",
    "gpt2_8layers",
    "gemma4_shared_kv",
    "hrm_text",
    # mixtures of experts
    "mixtral",
    "dots1",
    # state space and hybrid: convolutions, state stored on the module
    "lfm2",
    "recurrent_gemma",
    # encoders: one block shared by all layers, relative positions passed by keyword
    "bert",
    "albert",
    "deberta_v2",
    # encoder-decoders
    "t5",
    "bart",
    "whisper",
    # vision: nested layers, no GradientCheckpointingLayer
    "vit",
    "swin",
    "convnext",
    # audio: a frozen front end, a position bias passed from layer to layer
    "wav2vec2_frozen_cnn",
    "wavlm",
    # multimodal: two towers, images in the text, cross-attention states by keyword
    "clip",
    "llava",
    "qwen2_vl",
    "mllama",
    # refuses transformers' own checkpointing
    "layoutlmv3",
    # plain PyTorch
    "plain_conv_tower_bn",
    "plain_shared_loop",
    "plain_buffer_block",
    "plain_lora_all",
    "plain_skip_by_flag",
    "plain_kwargs_block",
    "plain_tuple_block",
    "plain_custom_autograd_fn",
    "plain_gc_layer",
    # numbers and shapes read from tensors, layers run by their forward alone
    "deberta",
    "xmod",
    "squeezebert",
]
