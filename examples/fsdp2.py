"""Train a small Llama whose parameters are sharded over processes with FSDP2, through fxckpt.

Shows: `fully_shard` on each layer, then `fxckpt.transform` of the sharded model. The loss falls, and each rank holds
less for backward than without the rewrite.

    torchrun --nproc-per-node 2 examples/fsdp2.py
    torchrun --nproc-per-node 2 examples/fsdp2.py --compile
"""

import argparse
import math
import sys

import torch
import torch.distributed as dist
from common import blocks, byte_text, held_bytes, mib
from rich.console import Console
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import fxckpt

console = Console()


def sharded_model() -> LlamaForCausalLM:
    torch.manual_seed(0)  # all ranks begin with the same weights
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--every-n", type=int, default=1)
    parser.add_argument("--compile", action="store_true", help="torch.compile the transformed model")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    data, _ = byte_text()
    draw = torch.Generator().manual_seed(rank)  # each rank has text of its own

    model = sharded_model()
    t = fxckpt.transform(model, every_n=args.every_n)
    run = torch.compile(t) if args.compile else t
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for step in range(args.steps):
        ids = blocks(data, 4, args.seq, draw)
        loss = run(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / ranks)
        if rank == 0 and (step % max(1, args.steps // 8) == 0 or step == args.steps - 1):
            console.print(f"step {step:3d}  loss of all ranks {losses[-1]:.3f}", highlight=False)

    held = [held_bytes(lambda each=each: each(input_ids=ids, labels=ids).loss, "cpu") for each in (model, run)]
    figures: list[list[int]] = [[]] * ranks
    dist.all_gather_object(figures, held)
    if rank == 0:
        for i, (without, with_it) in enumerate(figures):
            console.print(f"rank {i}: {mib(without)} held for backward without fxckpt, {mib(with_it)} with it")
    dist.destroy_process_group()
    fell = math.isfinite(losses[-1]) and losses[-1] < losses[0]
    return 0 if fell and all(with_it < without for without, with_it in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
