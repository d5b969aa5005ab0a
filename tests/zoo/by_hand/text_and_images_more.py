"""Batches of the models in ``text_and_images.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.zoo.batches import MakeBatch, ids, rnd, text
from tests.zoo.registry import BATCH, HID, SEQ, Batch

PATCH = 8
PIXELS = 3 * PATCH**2
PATCHES = 16


def words(config: Any) -> Batch:
    return text(config, labels=False)


def typed_words(config: Any) -> Batch:
    """The first four tokens go to the experts of images."""
    return {**words(config), "moe_mm_token_type_ids": (torch.arange(SEQ) < 4).int().expand(BATCH, -1).clone()}


def embedded(config: Any) -> Batch:
    return {"inputs_embeds": rnd(BATCH, SEQ, config.hidden_size)}


def tower(*patch: int, lead: tuple[int, ...] = (), **more: Any) -> MakeBatch:
    """Two images of four by four patches, all in one row."""

    def make(config: Any) -> Batch:
        batch: Batch = {
            "pixel_values": rnd(*lead, BATCH * PATCHES, *patch),
            "grid_thw": torch.tensor([[1, 4, 4]] * BATCH),
        }
        return batch | {name: value.clone() for name, value in more.items()}

    return make


def in_a_row(config: Any) -> Batch:
    """Two images of four by four patches, one patch beside the other."""
    sizes = torch.tensor([[4, 4]] * BATCH, dtype=torch.int32)
    return {"pixel_values": rnd(1, 3, PATCH, PATCH * PATCHES * BATCH), "target_sizes": sizes}


def pixels(size: int) -> MakeBatch:
    return lambda config: {"pixel_values": rnd(BATCH, 3, size, size)}


def mels(config: Any) -> Batch:
    """Two recordings, one after the other, as whole windows and a half."""
    window = 2 * config.n_window
    lengths = torch.tensor([2 * window, window + window // 2])
    return {"input_features": rnd(config.num_mel_bins, int(lengths.sum())), "feature_lens": lengths}


def chunks(config: Any) -> Batch:
    return {"input_features": rnd(BATCH, config.feature_size, 32), "chunk_sample_lengths": torch.tensor([128, 96])}


def merged_patches(config: Any) -> Batch:
    side = config.spatial_merge_size * config.patch_size
    return {"pixel_values": rnd(BATCH * 4, side, side, 3), "image_grid_thw": torch.tensor([[1, 2, 2]] * BATCH)}


def placed_patches(config: Any) -> Batch:
    places = torch.cartesian_prod(torch.arange(4), torch.arange(4))
    return {"pixel_values": rnd(BATCH, PATCHES, PIXELS), "pixel_position_ids": places.expand(BATCH, -1, -1).clone()}


def flattened_patches(config: Any) -> Batch:
    """Each patch with its row and column before it."""
    places = torch.cartesian_prod(torch.arange(4), torch.arange(4)).expand(BATCH, -1, -1)
    patches = rnd(BATCH, PATCHES, config.patch_embed_hidden_size)
    return {
        "flattened_patches": torch.cat([places.float(), patches], dim=-1),
        "attention_mask": torch.ones(BATCH, PATCHES),
    }


def with_images(config: Any) -> Batch:
    return {
        **words(config),
        "pixel_values": rnd(BATCH, 1, 3, 32, 32),
        "image_attention_mask": torch.ones(BATCH, SEQ, 1),
    }


def canvas(config: Any) -> Batch:
    length, vocab = config.canvas_length, config.text_config.vocab_size
    return {
        "input_ids": ids(),
        "decoder_input_ids": ids(s=length),
        "self_conditioning_logits": rnd(BATCH, length, vocab),
    }


def draft(config: Any) -> Batch:
    return {
        "noise_embeds": rnd(BATCH, config.block_size, HID),
        "context_hidden_states": rnd(BATCH, SEQ, HID * len(config.target_layer_ids)),
    }


def task(config: Any) -> Batch:
    texts = config.num_queries - config.text_encoder_n_ctx
    return {
        "pixel_values": rnd(BATCH, 3, 64, 64),
        "task_inputs": ids(s=config.task_seq_len),
        "text_inputs": ids(n=BATCH * texts, s=config.text_encoder_context_length).view(BATCH, texts, -1),
    }


def protein(config: Any) -> Batch:
    """A chain of eight residues with two atoms each, and two aligned sequences."""
    from transformers.models.esmfold2.modeling_esmfold2 import EsmFold2AtomInputs

    n, atoms = 8, 16
    none = torch.zeros(BATCH, n, dtype=torch.long)
    places = torch.arange(n).expand(BATCH, n).clone()
    residue = torch.arange(atoms).expand(BATCH, atoms) // 2
    return {
        "token_index": places,
        "residue_index": places,
        "asym_id": none,
        "sym_id": none,
        "entity_id": none,
        "mol_type": none,
        "res_type": ids(s=n, high=22),
        "token_bonds": torch.zeros(BATCH, n, n, 1),
        "attention_mask": torch.ones(BATCH, n, dtype=torch.bool),
        "atom_inputs": EsmFold2AtomInputs(
            ref_pos=rnd(BATCH, atoms, 3),
            ref_charge=torch.zeros(BATCH, atoms),
            atom_attention_mask=torch.ones(BATCH, atoms, dtype=torch.bool),
            ref_element=ids(s=atoms, high=9),
            ref_atom_name_chars=ids(s=atoms * config.max_chars, high=8).view(BATCH, atoms, -1),
            ref_space_uid=residue,
            atom_to_token=residue,
        ),
        "msa": ids(s=2 * n, high=22).view(BATCH, 2, n),
        "input_ids": ids(s=n, high=22),
    }


BATCHES: dict[str, Callable[[Any], Batch]] = {
    "ChameleonModel": words,
    "Cosmos3EdgeVisionModel": tower(PIXELS),
    "DeepseekOcr2VisionModel": pixels(64),
    "DiffusionGemmaModel": canvas,
    "Dots3NoteAudioModel": chunks,
    "Dots3NoteVisionModel": tower(PIXELS),
    "Ernie4_5_VLMoeTextModel": typed_words,
    "EsmFold2Model": protein,
    "Gemma4VisionModel": placed_patches,
    "GlmImageVisionModel": tower(PIXELS),
    "HunYuanVLVisionTransformer": tower(PIXELS),
    "IdeficsModel": with_images,
    "Inkling2VisionModel": merged_patches,
    "Kimi_K25VisionModel": tower(3, PATCH, PATCH),
    "Lfm3VlVisionModel": tower(2 * PIXELS),
    "MiniMaxM3VLVisionModel": tower(2 * PIXELS),
    "Molmo2VisionModel": lambda config: {"pixel_values": rnd(BATCH, PATCHES, PIXELS)},
    "MuseGlimmerAssistantModel": draft,
    "MuseGlimmerVisionModel": tower(2 * PIXELS),
    "MuseSparkVisionModel": tower(2 * PIXELS),
    "NeoMMEModel": words,
    "OneFormerModel": task,
    "PaddleOCRVisionModel": tower(3, PATCH, PATCH, lead=(1,)),
    "Pix2StructForConditionalGeneration": lambda config: {
        **flattened_patches(config.vision_config),
        "decoder_input_ids": ids(s=12),
    },
    "Qwen2_5OmniAudioEncoder": mels,
    "Qwen3OmniMoeAudioEncoder": mels,
    "Qwen3OmniMoeCode2WavTransformerModel": embedded,
    "Qwen3OmniMoeTalkerCodePredictorModel": embedded,
    "Qwen3OmniMoeTalkerModel": embedded,
    "UnlimitedOcrVisionModel": pixels(64),
    "VideoLlama3VisionModel": tower(PIXELS, merge_sizes=torch.tensor([2, 2])),
    "XCLIPVisionModel": pixels(32),
    "MiniCPMOcrVisionModel": in_a_row,
    "MiniCPMV4_6VisionModel": in_a_row,
    "MiniCPMV4_7VisionModel": in_a_row,
    "Kosmos2_5VisionModel": flattened_patches,
}
