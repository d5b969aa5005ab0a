"""Train a small Llama on real English text through fxckpt, and measure what the rewrite saves.

Shows: one line, `fxckpt.transform`, in an ordinary training loop, run as it is or under `torch.compile`. The loss falls
and generation goes on working; the end shows the explain table and the bytes held for backward without and with it.

    python examples/train_llama.py
    python examples/train_llama.py --mode plain --every-n 1 --no-offload
"""

import argparse
import math
import shutil
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from common import blocks, byte_text, held_bytes, mib
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

import fxckpt

BOS, EOS, PAD, VOCABULARY = 256, 257, 258, 259

console = Console()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--every-n", type=int, default=2, help="recompute layers 1, 1+n, 1+2n, ...")
    parser.add_argument("--no-offload", action="store_true", help="leave boundary activations where they are")
    compiler = any(map(shutil.which, ("c++", "g++", "clang++", "cl")))
    default = "compile" if compiler else "plain"
    parser.add_argument("--mode", choices=["plain", "compile"], default=default, help=f"default here: {default}")
    parser.add_argument("--device", default="cpu")
    return parser.parse_args()


def make_model(seq: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max(seq, 1024),
        use_cache=False,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    return LlamaForCausalLM(config)


@torch.no_grad()
def bits_per_byte(model: LlamaForCausalLM, data: torch.Tensor, seq: int, device: str) -> float:
    """Mean over 32 fixed pieces of held-out text."""
    ids = blocks(data, 32, seq, torch.Generator().manual_seed(1)).to(device)
    model.eval()
    loss = model(input_ids=ids, labels=ids).loss
    model.train()
    return float(loss) / math.log(2)


def sample(model: LlamaForCausalLM, prompt: str, device: str) -> str:
    torch.manual_seed(2)
    ids = torch.tensor([list(prompt.encode())], device=device)
    model.eval()
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=160, do_sample=True, temperature=0.7, use_cache=True
    )
    model.train()
    return bytes(i for i in out[0].tolist() if i < BOS).decode(errors="replace")


def train(
    args: argparse.Namespace,
    model: LlamaForCausalLM,
    step_model: Callable[..., Any],
    draw: Callable[[], dict[str, torch.Tensor]],
) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps, eta_min=2e-4)
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}  {task.fields[speed]:,.0f} tokens/s"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=args.steps, loss=math.nan, speed=0.0)
        for step in range(args.steps):
            start = time.perf_counter()
            loss = step_model(**draw()).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            value, speed = loss.item(), args.batch * args.seq / (time.perf_counter() - start)
            progress.update(task, advance=1, loss=value, speed=speed)
            if step % max(1, args.steps // 10) == 0 or step == args.steps - 1:
                progress.console.print(f"step {step:4d}  loss {value:.3f}  {speed:7,.0f} tokens/s", highlight=False)


def memory_table(runs: dict[str, Callable[..., Any]], batch: dict[str, torch.Tensor], device: str) -> Table:
    table = Table("run", "held for backward, measured", title="one training step", title_justify="left")
    for name, run in runs.items():
        run(**batch).loss.backward()  # compile and warm up
        table.add_row(name, mib(held_bytes(lambda run=run: run(**batch).loss, device)))
    return table


def main() -> int:
    args = arguments()
    train_data, valid_data = byte_text()
    generator = torch.Generator().manual_seed(0)

    def draw() -> dict[str, torch.Tensor]:
        ids = blocks(train_data, args.batch, args.seq, generator).to(args.device)
        return {"input_ids": ids, "labels": ids}

    model = make_model(args.seq).to(args.device)
    t = fxckpt.transform(model, every_n=args.every_n, offload=not args.no_offload)
    step_model = torch.compile(t) if args.mode == "compile" else t
    size = sum(p.numel() for p in model.parameters())
    console.print(f"Llama, {size / 1e6:.1f} M parameters, {len(train_data):,} bytes of text, mode {args.mode}")

    before = bits_per_byte(t, valid_data, args.seq, args.device)
    train(args, t, step_model, draw)
    after = bits_per_byte(t, valid_data, args.seq, args.device)
    console.print(f"held-out text: {before:.2f} -> {after:.2f} bits per byte")
    console.print("sample:", repr(sample(t, "The statement ", args.device)), markup=False, highlight=False)

    report = fxckpt.explain(t)
    console.print(report)
    runs: dict[str, Callable[..., Any]] = {"model": model}
    if args.mode == "compile":
        runs["torch.compile(model)"] = torch.compile(model)
    runs["t" if args.mode == "plain" else "torch.compile(t)"] = step_model
    console.print(memory_table(runs, draw(), args.device))
    offloaded = mib(report.to_dict()["offloaded_bytes"])
    console.print(f"offloaded by t: {offloaded}" + " (on a CPU into the same memory)" * (args.device == "cpu"))

    if not after < before - 0.1:
        console.print("[red]the loss did not fall[/red]")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
