"""Encoders."""

from __future__ import annotations

from tests.zoo.batches import text, text_nomask
from tests.zoo.registry import VOCAB
from tests.zoo.shrink import hf

for _mt, _cls, _o in [
    ("bert", "BertForMaskedLM", {}),
    ("roberta", "RobertaForMaskedLM", {}),
    ("xlm-roberta", "XLMRobertaForMaskedLM", {}),
    ("electra", "ElectraForMaskedLM", {}),
    ("deberta", "DebertaForMaskedLM", {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}),
    ("deberta-v2", "DebertaV2ForMaskedLM", {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}),
    ("modernbert", "ModernBertForMaskedLM", {}),
    ("albert", "AlbertForMaskedLM", {}),
    ("mpnet", "MPNetForMaskedLM", {}),
    ("distilbert", "DistilBertForMaskedLM", {}),
    ("mobilebert", "MobileBertForMaskedLM", {"intra_bottleneck_size": 32, "true_hidden_size": 32}),
    ("longformer", "LongformerForMaskedLM", {"attention_window": 8}),
    ("nystromformer", "NystromformerForMaskedLM", {"num_landmarks": 4, "segment_means_seq_len": 16}),
    ("fnet", "FNetForMaskedLM", {}),
    ("rembert", "RemBertForMaskedLM", {"input_embedding_size": 16, "output_embedding_size": 32}),
    ("roformer", "RoFormerForMaskedLM", {}),
    ("squeezebert", "SqueezeBertForMaskedLM", {}),
    ("megatron-bert", "MegatronBertForMaskedLM", {}),
    ("ernie", "ErnieForMaskedLM", {}),
    (
        "esm",
        "EsmForMaskedLM",
        {"vocab_size": VOCAB, "pad_token_id": 1, "mask_token_id": 2, "position_embedding_type": "rotary"},
    ),
    ("eurobert", "EuroBertForMaskedLM", {}),
    ("nomic_bert", "NomicBertForMaskedLM", {}),
    ("xmod", "XmodForMaskedLM", {"default_language": "en_XX"}),
    ("ibert", "IBertForMaskedLM", {}),
    ("flaubert", "FlaubertWithLMHeadModel", {}),
    ("xlm", "XLMWithLMHeadModel", {}),
    ("tapas", "TapasForMaskedLM", {"type_vocab_sizes": [3, 8, 8, 2, 8, 8, 2]}),
    ("jina_embeddings_v3", "JinaEmbeddingsV3ForMaskedLM", {}),
]:
    _batch = text_nomask if _mt in ("fnet", "nystromformer") else text
    hf(_mt.replace("-", "_"), "encoder", _mt, _cls, _batch, **_o)
