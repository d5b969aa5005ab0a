"""Mixtures of experts."""

from __future__ import annotations

from tests.zoo.batches import seq2seq, text
from tests.zoo.decoders import lm

for _mt, _cls, _o in [
    ("mixtral", "MixtralForCausalLM", {"output_router_logits": True}),
    ("qwen2_moe", "Qwen2MoeForCausalLM", {}),
    ("olmoe", "OlmoeForCausalLM", {}),
    ("flex_olmo", "FlexOlmoForCausalLM", {}),
    ("phimoe", "PhimoeForCausalLM", {}),
    ("glm4_moe", "Glm4MoeForCausalLM", {"first_k_dense_replace": 1}),
    ("minimax_m2", "MiniMaxM2ForCausalLM", {}),
    ("cohere2_moe", "Cohere2MoeForCausalLM", {}),
    ("deepseek_v3", "DeepseekV3ForCausalLM", {"num_key_value_heads": 4, "first_k_dense_replace": 1}),
    (
        "dots1",
        "Dots1ForCausalLM",
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "num_key_value_heads": 4,
            "first_k_dense_replace": 1,
        },
    ),
    (
        "nllb-moe",
        "NllbMoeForConditionalGeneration",
        {"encoder_sparse_step": 2, "decoder_sparse_step": 2, "expert_capacity": 16},
    ),
    (
        "switch_transformers",
        "SwitchTransformersForConditionalGeneration",
        {
            "decoder_start_token_id": 0,
            "num_sparse_encoder_layers": 2,
            "num_sparse_decoder_layers": 2,
            "expert_capacity": 16,
        },
    ),
    ("afmoe", "AfmoeForCausalLM", {}),
    ("aria_text", "AriaTextForCausalLM", {"moe_num_experts": 4, "intermediate_size": 32}),
    ("mimo_v2_flash", "MiMoV2FlashForCausalLM", {}),
]:
    lm(_mt, _cls, family="moe", batch=seq2seq if _mt in ("nllb-moe", "switch_transformers") else text, **_o)
