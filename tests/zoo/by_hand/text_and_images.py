"""Language models, and those that read images, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.zoo.by_hand import text_and_images_more
from tests.zoo.by_hand.text_and_images_more import PATCHES
from tests.zoo.registry import HEADS, HID, SEQ, VOCAB, Batch

HEAD = HID // HEADS


def rope(*sections: int, **more: Any) -> dict[str, Any]:
    """Rotary positions whose axes share half of a head."""
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections), **more}


MROPE = {"rope_parameters": rope(1, 1, 2)}
HYBRID = {"num_hidden_layers": 4, "layer_types": ["linear_attention", "hybrid"] * 2}
SLIDING_FULL = ["sliding_attention", "full_attention"]
GEMMA: dict[str, Any] = {
    "head_dim": HEAD,
    "num_key_value_heads": 2,
    "per_layer_config": None,
    "layer_types": SLIDING_FULL,
}
"""The widths that differ between the layers of a kind by default are the same here."""
AUDIO = {"num_mel_bins": 16, "n_window": 8, "output_dim": HID}
SAM: dict[str, Any] = {
    "initializer_range": 0.02,  # by default, so small that no gradient is left
    "image_size": 64,
    "output_channels": HID,
    "downsample_channels": [HID, HID],
    "window_size": 2,
    "global_attn_indexes": [1],
}
NARROW = {"out_hidden_size": HID}
DEEPSTACK: dict[str, Any] = {
    "out_hidden_size": HID,
    "deepstack_visual_indexes": [0, 1],
    "num_position_embeddings": PATCHES,
}
MUSE = {"out_hidden_size": 4 * HID, "projector_hidden_size": HID}
MUSE_VISION = {"pos_emb_height": 2, "pos_emb_width": 2, "max_position_embeddings": 4}


FIELDS: dict[str, dict[str, Any]] = {
    "BrosConfig": {"hidden_size": 64},
    "CLIPSegConfig": {"extract_layers": [0, 1], "reduce_dim": 16, "decoder_intermediate_size": HID},
    "ChameleonConfig": {"vocabulary_map": {"<image>": 4}},
    "ChameleonVQVAEConfig": {
        "num_embeddings": 32,
        "latent_channels": HID,
        "resolution": 32,
        "base_channels": HID,
        "channel_multiplier": [1, 1],
        "num_res_blocks": 1,
    },
    "CohereCompassTextConfig": {"rope_parameters": {"full_attention": rope(2, 1, 1)}},
    "CohereCompassVisionConfig": DEEPSTACK,
    "Cosmos3EdgeConfig": {"projector_hidden_size": HID},
    "Cosmos3EdgeTextConfig": {"rope_parameters": rope(2, 1, 1)},
    "Cosmos3EdgeVisionConfig": {"num_patches": PATCHES},
    "DbrxConfig": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8},
        "ffn_config": {"moe_top_k": 2},
    },
    "DeepseekOcr2SamVisionConfig": SAM,
    "DeepseekOcr2TextConfig": {"num_experts_per_tok": 2, "mlp_layer_types": ["dense", "sparse"]},
    "DeepseekV2Config": {"num_experts_per_tok": 2},
    "DiffusionGemmaConfig": {"canvas_length": 8},
    "DiffusionGemmaTextConfig": {**GEMMA, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": HID},
    "Dots3NoteAudioConfig": {
        "feature_size": 16,
        "hop_length": 4,
        "downsample_hidden_size": 8,
        "adapter_input_size": HID,
        "adapter_out_dim": HID,
    },
    "Dots3NoteTextConfig": {
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "head_dim": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "per_layer_config": None,
        "layer_types": ["sliding_attention", "indexed_attention"],
        "index_topk": 8,
        "index_head_dim": 8,
        "index_n_heads": 2,
        "shared_experts_intermediate_size": HID,
    },
    "Dots3NoteVisionConfig": {
        "mlp_layer_types": ["dense", "sparse"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "adapter_in_dim": HID,
        "adapter_out_dim": HID,
    },
    "EmbeddingGemma2TextConfig": {**GEMMA, "hidden_size_per_layer_input": 8},
    "Ernie4_5_VLMoeTextConfig": {**MROPE, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": [HID, HID]},
    "EsmFold2AtomEncoderConfig": {"output_dim": HID, "num_spatial_rope_pairs_per_axis": 1, "num_uid_rope_pairs": 1},
    "EsmFold2ConfidenceHeadConfig": {"num_plddt_bins": 8, "num_pde_bins": 8, "num_pae_bins": 8, "distogram_bins": 8},
    "EsmFold2Config": {
        "pairwise_hidden_size": HID,
        "single_inputs_size": HID + 2 * 33 + 1,
        "pair_transition_intermediate_size": HID,
        "num_loops": 1,
        "max_atomic_number": 16,
        "char_vocab_size": 8,
        "folding_trunk_num_hidden_layers": 2,
        "parcae_num_coda_layers": 1,
    },
    "EsmFold2DiffusionModuleConfig": {"fourier_dim": 16, "pair_intermediate_size": HID},
    "EsmFold2MsaEncoderConfig": {"outer_hidden_size": 8},
    "EsmFold2StructureHeadConfig": {"num_distogram_bins": 8},
    "EsmcConfig": {"num_key_value_heads": HEADS},
    "Exaone4_5_VisionConfig": NARROW,
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "Gemma3nTextConfig": {
        "intermediate_size": [2 * HID, 2 * HID],
        "num_kv_shared_layers": 0,
        "layer_types": SLIDING_FULL,
        "activation_sparsity_pattern": [0.5, 0.0],
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 8,
    },
    "Gemma4UnifiedTextConfig": GEMMA,
    "Gemma4VisionConfig": {"pooling_kernel_size": 2, "position_embedding_size": PATCHES},
    "Glm4vMoeTextConfig": {"rope_parameters": rope(1, 1, 2, partial_rotary_factor=1.0)},
    "Glm4vMoeVisionConfig": NARROW,
    "Glm4vTextConfig": MROPE,
    "Glm4vVisionConfig": NARROW,
    "Glm5NextTextConfig": {
        "num_key_value_heads": HEADS,
        "qk_rope_head_dim": 0,
        "head_dim": 0,
        "layer_types": ["linear_attention", "indexed_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "indexer_types": ["full", "full"],
        "index_topk": 8,
        "index_kpool": 4,
        "index_head_dim": 8,
        "index_n_heads": 2,
        "linear_head_dim": HEAD,
        "linear_num_heads": HEADS,
    },
    "Glm5NextVisionConfig": {**NARROW, "projection_intermediate_size": HID},
    "GlmImageTextConfig": {**MROPE, "vision_vocab_size": VOCAB},
    "GlmImageVQVAEConfig": {"num_embeddings": 64, "latent_channels": HID},
    "GlmOcrTextConfig": MROPE,
    "GlmOcrVisionConfig": NARROW,
    "HunYuanMoEV1Config": {"head_dim": HEAD, "moe_topk": 2},
    "HunYuanVLTextConfig": {"head_dim": HEAD, "rope_parameters": rope(1, 1, 1, 1)},
    "HunYuanVLVisionConfig": {"max_image_size": 32, "text_hidden_size": HID, "out_hidden_size": HID},
    "IdeficsConfig": {
        "alpha_initializer": "ones",  # at zero, nothing would reach the layers that read images
        "freeze_text_layers": False,
        "freeze_vision_layers": False,
    },
    "Inkling2TextConfig": {
        "layer_types": ["hybrid_sliding", "hybrid"],
        "swa_num_attention_heads": HEADS,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": HEAD,
        "rel_extent": SEQ,
        "unpadded_vocab_size": VOCAB,
    },
    "Inkling2VisionConfig": {"text_hidden_size": HID, "projection_hidden_dim": 2 * HID, "posemb_grid_size": 4},
    "Kimi_K25VisionConfig": {"pos_emb_height": 4, "pos_emb_width": 4},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "Lfm3VlVisionConfig": {"layer_types": ["conv", "full_attention"]},
    "LiltConfig": {"hidden_size": 48},
    "Llama4VisionConfig": {
        "intermediate_size": 4 * HID,
        "vision_output_dim": HID,
        "projector_input_dim": HID,
        "projector_output_dim": HID,
    },
    "Mamba2Config": {"num_heads": HEADS, "head_dim": 2 * HEAD, "n_groups": 2, "chunk_size": 8},
    "Molmo2AdapterConfig": {"vision_feature_layer": [1, 0], "text_hidden_size": HID},
    "Molmo2VisionConfig": {
        "image_size": [32, 32],
        "num_position_embeddings": PATCHES,
        "num_key_value_heads": HEADS,
    },
    "MuseGlimmerAssistantConfig": {"block_size": 8, "target_layer_ids": [0, 1], "layer_types": ["full_attention"] * 2},
    "MuseGlimmerConfig": MUSE,
    "MuseGlimmerVisionConfig": MUSE_VISION,
    "MuseSparkAudioConfig": {
        "patch_sizes": [4, 4],
        "hidden_sizes": [16, HID],
        "depths": [1, 1],
        "out_hidden_size": HID,
    },
    "MuseSparkConfig": MUSE,
    "MuseSparkTextConfig": {"moe_hidden_size": HID},
    "MuseSparkVisionConfig": MUSE_VISION,
    "NeoMMEConfig": {"sliding_window": 8, "embedding_rank": 16, "head_dim": 16},
    "OneFormerConfig": {
        "is_training": True,
        "num_queries": 8,
        "text_encoder_width": 64,  # a head has 64
        "text_encoder_context_length": SEQ,
        "text_encoder_num_layers": 2,
        "text_encoder_vocab_size": VOCAB,
        "text_encoder_n_ctx": 4,
        "task_seq_len": SEQ,
        "conv_dim": 64,
        "mask_dim": 64,
        "hidden_dim": 64,
        "encoder_feedforward_dim": 2 * HID,
        "dim_feedforward": 2 * HID,
        "decoder_layers": 3,
        "backbone_config": {
            "image_size": 64,
            "patch_size": 4,
            "embed_dim": 16,
            "depths": [1, 1, 1, 1],
            "num_heads": [2, 2, 2, 2],
            "window_size": 4,
            "out_features": ["stage1", "stage2", "stage3", "stage4"],
        },
    },
    "PaddleOCRTextConfig": MROPE,
    "Pix2StructVisionConfig": {"patch_embed_hidden_size": 24, "seq_len": 32},
    "Qwen2_5OmniAudioEncoderConfig": AUDIO,
    "Qwen2_5OmniBigVGANConfig": {"mel_dim": 8, "upsample_initial_channel": 64},
    "Qwen2_5OmniTextConfig": MROPE,
    "Qwen2_5OmniVisionEncoderConfig": NARROW,
    "Qwen3OmniMoeAudioEncoderConfig": {
        **AUDIO,
        "n_window": 50,  # the number of frames after the convolutions is written out for it
        "n_window_infer": 200,
        "downsample_hidden_size": 8,
    },
    "Qwen3OmniMoeCode2WavConfig": {
        "codebook_size": 32,
        "decoder_dim": 64,
        "upsample_rates": [2, 2],
        "num_quantizers": 4,
    },
    "Qwen3OmniMoeTalkerCodePredictorConfig": {"num_code_groups": 4},
    # transformers leaves the weights of these experts uninitialized, so they have none here
    "Qwen3OmniMoeTalkerTextConfig": {
        "moe_intermediate_size": 0,
        "experts_implementation": "batched_mm",
        "shared_expert_intermediate_size": HID,
    },
    "Qwen3OmniMoeVisionEncoderConfig": DEEPSTACK,
    "Sam3LiteTextTextConfig": {"num_hidden_layers": 3},  # the first and the last are convolutions
    "Step3p7TextConfig": {
        "sliding_window": 8,
        "layer_types": SLIDING_FULL,
        "mlp_layer_types": ["dense", "sparse"],
        "share_expert_dim": HID,
    },
    "UnlimitedOcrSamVisionConfig": SAM,
    "XCLIPVisionConfig": {"mit_hidden_size": HID, "mit_intermediate_size": HID, "num_frames": 2},
    "ZambaConfig": {**HYBRID, "attention_hidden_size": 2 * HID, "attention_head_dim": 2 * HEAD},
    "Zamba2Config": {
        **HYBRID,
        "hybrid_layer_ids": [1, 3],
        "attention_hidden_size": 2 * HID,
        "attention_head_dim": 2 * HEAD,
        "mamba_headdim": 8,
        "adapter_rank": 8,
        "chunk_size": 8,
    },
    "ZayaConfig": {"num_experts_per_tok": 1, "layer_types": ["hybrid", "hybrid"], "router_hidden_size": 16},
    "MiniCPMOcrVisionConfig": {"insert_layer_id": 0},
    "MiniCPMV4_6VisionConfig": {"insert_layer_id": 0},
    "MiniCPMV4_7VisionConfig": {"insert_layer_id": 0},
    "Kosmos2_5VisionConfig": {"patch_embed_hidden_size": 24, "max_num_patches": 32},
}

VARIANTS: dict[str, list[dict[str, Any]]] = {"ChameleonModel": [{"swin_norm": True}]}

BATCHES: dict[str, Callable[[Any], Batch]] = {**text_and_images_more.BATCHES}
