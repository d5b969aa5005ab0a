"""Audio and time series; with ``audio_and_vision_more`` also vision, detection, documents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.zoo.batches import MakeBatch, ids, rnd
from tests.zoo.by_hand import audio_and_vision_more as more
from tests.zoo.registry import BATCH, HEADS, HID, SEQ, Batch

Fields = dict[str, Any]

# waveforms: a short convolutional front end
_WAVE: Fields = {
    "conv_dim": [16, 16, 16],
    "conv_stride": [5, 4, 2],
    "conv_kernel": [10, 4, 2],
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
}
_LAYER_NORM_CONV: Fields = {"feat_extract_norm": "layer"}
_STABLE: Fields = {"do_stable_layer_norm": True, "feat_extract_norm": "layer"}

# encoders of 30 seconds of mel features, cut down to 32 frames
_MELS: Fields = {"num_mel_bins": 16, "max_source_positions": 16}

# codecs: one position per 16 samples, one latent per 32
_CODEC: Fields = {"num_filters": 4, "upsampling_ratios": [4, 2, 2], "upsample_groups": HID, "sliding_window": 8}
_BERT: Fields = {"feature_projection_input_dim": 16, "conv_depthwise_kernel_size": 7}
_QUANTIZED: Fields = {
    "num_key_value_heads": HEADS,
    "encoder_hidden_size": 4,
    "downsampling_ratios": [2, 2, 4],
    "quantization_dim": 2 * HID,
    "quantization_levels": [4, 4, 4, 4],
    "initializer_range": 0.2,  # with a smaller one every code is 0, and so is the sound
    "semantic_model_config": _BERT,
}
_FLOW: Fields = {"condition_dim": HID, "frequency_embedding_size": 16}

_SEAMLESS: Fields = {
    "speech_encoder_layers": 2,
    "speech_encoder_attention_heads": HEADS,
    "speech_encoder_intermediate_size": 2 * HID,
    "feature_projection_input_dim": 16,
    "conv_depthwise_kernel_size": 7,
    "adaptor_kernel_size": 4,
    "adaptor_stride": 4,
    "t2u_vocab_size": 64,
    "t2u_encoder_layers": 2,
    "t2u_encoder_ffn_dim": 2 * HID,
    "t2u_encoder_attention_heads": HEADS,
    "t2u_decoder_layers": 2,
    "t2u_decoder_ffn_dim": 2 * HID,
    "t2u_decoder_attention_heads": HEADS,
    "t2u_max_position_embeddings": 128,
}

_SERIES: Fields = {"prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2, 3], "num_time_features": 1}

FIELDS: dict[str, Fields] = {
    **more.FIELDS,
    "AudioFlamingo3EncoderConfig": _MELS,
    "AutoformerConfig": {**_SERIES, "label_length": 2, "moving_average": 3},
    "ClapAudioConfig": {
        "spec_size": 32,
        "num_mel_bins": 16,
        "window_size": 4,
        "patch_size": 4,
        "patch_embeds_hidden_size": 16,
        "depths": [2, 2],
        "num_attention_heads": [2, 4],
    },
    "CohereAsrConfig": {"encoder_config": {"num_mel_bins": 16, "subsampling_conv_channels": 16}},
    "DiaDecoderConfig": {
        "cross_hidden_size": HID,
        "cross_num_attention_heads": HEADS,
        "cross_num_key_value_heads": HEADS,
        "cross_head_dim": HID // HEADS,
    },
    "FunAsrNanoEncoderConfig": {"num_mel_bins": 8, "num_timestamp_prediction_layers": 1, "fsmn_kernel_size": 3},
    "GlmAsrEncoderConfig": {"num_mel_bins": 16},
    "GradiumPhononTTSConfig": {
        "flow_head_config": _FLOW,
        "audio_prompt_dim": 16,
        "duration_delta_embedding_dim": 16,
    },
    "GraniteSpeech5EncoderConfig": {
        "num_key_value_heads": HEADS,
        "num_mel_bins": 4,
        "context_size": 8,
        "subsample_layers": [0],
    },
    "HubertConfig": _WAVE,
    "InformerConfig": _SERIES,
    "KyutaiSpeechToTextConfig": {"num_codebooks": 4, "codebook_vocab_size": 17},
    "MimiEncoderConfig": _CODEC,
    "MoonshineStreamingConfig": {"num_key_value_heads": HEADS},
    "MossTranscribeDiarizeAudioConfig": _MELS,
    "NeuCodecConfig": _QUANTIZED,
    "PeAudioEncoderConfig": {
        "dac_config": {"downsampling_ratios": [2, 4], "encoder_hidden_size": 8, "codebook_dim": 16},
    },
    "PeVideoEncoderConfig": {"vision_config": {"model_type": "vit", "num_labels": 16}},
    "PocketTTSAudioTokenizerEncoderConfig": {**_CODEC, "latent_stride": 2, "latent_dim": 16},
    "PocketTTSConfig": {"flow_head_config": _FLOW},
    "Qwen2AudioEncoderConfig": _MELS,
    "Qwen3ASREncoderConfig": {**_MELS, "n_window_infer": 100, "downsample_hidden_size": 8},
    "SEWConfig": _WAVE,
    "SEWDConfig": {**_WAVE, "position_buckets": 16},
    "SeamlessM4TConfig": {**_SEAMLESS, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2},
    "SeamlessM4Tv2Config": {
        **_SEAMLESS,
        "char_vocab_size": 64,
        "t2u_variance_predictor_embed_dim": HID,
        "t2u_variance_predictor_hidden_dim": 16,
    },
    "Speech2TextConfig": {"input_feat_per_channel": 16, "conv_channels": HID},
    "SpeechT5Config": _WAVE,
    "TimeSeriesTransformerConfig": _SERIES,
    "TimesFm2_5Config": {"patch_length": 8},
    "UniSpeechConfig": _WAVE,
    "UniSpeechSatConfig": _WAVE,
    "VoxtralEncoderConfig": _MELS,
    "VoxtralRealtimeEncoderConfig": _MELS,
    "Wav2Vec2BertConfig": _BERT,
    "Wav2Vec2Config": _WAVE,
    "Wav2Vec2ConformerConfig": _WAVE,
    "WavLMConfig": _WAVE,
    "Xcodec2Config": _QUANTIZED,
}

VARIANTS: dict[str, list[Fields]] = {
    "HubertModel": [_STABLE],
    "SEWDModel": [_LAYER_NORM_CONV],
    "SEWModel": [_LAYER_NORM_CONV],
    "SpeechT5EncoderWithSpeechPrenet": [_LAYER_NORM_CONV],
    "UniSpeechModel": [_STABLE],
    "UniSpeechSatModel": [_STABLE],
    "Wav2Vec2ConformerModel": [_LAYER_NORM_CONV],
    "Wav2Vec2Model": [_STABLE],
    "WavLMModel": [_STABLE],
}


def _features(bins: int = 16, last: bool = False, mask: str = "") -> MakeBatch:
    """Mel features of 32 frames, (bins, frames) or with the bins last; the second row padded where there is a mask."""

    def make(config: Any) -> Batch:
        batch: Batch = {"input_features": rnd(BATCH, 32, bins) if last else rnd(BATCH, bins, 32)}
        if mask:
            batch[mask] = torch.ones(BATCH, 32, dtype=torch.long)
            batch[mask][1, -8:] = 0
        return batch

    return make


def _waveform(config: Any) -> Batch:
    return {"input_values": rnd(BATCH, 1, 320)}


def _wave_and_features(config: Any) -> Batch:
    return {**_waveform(config), "input_features": rnd(BATCH, 20, 16)}


def _series(config: Any) -> Batch:
    past = config.context_length + max(config.lags_sequence)
    return {
        "past_values": rnd(BATCH, past),
        "past_time_features": rnd(BATCH, past, 1),
        "past_observed_mask": torch.ones(BATCH, past),
        "future_values": rnd(BATCH, config.prediction_length),
        "future_time_features": rnd(BATCH, config.prediction_length, 1),
    }


def _codes(config: Any) -> Batch:
    """Codes of each codebook, and something that they follow."""
    return {
        "input_ids": ids(n=BATCH * config.num_codebooks, s=12),
        "encoder_hidden_states": rnd(BATCH, 8, config.hidden_size),
    }


def _dia(config: Any) -> Batch:
    channels = config.decoder_config.num_channels
    return {"input_ids": ids(), "decoder_input_ids": ids(s=12 * channels).view(BATCH, 12, channels)}


BATCHES: dict[str, Callable[[Any], Batch]] = {
    **more.BATCHES,
    "AudioFlamingo3Encoder": _features(mask="input_features_mask"),
    "AutoformerModel": _series,
    "ClapAudioModel": lambda config: {"input_features": rnd(BATCH, 1, 64, 16)},
    "DiaForConditionalGeneration": _dia,
    "FunAsrNanoEncoder": _features(bins=56, last=True, mask="input_features_mask"),
    "GlmAsrEncoder": _features(),
    "GraniteSpeech5Encoder": _features(last=True, mask="attention_mask"),
    "InformerModel": _series,
    "KyutaiSpeechToTextModel": lambda config: {"input_ids": ids(s=SEQ * 5, low=0, high=17).view(BATCH, SEQ, 5)},
    "MimiEncoderModel": _waveform,
    "MossTranscribeDiarizeAudioModel": _features(),
    "MusicgenForCausalLM": _codes,
    "MusicgenMelodyForCausalLM": _codes,
    "NeuCodecModel": _wave_and_features,
    "PeAudioEncoder": _waveform,
    "PeAudioVideoEncoder": lambda config: {**_waveform(config), "pixel_values_videos": rnd(BATCH, 4, 3, 32, 32)},
    "PeVideoEncoder": lambda config: {"pixel_values_videos": rnd(BATCH, 4, 3, 32, 32)},
    "PocketTTSAudioTokenizerEncoderModel": _waveform,
    "Qwen2AudioEncoder": _features(),
    "Qwen3ASREncoder": lambda config: {
        "input_features": rnd(BATCH, 16, 200),
        "input_features_mask": (torch.arange(200) < torch.tensor([[200], [130]])).long(),
    },
    "SeamlessM4Tv2TextToUnitForConditionalGeneration": lambda config: {
        "inputs_embeds": rnd(BATCH, 6, HID),
        "char_input_ids": ids(s=12, vocab=64),
        "char_count_per_id": torch.full((BATCH, 6), 2),
    },
    "TimeSeriesTransformerModel": _series,
    "TimesFm2_5Model": lambda config: {"past_values": rnd(BATCH, 64)},
    "VoxtralEncoder": _features(),
    "VoxtralRealtimeEncoder": _features(),
    "VoxtralRealtimeTextModel": lambda config: {"input_ids": ids(), "t_cond": rnd(1, 1, HID)},
    "Wav2Vec2BertModel": _features(last=True),
    "Xcodec2Model": _wave_and_features,
}
