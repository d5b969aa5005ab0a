"""Multimodal models, and a few odd ones (family "other")."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.batches import clip_batch, gen, ids, rnd, text, vlm
from tests.zoo.registry import BATCH, SEQ, Batch
from tests.zoo.shrink import hf

hf("clip", "multimodal", "clip", "CLIPModel", clip_batch)
hf("siglip_pair", "multimodal", "siglip", "SiglipModel", clip_batch)
hf(
    "blip_2",
    "multimodal",
    "blip-2",
    "Blip2ForConditionalGeneration",
    vlm(4, "image_token_index"),
    num_query_tokens=4,
    image_token_index=120,
    qformer_config={"cross_attention_frequency": 2},
    text_config={"model_type": "opt", "word_embed_proj_dim": 32},
)
hf("llava", "multimodal", "llava", "LlavaForConditionalGeneration", vlm(16, "image_token_index"))


def _qwen_vl_extra(cfg: Any, x: torch.Tensor) -> Batch:
    return {"image_grid_thw": torch.tensor([[1, 4, 4]] * BATCH), "mm_token_type_ids": (x == cfg.image_token_id).int()}


_QV = {"patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2}
hf(
    "qwen2_vl",
    "multimodal",
    "qwen2_vl",
    "Qwen2VLForConditionalGeneration",
    vlm(4, pixel_shape=(2 * 16, 3 * 2 * 4 * 4), extra=_qwen_vl_extra),
    vision_config=_QV,
    text_config={"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}},
)
hf(
    "qwen2_5_vl",
    "multimodal",
    "qwen2_5_vl",
    "Qwen2_5_VLForConditionalGeneration",
    vlm(4, pixel_shape=(2 * 16, 3 * 2 * 4 * 4), extra=_qwen_vl_extra),
    vision_config=dict(**_QV, window_size=8, out_hidden_size=32, fullatt_block_indexes=[1, 3]),
    text_config={"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}},
)
hf(
    "qwen3_vl",
    "multimodal",
    "qwen3_vl",
    "Qwen3VLForConditionalGeneration",
    vlm(4, pixel_shape=(2 * 16, 3 * 2 * 4 * 4), extra=_qwen_vl_extra),
    vision_config=dict(**_QV, out_hidden_size=32, num_position_embeddings=16, deepstack_visual_indexes=[0, 1, 2]),
    text_config={"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}},
)
hf(
    "smolvlm",
    "multimodal",
    "smolvlm",
    "SmolVLMForConditionalGeneration",
    vlm(4, pixel_shape=(BATCH, 1, 3, 32, 32)),
    scale_factor=2,
)
hf(
    "vilt",
    "multimodal",
    "vilt",
    "ViltForQuestionAnswering",
    lambda cfg: {
        **text(cfg, labels=False),
        "pixel_values": rnd(BATCH, 3, 32, 32),
        "labels": torch.rand(BATCH, cfg.num_labels, generator=gen()),
    },
)
hf(
    "internvl",
    "multimodal",
    "internvl",
    "InternVLForConditionalGeneration",
    vlm(4),
    image_seq_length=4,
    vision_config={"image_size": [32, 32], "patch_size": [8, 8]},
)
hf(
    "mllama",
    "multimodal",
    "mllama",
    "MllamaForConditionalGeneration",
    vlm(
        1,
        "image_token_index",
        pixel_shape=(BATCH, 1, 1, 3, 32, 32),
        extra=lambda cfg, x: {
            "aspect_ratio_ids": torch.ones(2, 1, dtype=torch.long),
            "aspect_ratio_mask": torch.ones(2, 1, 1, dtype=torch.long),
            "cross_attention_mask": torch.ones(2, 32, 1, 1, dtype=torch.long),
        },
    ),
    image_token_index=120,
    vision_config={
        "attention_heads": 4,
        "num_global_layers": 2,
        "vision_output_dim": 96,
        "max_num_tiles": 1,
        "intermediate_layers_indices": [1, 3],
        "supported_aspect_ratios": [[1, 1]],
    },
    text_config={"cross_attention_layers": [1, 3]},
)
hf(
    "florence2",
    "multimodal",
    "florence2",
    "Florence2ForConditionalGeneration",
    lambda cfg: {**vlm(2)(cfg), "labels": ids(s=12)},
    image_token_id=120,
    vision_config={
        "depths": [1, 1, 2, 1],
        "embed_dim": [16, 16, 32, 32],
        "num_heads": [2, 2, 4, 4],
        "num_groups": [2, 2, 4, 4],
        "window_size": 4,
        "projection_dim": 32,
    },
)
hf(
    "kosmos_2",
    "multimodal",
    "kosmos-2",
    "Kosmos2ForConditionalGeneration",
    lambda cfg: {
        **text(cfg, s=24),
        "pixel_values": rnd(BATCH, 3, 32, 32),
        "image_embeds_position_mask": ((torch.arange(24) >= 2) & (torch.arange(24) < 6)).long().expand(2, 24).clone(),
    },
    latent_query_num=4,
    text_config={"layers": 4, "attention_heads": 4},
)

# time series and other odd ones
hf(
    "layoutlmv3",
    "other",
    "layoutlmv3",
    "LayoutLMv3ForTokenClassification",
    lambda cfg: {
        **text(cfg, labels=False),
        "pixel_values": rnd(BATCH, 3, 32, 32),
        "bbox": torch.tensor([1, 2, 5, 6]).expand(2, SEQ, 4).clone(),
        "labels": ids(low=0, high=2),
    },
    input_size=32,
    max_2d_position_embeddings=64,
    coordinate_size=5,
    shape_size=6,
    hidden_size=32,
)
hf(
    "decision_transformer_gpt2",
    "other",
    "decision_transformer",
    "DecisionTransformerModel",
    lambda cfg: {
        "states": rnd(2, 6, 5),
        "actions": rnd(2, 6, 3),
        "rewards": rnd(2, 6, 1),
        "returns_to_go": rnd(2, 6, 1),
        "timesteps": torch.arange(6).expand(2, 6).clone(),
        "attention_mask": torch.ones(2, 6),
    },
    state_dim=5,
    act_dim=3,
    max_ep_len=16,
    loss=lambda o: o.action_preds.square().mean() + o.state_preds.square().mean() + o.return_preds.square().mean(),
)
