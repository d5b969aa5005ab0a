"""State-space, linear-attention and hybrid models."""

from __future__ import annotations

from tests.zoo.decoders import lm

_GDN = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
for _mt, _cls, _o in [
    ("falcon_mamba", "FalconMambaForCausalLM", {}),
    (
        "xlstm",
        "xLSTMForCausalLM",
        {"mode": "train", "chunk_size": 8, "return_last_states": True, "autocast_kernel_dtype": "float32"},
    ),
    (
        "jamba",
        "JambaForCausalLM",
        {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    ),
    ("bamba", "BambaForCausalLM", {"attn_layer_indices": [1, 3]}),
    (
        "recurrent_gemma",
        "RecurrentGemmaForCausalLM",
        {"num_hidden_layers": 6, "lru_width": 32, "attention_window_size": 8},
    ),
    ("falcon_h1", "FalconH1ForCausalLM", {"mamba_d_ssm": 64}),
    ("lfm2", "Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention"] * 2, "block_multiple_of": 8}),
    ("qwen3_5_text", "Qwen3_5ForCausalLM", dict(layer_types=["linear_attention", "full_attention"] * 2, **_GDN)),
    (
        "olmo_hybrid",
        "OlmoHybridForCausalLM",
        dict(
            layer_types=["linear_attention", "full_attention"] * 2,
            num_key_value_heads=4,
            **{**_GDN, "linear_num_key_heads": 4},
        ),
    ),
    ("minimax", "MiniMaxForCausalLM", {"block_size": 8}),
]:
    lm(_mt, _cls, family="ssm_hybrid", **_o)
