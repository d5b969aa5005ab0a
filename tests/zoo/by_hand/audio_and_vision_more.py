"""Vision, detection, documents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.zoo.batches import MakeBatch, ids, pixels_only, rnd
from tests.zoo.registry import BATCH, HEADS, HID, Batch

Fields = dict[str, Any]

# backbones
_RESNET: Fields = {
    "model_type": "resnet",
    "embedding_size": 16,
    "hidden_sizes": [16, 16, 32, 32],
    "depths": [1, 1, 1, 1],
    "out_features": ["stage4"],
}
_SWIN: Fields = {
    "embed_dim": 16,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4,
    "patch_size": 4,
    "hidden_size": HID,
}
_SWIN_OF_FOUR: Fields = {
    "model_type": "swin",
    "embed_dim": 8,
    "depths": [1, 1, 1, 1],
    "num_layers": 4,
    "num_heads": [2, 2, 2, 2],
    "window_size": 4,
    "patch_size": 4,
    "image_size": 64,
    "hidden_size": 64,
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
}
_VIT_STAGES: Fields = {"image_size": 64, "out_indices": [1, 2]}
_DETR_OF_VIT: Fields = {
    "num_queries": 5,
    "group_detr": 2,
    "decoder_self_attention_heads": HEADS,
    "decoder_cross_attention_heads": HEADS,
    "c2f_num_blocks": 1,
}

# Segment Anything: maps of 16, 8 and 4 by 4, the last of which meets the prompts
_SAM_VISION: Fields = {
    "backbone_config": {
        "hidden_size": 8,
        "image_size": [64, 64],
        "blocks_per_stage": [1, 1, 2, 1],
        "embed_dim_per_stage": [8, 16, 32, 64],
        "num_attention_heads_per_stage": [1, 1, 2, 2],
        "window_size_per_stage": [4, 2, 2, 2],
        "global_attention_blocks": [3],
    },
    "backbone_channel_list": [64, 32, 16, 8],
    "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
    "fpn_hidden_size": HID,
}
_SAM_PROMPT: Fields = {"image_size": 64, "patch_size": 16}
_SAM_MASK: Fields = {"iou_head_hidden_dim": HID}


def _lcnet(model_type: str, strides: list[Any], **fields: Any) -> Fields:
    """A PP-LCNet with one block a stage; blocks are (kernel, channels in, channels out, stride, squeeze)."""
    wide = [16] * (len(strides) - 1) + [32]
    blocks = [[[3, 16, w, s, i == len(wide) - 1]] for i, (w, s) in enumerate(zip(wide, strides, strict=True))]
    names = [f"stage{i + 1}" for i in range(len(strides))]
    return {"model_type": model_type, "block_configs": blocks, "out_features": names[-4:], "scale": 1, **fields}


_HGNET: Fields = {
    "model_type": "hgnet_v2",
    "stem_channels": [3, 8, 8],
    "stem_strides": [2, 1, 1, 1, 1],
    "stage_in_channels": [8, 16, 16, 16],
    "stage_mid_channels": [8, 8, 8, 8],
    "stage_out_channels": [16, 16, 16, 32],
    "hidden_sizes": [16, 16, 16, 32],
    "depths": [1, 1, 1, 1],
    "stage_num_blocks": [1, 1, 1, 1],
    "stage_numb_of_layers": [2, 2, 2, 2],
    "stage_downsample": [True, True, True, True],
    "stage_downsample_strides": [[2, 1], [1, 2], [2, 1], [2, 1]],
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
}

FIELDS: dict[str, Fields] = {
    "ConditionalDetrConfig": {"backbone_config": _RESNET, "num_queries": 5},
    "DabDetrConfig": {"backbone_config": _RESNET, "num_queries": 5},
    "DeformableDetrConfig": {
        "backbone_config": {**_RESNET, "out_features": ["stage2", "stage3", "stage4"]},
        "num_queries": 5,
    },
    "EdgeTamConfig": {"vision_config": {"model_type": "sam2_vision_model", **_SAM_VISION}},  # its own is one of timm
    "EdgeTamMaskDecoderConfig": _SAM_MASK,
    "EdgeTamPromptEncoderConfig": _SAM_PROMPT,
    "EfficientLoFTRConfig": {
        "stage_num_blocks": [1, 1, 2, 2],
        "out_features": [8, 8, 16, HID],
        "num_attention_layers": 2,
        "num_attention_heads": 8,
    },
    "EomtConfig": {"num_queries": 5, "num_blocks": 1},
    "EomtDinov3Config": {"num_queries": 5, "num_blocks": 1},
    "LwDetrConfig": {**_DETR_OF_VIT, "projector_scale_factors": [1.0]},
    "LwDetrViTConfig": {**_VIT_STAGES, "pretrain_image_size": 64, "num_windows": 4, "window_block_indices": [0]},
    "Mask2FormerConfig": {
        "backbone_config": _SWIN_OF_FOUR,
        "feature_size": HID,
        "mask_feature_size": HID,
        "encoder_feedforward_dim": 2 * HID,
        "dim_feedforward": 2 * HID,
        "hidden_dim": HID,
        "num_queries": 5,
    },
    "MaskFormerSwinConfig": _SWIN,
    "MobileViTV2Config": {
        "image_size": 64,
        "patch_size": 2,
        "width_multiplier": 0.25,
        "base_attn_unit_dims": [64, 64, 128],
        "n_attn_blocks": [1, 1, 1],
    },
    "OmDetTurboDecoder": {
        "text_projection_in_dim": 48,
        "text_projection_out_dim": 48,
        "class_embed_dim": 48,
        "task_encoder_hidden_dim": HID,
        "encoder_hidden_dim": HID,
        "decoder_hidden_dim": HID,
        "decoder_num_heads": HEADS,
        "decoder_dim_feedforward": 2 * HID,
        "vision_features_channels": [16, 16, 16],
        "num_queries": 5,
    },
    "PPDocLayoutV2ReadingOrderConfig": {
        "vocab_size": 4,
        "coordinate_size": 5,
        "shape_size": 6,
        "max_2d_position_embeddings": 128,
        "global_pointer_head_size": 8,
    },
    "PPOCRV5MobileRecConfig": {
        "backbone_config": _lcnet("pp_lcnet_v3", [1, 2, 2, 2, 1]),
        "hidden_size": HID,
        "head_out_channels": 16,
    },
    "PPOCRV5ServerRecConfig": {"backbone_config": _HGNET, "hidden_size": HID, "head_out_channels": 16},
    "PPOCRV6SmallDetConfig": {
        "backbone_config": _lcnet("pp_lcnet_v4", [1, 2, 2, 2], stem_channels=[3, 8, 16]),
        "layer_list_out_channels": [16, 16, 16, 32],
        "neck_out_channels": HID,
    },
    "PPOCRV6SmallRecConfig": {
        "backbone_config": _lcnet("pp_lcnet_v4", [1, 1, [2, 1], [2, 1]], stem_channels=[3, 8, 16]),
        "hidden_size": HID,
        "head_out_channels": 16,
    },
    "RfDetrConfig": _DETR_OF_VIT,
    "RfDetrDinov2Config": {**_VIT_STAGES, "num_windows": 2},
    "SLANetConfig": {
        "backbone_config": _lcnet("pp_lcnet", [1, 2, 2, 2, 2]),
        "post_conv_out_channels": HID,
        "hidden_size": HID,
        "max_text_length": 4,
    },
    "Sam2HieraDetConfig": _SAM_VISION["backbone_config"],
    "Sam2MaskDecoderConfig": _SAM_MASK,
    "Sam2PromptEncoderConfig": _SAM_PROMPT,
    "Sam2VisionConfig": _SAM_VISION,
    "Sam3TrackerConfig": {
        "vision_config": {
            "fpn_hidden_size": HID,
            "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
            "backbone_config": {"pretrain_image_size": 32, "window_size": 2, "global_attn_indexes": [1]},
        },
        "mask_decoder_config": _SAM_MASK,
    },
    "SegGptConfig": {
        "image_size": [64, 32],
        "pretrain_image_size": 32,
        "merge_index": 0,
        "intermediate_hidden_state_indices": [1],
    },
    "Swin2SRConfig": {**_SWIN, "patch_size": 1, "image_size": 16},
    "Swinv2Config": {**_SWIN, "pretrained_window_sizes": [0, 0]},
    "TableTransformerConfig": {"backbone_config": _RESNET, "num_queries": 5},
    "TvpConfig": {"backbone_config": _RESNET, "num_frames": 2, "max_img_size": 128, "visual_prompt_size": 16},
    "VitPoseBackboneConfig": {"image_size": [32, 32], "patch_size": [8, 8], "num_experts": 1, "part_features": 8},
}


def _pointed(size: int) -> MakeBatch:
    return lambda config: {
        "pixel_values": rnd(BATCH, 3, size, size),
        "input_points": torch.tensor([[[8.0, 8.0], [20.0, 12.0]]]).expand(BATCH, 1, 2, 2).clone(),
        "input_labels": torch.tensor([[1, 0]]).expand(BATCH, 1, 2).clone(),
    }


def _line(width: int = 64) -> MakeBatch:
    """An image of a line of text, as high as the recognizers take it."""
    return lambda config: {"pixel_values": rnd(BATCH, 3, 48, width)}


def _boxes(config: Any) -> Batch:
    first = torch.tensor([4, 4, 60, 12])
    step = torch.tensor([0, 10, 0, 10])
    boxes = torch.stack([first + i * step for i in range(6)]).expand(BATCH, 6, 4).clone()
    return {"boxes": boxes, "labels": ids(s=6, low=0, high=20), "mask": torch.ones(BATCH, 6, dtype=torch.bool)}


def _omdet(config: Any) -> Batch:
    width = config.class_embed_dim
    return {
        "vision_features": [rnd(BATCH, 16, side, side) for side in (8, 4, 2)],
        "class_features": rnd(3, BATCH, width),
        "task_features": rnd(4, BATCH, width),
        "task_mask": torch.ones(BATCH, 4, dtype=torch.long),
    }


BATCHES: dict[str, Callable[[Any], Batch]] = {
    "ConditionalDetrModel": pixels_only(64),
    "DabDetrModel": pixels_only(64),
    "DeformableDetrModel": pixels_only(64),
    "EdgeTamModel": _pointed(64),
    "EfficientLoFTRModel": lambda config: {"pixel_values": rnd(BATCH, 2, 3, 64, 64)},
    "LwDetrModel": pixels_only(64),
    "Mask2FormerModel": pixels_only(64),
    "OmDetTurboDecoder": _omdet,
    "PPDocLayoutV2ReadingOrder": _boxes,
    "PPOCRV5MobileRecForTextRecognition": _line(256),
    "PPOCRV5ServerRecForTextRecognition": _line(),
    "PPOCRV6SmallDetModel": pixels_only(64),
    "PPOCRV6SmallRecForTextRecognition": _line(),
    "RfDetrModel": pixels_only(64),
    "SLANetForTableRecognition": pixels_only(64),
    "Sam2Model": _pointed(64),
    "Sam3TrackerModel": _pointed(32),
    "SegGptModel": lambda config: {
        "pixel_values": rnd(BATCH, 3, 32, 32),
        "prompt_pixel_values": rnd(BATCH, 3, 32, 32),
        "prompt_masks": rnd(BATCH, 3, 32, 32),
    },
    "TableTransformerModel": pixels_only(64),
    "TvpModel": lambda config: {"input_ids": ids(n=1), "pixel_values": rnd(1, 2, 3, 128, 128)},  # fails for two rows
}
