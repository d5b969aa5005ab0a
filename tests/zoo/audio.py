"""Audio models."""

from __future__ import annotations

from tests.zoo.batches import features, wave_cls, wave_ctc
from tests.zoo.shrink import KEEP, hf

_CONV = {"conv_dim": [16, 16, 16], "conv_stride": [5, 4, 2], "conv_kernel": [10, 4, 2]}
_W2V = dict(
    **_CONV,
    num_feat_extract_layers=KEEP,
    num_conv_pos_embeddings=16,
    num_conv_pos_embedding_groups=2,
    vocab_size=32,
    classifier_proj_size=16,
    mask_time_length=2,
)
for _n, _mt, _cls, _b, _o in [
    ("wavlm", "wavlm", "WavLMForSequenceClassification", wave_cls, _W2V),
    (
        "data2vec_audio",
        "data2vec-audio",
        "Data2VecAudioForCTC",
        wave_ctc,
        {**_W2V, "conv_pos_kernel_size": 3, "num_conv_pos_embeddings": 2},
    ),
    ("unispeech", "unispeech", "UniSpeechForSequenceClassification", wave_cls, _W2V),
    ("sew", "sew", "SEWForCTC", wave_ctc, _W2V),
    ("sew_d", "sew-d", "SEWDForCTC", wave_ctc, _W2V),
    (
        "ast",
        "audio-spectrogram-transformer",
        "ASTForAudioClassification",
        features("input_values", 32, 16),
        {"num_mel_bins": 16, "max_length": 32, "frequency_stride": 8, "time_stride": 8},
    ),
]:
    hf(_n, "audio", _mt, _cls, _b, **_o)
# the usual fine-tuning: a frozen convolutional front end (which also takes `requires_grad = True` out of the forward)
hf(
    "wav2vec2_frozen_cnn",
    "audio",
    "wav2vec2",
    "Wav2Vec2ForSequenceClassification",
    wave_cls,
    post=lambda m: m.freeze_feature_encoder(),
    **_W2V,
)
hf(
    "wavlm_frozen_cnn",
    "audio",
    "wavlm",
    "WavLMForSequenceClassification",
    wave_cls,
    post=lambda m: m.freeze_feature_encoder(),
    **_W2V,
)
