"""Decoder-only language models."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.batches import MakeBatch, text
from tests.zoo.registry import BATCH, VOCAB
from tests.zoo.shrink import hf


def lm(
    model_type: str,
    cls: str,
    family: str = "decoder",
    name: str | None = None,
    batch: MakeBatch = text,
    **over: Any,
) -> None:
    """Register a language model under its model type (or `name`)."""
    hf(name or model_type.replace("-", "_"), family, model_type, cls, batch, **over)


for _mt, _cls in [
    ("llama", "LlamaForCausalLM"),
    ("qwen2", "Qwen2ForCausalLM"),
    ("qwen3", "Qwen3ForCausalLM"),
    ("gemma", "GemmaForCausalLM"),
    ("gemma2", "Gemma2ForCausalLM"),
    ("phi", "PhiForCausalLM"),
    ("phi3", "Phi3ForCausalLM"),
    ("gpt2", "GPT2LMHeadModel"),
    ("gpt_neox", "GPTNeoXForCausalLM"),
    ("gpt_bigcode", "GPTBigCodeForCausalLM"),
    ("gptj", "GPTJForCausalLM"),
    ("falcon", "FalconForCausalLM"),
    ("mpt", "MptForCausalLM"),
    ("olmo", "OlmoForCausalLM"),
    ("olmo2", "Olmo2ForCausalLM"),
    ("olmo3", "Olmo3ForCausalLM"),
    ("granite", "GraniteForCausalLM"),
    ("cohere", "CohereForCausalLM"),
    ("cohere2", "Cohere2ForCausalLM"),
    ("glm", "GlmForCausalLM"),
    ("glm4", "Glm4ForCausalLM"),
    ("stablelm", "StableLmForCausalLM"),
    ("starcoder2", "Starcoder2ForCausalLM"),
    ("smollm3", "SmolLM3ForCausalLM"),
    ("helium", "HeliumForCausalLM"),
    ("persimmon", "PersimmonForCausalLM"),
    ("apertus", "ApertusForCausalLM"),
    ("arcee", "ArceeForCausalLM"),
    ("bitnet", "BitNetForCausalLM"),
    ("diffllama", "DiffLlamaForCausalLM"),
    ("exaone4", "Exaone4ForCausalLM"),
    ("nanochat", "NanoChatForCausalLM"),
    ("seed_oss", "SeedOssForCausalLM"),
    ("vaultgemma", "VaultGemmaForCausalLM"),
    ("modernbert-decoder", "ModernBertDecoderForCausalLM"),
    ("ernie4_5", "Ernie4_5ForCausalLM"),
    ("hrm_text", "HrmTextForCausalLM"),
    ("doge", "DogeForCausalLM"),
]:
    lm(_mt, _cls)

lm(
    "gemma4_text",
    "Gemma4ForCausalLM",
    head_dim=8,
    per_layer_config=None,
    layer_types=["sliding_attention", "full_attention"] * 2,
    vocab_size_per_layer_input=VOCAB,
    hidden_size_per_layer_input=8,
)
# the last two layers read the keys and values that earlier layers left in a dict: data flow beside the return values
lm(
    "gemma4_text",
    "Gemma4ForCausalLM",
    name="gemma4_shared_kv",
    head_dim=8,
    per_layer_config=None,
    layer_types=["sliding_attention", "full_attention"] * 2,
    vocab_size_per_layer_input=VOCAB,
    hidden_size_per_layer_input=8,
    num_kv_shared_layers=2,
)
lm("nemotron", "NemotronForCausalLM", num_key_value_heads=2)
lm("ministral", "MinistralForCausalLM", head_dim=8)
lm("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", head_dim=8)
lm("minicpm3", "MiniCPM3ForCausalLM", num_key_value_heads=4)
lm("llama", "LlamaForCausalLM", name="llama_12layers", num_hidden_layers=12)
lm(
    "qwen3",
    "Qwen3ForSequenceClassification",
    name="qwen3_seqcls",
    pad_token_id=0,
    batch=lambda cfg: {**text(cfg, labels=False), "labels": torch.arange(BATCH) % 2},
)
# GPT2LMHeadModel's class name gives no loss type, and the warning about that breaks the graph; this one sets it
lm("gpt2", "GPT2LMHeadModel", name="gpt2_8layers", n_layer=8, post=lambda m: setattr(m, "loss_type", "ForCausalLM"))
