"""Vision models."""

from __future__ import annotations

import torch

from tests.zoo.batches import box_loss, ids, image, image64, masked_image, pixels_only, rnd, semantic, video
from tests.zoo.registry import BATCH
from tests.zoo.shrink import KEEP, hf

for _mt, _cls, _b, _o in [
    ("vit", "ViTForImageClassification", image, {}),
    ("deit", "DeiTForImageClassification", image, {}),
    ("data2vec-vision", "Data2VecVisionForImageClassification", image, {}),
    ("dinov2_with_registers", "Dinov2WithRegistersForImageClassification", image, {}),
    ("ijepa", "IJepaForImageClassification", image, {}),
    ("siglip", "SiglipForImageClassification", image, {}),
    (
        "swin",
        "SwinForImageClassification",
        image,
        {
            "embed_dim": 16,
            "depths": [2, 4],
            "num_heads": [2, 4],
            "window_size": 4,
            "patch_size": 4,
            "num_layers": KEEP,
            "hidden_size": KEEP,
        },
    ),
    (
        "donut-swin",
        "DonutSwinForImageClassification",
        image,
        {"embed_dim": 16, "depths": [2, 4], "num_heads": [2, 4], "window_size": 4, "patch_size": 4},
    ),
    (
        "convnext",
        "ConvNextForImageClassification",
        image64,
        {"hidden_sizes": [16, 16, 32, 32], "depths": [2, 2, 4, 2], "patch_size": 4},
    ),
    (
        "regnet",
        "RegNetForImageClassification",
        image64,
        {"embedding_size": 16, "hidden_sizes": [16, 16, 32, 32], "depths": [2, 2, 4, 2], "groups_width": 8},
    ),
    ("mobilenet_v2", "MobileNetV2ForImageClassification", image64, {"depth_multiplier": 0.25}),
    (
        "efficientnet",
        "EfficientNetForImageClassification",
        image64,
        {"width_coefficient": 0.25, "depth_coefficient": 1.0, "hidden_dim": 320},
    ),
    (
        "pvt",
        "PvtForImageClassification",
        image64,
        {
            "hidden_sizes": [16, 16, 32, 32],
            "num_attention_heads": [1, 2, 2, 4],
            "mlp_ratios": [2, 2, 2, 2],
            "image_size": 64,
            "num_labels": KEEP,
        },
    ),
    (
        "levit",
        "LevitForImageClassification",
        image64,
        {
            "image_size": 64,
            "hidden_sizes": [16, 32, 32],
            "num_attention_heads": [2, 2, 4],
            "depths": [2, 2, 2],
            "key_dim": [8, 8, 8],
            "down_ops": [["Subsample", 8, 2, 4, 2, 2], ["Subsample", 8, 4, 4, 2, 2]],
            "patch_size": 16,
        },
    ),
    (
        "yolos",
        "YolosForObjectDetection",
        pixels_only(32),
        {"image_size": [32, 32], "num_detection_tokens": 5, "loss": box_loss},
    ),
    (
        "dpt",
        "DPTForSemanticSegmentation",
        semantic(32),
        {"backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [8, 16, 16, 32], "fusion_hidden_size": 16},
    ),
    ("timesformer", "TimesformerForVideoClassification", video(4), {"num_frames": 4}),
    ("vivit", "VivitForVideoClassification", video(4), {"num_frames": 4, "tubelet_size": [2, 8, 8]}),
    (
        "vjepa2",
        "VJEPA2ForVideoClassification",
        lambda cfg: {"pixel_values_videos": rnd(BATCH, 4, 3, 32, 32), "labels": torch.arange(BATCH) % 2},
        {
            "crop_size": 32,
            "frames_per_clip": 4,
            "num_pooler_layers": 1,
            "pred_hidden_size": 24,
            "pred_num_attention_heads": 2,
            "pred_num_hidden_layers": 2,
            "hidden_size": 48,
        },
    ),
]:
    hf(_mt.replace("-", "_"), "vision", _mt, _cls, _b, **_o)

hf(
    "beit_mim",
    "vision",
    "beit",
    "BeitForMaskedImageModeling",
    lambda cfg: {**masked_image()(cfg), "labels": ids(s=8, low=0).reshape(-1)},
    use_mask_token=True,
)
hf("vit_mim", "vision", "vit", "ViTForMaskedImageModeling", masked_image(), encoder_stride=8)
_R18 = {
    "model_type": "resnet",
    "embedding_size": 16,
    "hidden_sizes": [16, 16, 32, 32],
    "depths": [1, 1, 1, 1],
    "out_features": ["stage2", "stage3", "stage4"],
}
hf(
    "detr",
    "vision",
    "detr",
    "DetrForObjectDetection",
    pixels_only(64),
    num_queries=5,
    loss=box_loss,
    backbone_config={**_R18, "out_features": ["stage4"]},
)
hf(
    "upernet_swin",
    "vision",
    "upernet",
    "UperNetForSemanticSegmentation",
    semantic(64),
    hidden_size=32,
    pool_scales=[1, 2],
    use_auxiliary_head=False,
    backbone_config={
        "model_type": "swin",
        "embed_dim": 16,
        "depths": [2, 2, 2, 2],
        "num_heads": [2, 2, 2, 2],
        "window_size": 4,
        "patch_size": 4,
        "image_size": 64,
        "out_features": ["stage1", "stage2", "stage3", "stage4"],
    },
)
