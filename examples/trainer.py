"""fxckpt under the Hugging Face Trainer: its own switches steer the rewrite.

Shows: with a transformed model, `TrainingArguments(gradient_checkpointing=True, gradient_checkpointing_kwargs={...})`
means fxckpt's rewrite instead of transformers' checkpointing, so `offload` works without an accelerator too, and under
`torch_compile=True`.

    python examples/trainer.py
    python examples/trainer.py --compile
"""

import argparse
import sys
import tempfile

import torch
from common import byte_text
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import fxckpt

console = Console()


def dataset(length: int) -> list[dict[str, torch.Tensor]]:
    data, _ = byte_text()
    return [{"input_ids": piece, "labels": piece} for piece in data.split(length) if len(piece) == length]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--compile", action="store_true", help="torch_compile=True")
    args = parser.parse_args()

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=None,
    )
    t = fxckpt.transform(LlamaForCausalLM(config))

    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder,
            max_steps=args.steps,
            per_device_train_batch_size=8,
            learning_rate=3e-3,
            logging_steps=max(1, args.steps // 5),
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"every_n_layers": 2, "offload": True},
            torch_compile=args.compile,
            save_strategy="no",
            report_to="none",
            use_cpu=not torch.cuda.is_available(),
        )
        trainer = Trainer(model=t, args=settings, train_dataset=dataset(128))
        trainer.train()
        trainer.save_model(folder)
        LlamaForCausalLM.from_pretrained(folder)  # what was saved is an ordinary Llama

    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    console.print(fxckpt.explain(t))
    console.print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}", highlight=False)
    return 0 if losses[-1] < losses[0] else 1


if __name__ == "__main__":
    sys.exit(main())
