"""fxckpt on plain PyTorch: name the layers to recompute with `layers=`, and look at the rewritten graphs.

Shows: `layers=` as a class, as a name pattern and as a predicate; a few training steps; the transfers in the forward
and the backward graph; the graph of regions as a networkx graph; the explain table. The model, a stack of gated causal
convolutions, learns to predict the next byte of Python's help texts.

    python examples/plain_pytorch.py
"""

import argparse
import sys
from typing import Any

import torch
from common import blocks, byte_text
from rich.console import Console
from torch import nn
from torch.nn import functional as F

import fxckpt

console = Console(highlight=False)


class Block(nn.Module):
    """A gated causal convolution with a residual connection."""

    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.past = 2 * dilation
        self.norm = nn.LayerNorm(width)
        self.conv = nn.Conv1d(width, 2 * width, kernel_size=3, dilation=dilation)
        self.out = nn.Conv1d(width, width, kernel_size=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.pad(self.norm(x.transpose(1, 2)).transpose(1, 2), (self.past, 0))
        gate, value = self.conv(y).chunk(2, dim=1)
        return x + self.out(torch.sigmoid(gate) * torch.tanh(value))


class ByteConvNet(nn.Module):
    def __init__(self, width: int = 128, depth: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width, dilation=2**i) for i in range(depth))
        self.head = nn.Linear(width, 256)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids[:, :-1]).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x.transpose(1, 2)).flatten(0, 1), ids[:, 1:].flatten())


LAYERS: dict[str, Any] = {
    "class": Block,
    "pattern": "blocks.*",
    "predicate": lambda name, module: isinstance(module, Block) and name != "blocks.0",
}


def excerpt(code: str, word: str, lines: int = 12) -> str:
    """The first lines of `code` that mention `word`."""
    found = [line.strip() for line in code.splitlines() if word in line and not line.lstrip().startswith("#")]
    return "\n".join(line.split(";")[0] for line in found[:lines])


def train(t: ByteConvNet, data: torch.Tensor, steps: int) -> list[float]:
    optimizer = torch.optim.AdamW(t.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(steps):
        loss = t(blocks(data, 8, 129, generator))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    data, _ = byte_text()

    for name, layers in LAYERS.items():
        torch.manual_seed(0)
        t = fxckpt.transform(ByteConvNet(), every_n=2, offload=True, layers=layers)
        losses = train(t, data, args.steps)
        console.print(f"layers= as a {name}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
        if not losses[-1] < losses[0]:
            return 1

    record = fxckpt.graphs(t)[0]
    for name in ("forward", "backward"):
        code = getattr(record, name).print_readable(print_output=False)
        console.rule(f"{name} graph: transfers", align="left")
        console.print(excerpt(code, "fxckpt."), markup=False, soft_wrap=True)

    console.rule("regions", align="left")
    regions = fxckpt.to_networkx(record)
    for region, figures in regions.nodes(data=True):
        if figures["treatment"]:
            console.print(f"{region}: {figures['treatment']}, {figures['offloaded_bytes']:,} bytes offloaded")
    for source, target, figures in regions.edges(data=True):
        console.print(f"{source} -> {target}: {figures['bytes']:,} bytes")

    console.print(fxckpt.explain(t))
    return 0


if __name__ == "__main__":
    sys.exit(main())
