"""Peaks of a step in which the same layers run more than once: eager, compiled, and with fxckpt.

    python -m tests.benchmarks.traversals

Both models are checkpointed layer by layer with ``torch.utils.checkpoint`` for the peers. "two traversals" is the model
of pytorch/pytorch#193193: all layers, and all again with one input more. "one shared layer" runs one layer many times.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

import fxckpt
from tests.helpers import DEVICE
from tests.situations.models import Batch
from tests.situations.test_memory import ContextBlock, TwoPass, warm_peak

WIDTH, DEPTH, ROWS = 128, 6, 2048


class Shared(nn.Module):
    """One layer, run `DEPTH` times."""

    def __init__(self) -> None:
        super().__init__()
        self.block = ContextBlock(WIDTH)
        self.eager_checkpoint = False

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        for _ in range(DEPTH):
            if self.eager_checkpoint:
                x = torch.utils.checkpoint.checkpoint(self.block, x, context, use_reentrant=False)
            else:
                x = self.block(x, context)
        return x.square().mean()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "two traversals": lambda: TwoPass(WIDTH, DEPTH),
    "one shared layer": Shared,
}


def main() -> None:
    torch.set_num_threads(1)
    print("| model | eager, nothing recomputed | eager | `torch.compile` | fxckpt | fxckpt / eager |")
    print("|---|---|---|---|---|---|")
    for name, make in MODELS.items():
        whole = peak(make, checkpoint=False)
        eager = peak(make, checkpoint=True)
        stock = peak(make, checkpoint=True, run=torch.compile)
        ours = peak(make, run=lambda m: torch.compile(fxckpt.transform(m, layers=[ContextBlock])))
        shown = " | ".join(f"{n / 2**20:.1f} MiB" for n in (whole, eager, stock, ours))
        print(f"| {name} | {shown} | {ours / eager:.3f} |", flush=True)


def peak(
    make: Callable[[], nn.Module], *, checkpoint: bool = False, run: Callable[..., nn.Module] = lambda m: m
) -> int:
    """Peak bytes of a second step."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = make().to(DEVICE)
    model.eager_checkpoint = checkpoint  # type: ignore[assignment]
    batch: Batch = {name: torch.randn(ROWS, WIDTH, device=DEVICE) for name in ("x", "context")}
    step = run(model)
    step(**batch).backward()
    return warm_peak(model, step, batch)


if __name__ == "__main__":
    main()
