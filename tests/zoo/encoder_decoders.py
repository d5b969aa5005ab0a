"""Encoder-decoders."""

from __future__ import annotations

from tests.zoo.batches import ids, rnd, seq2seq
from tests.zoo.registry import BATCH, VOCAB
from tests.zoo.shrink import hf

for _mt, _cls, _o in [
    ("t5", "T5ForConditionalGeneration", {"decoder_start_token_id": 0}),
    ("mt5", "MT5ForConditionalGeneration", {"decoder_start_token_id": 0}),
    ("bart", "BartForConditionalGeneration", {}),
    ("mbart", "MBartForConditionalGeneration", {}),
    ("pegasus", "PegasusForConditionalGeneration", {}),
    ("pegasus_x", "PegasusXForConditionalGeneration", {"block_size": 8, "num_global_tokens": 4}),
    ("blenderbot", "BlenderbotForConditionalGeneration", {}),
    ("blenderbot-small", "BlenderbotSmallForConditionalGeneration", {}),
    (
        "led",
        "LEDForConditionalGeneration",
        {"attention_window": 8, "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64},
    ),
    (
        "fsmt",
        "FSMTForConditionalGeneration",
        {"src_vocab_size": VOCAB, "tgt_vocab_size": VOCAB, "langs": ["en", "de"], "tie_word_embeddings": True},
    ),
    ("t5gemma", "T5GemmaForConditionalGeneration", {}),
    ("t5gemma2", "T5Gemma2ForConditionalGeneration", {}),
    ("seamless_m4t", "SeamlessM4TForTextToText", {}),
]:
    hf(
        _mt.replace("-", "_"),
        "encdec",
        _mt,
        _cls,
        (lambda cfg: {**seq2seq(cfg), "labels": ids()}) if _mt == "fsmt" else seq2seq,
        **_o,
    )
hf(
    "longt5_tglobal",
    "encdec",
    "longt5",
    "LongT5ForConditionalGeneration",
    seq2seq,
    decoder_start_token_id=0,
    local_radius=4,
    encoder_attention_type="transient-global",
    global_block_size=4,
)
hf(
    "encoder_decoder_bert",
    "encdec",
    "encoder-decoder",
    "EncoderDecoderModel",
    seq2seq,
    encoder={"model_type": "bert"},
    decoder={"model_type": "bert", "is_decoder": True, "add_cross_attention": True},
    decoder_start_token_id=1,
    pad_token_id=0,
)
hf(
    "whisper",
    "encdec",
    "whisper",
    "WhisperForConditionalGeneration",
    lambda cfg: {"input_features": rnd(BATCH, 16, 32), "labels": ids(s=12)},
    num_mel_bins=16,
    max_source_positions=16,
    begin_suppress_tokens=None,
)
hf(
    "moonshine",
    "encdec",
    "moonshine",
    "MoonshineForConditionalGeneration",
    lambda cfg: {"input_values": rnd(BATCH, 3200), "labels": ids(s=12)},
    pad_token_id=0,
    encoder_num_key_value_heads=4,
    decoder_num_key_value_heads=4,
)
