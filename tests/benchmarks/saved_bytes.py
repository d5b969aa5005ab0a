"""Bytes saved for backward and offloaded, for a Llama, without and with the rewrite.

    python -m tests.benchmarks.saved_bytes

Offloaded bytes must be (selected layers) x batch x sequence x hidden x itemsize.
"""

from __future__ import annotations

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fxckpt

MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 8), ("hidden", 256), ("batch", 4), ("seq", 512)):
        parser.add_argument(f"--{name}", type=int, default=default)
    o = parser.parse_args()
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=o.hidden,
        intermediate_size=4 * o.hidden,
        num_hidden_layers=o.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).train()
    ids = torch.randint(0, 1024, (o.batch, o.seq))
    print(f"Llama, {o.layers} layers, hidden {o.hidden}, batch {o.batch}, sequence {o.seq}, fp32 (MiB)")
    print("every_n | saved without | saved | offloaded | layers x batch x sequence x hidden x 4 | recomputed FLOPs")
    for every_n in (1, 2, 3):
        t = fxckpt.transform(model, every_n=every_n, offload=True, verify=True)
        t(input_ids=ids, labels=ids).loss.backward()
        figures = fxckpt.explain(t).to_dict()
        formula = len(fxckpt.selected_layers(t)) * o.batch * o.seq * o.hidden * 4
        assert figures["offloaded_bytes"] == formula, (figures["offloaded_bytes"], formula)
        saved = [figures[k] / MIB for k in ("baseline_saved_bytes", "saved_bytes", "offloaded_bytes")]
        share = figures["recomputed_flops"] / figures["flops"]
        print(every_n, *(f"{v:.1f}" for v in saved), f"{formula / MIB:.1f}", f"{share:.1%}", sep=" | ")


if __name__ == "__main__":
    main()
