"""Plain PyTorch models built on torch's own layers: towers, convolutions, recurrent stacks, a U-Net."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.zoo.registry import HEADS, HID, LAYERS, VOCAB


def xent(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, -2), y.flatten())


class EncoderStack(nn.Module):
    """torch's own nn.TransformerEncoder with a causal mask."""

    def __init__(self, p: float, norm_first: bool = True) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCAB, HID)
        layer = nn.TransformerEncoderLayer(HID, HEADS, 2 * HID, dropout=p, batch_first=True, norm_first=norm_first)
        self.enc = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(HID, VOCAB)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        h = self.enc(self.emb(x), mask=mask, is_causal=True)
        return {"loss": xent(self.head(h), y)}


class Seq2SeqTorch(nn.Module):
    """nn.Transformer: an encoder and a decoder, where each decoder layer also reads the encoder's output."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCAB, HID)
        self.t = nn.Transformer(HID, HEADS, LAYERS, LAYERS, 2 * HID, dropout=p, batch_first=True)
        self.head = nn.Linear(HID, VOCAB)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        tgt = torch.roll(y, 1, 1)
        mask = nn.Transformer.generate_square_subsequent_mask(tgt.shape[1])
        # without tgt_is_causal, nn.Transformer compares the mask's values, which no fullgraph trace survives
        h = self.t(self.emb(x), self.emb(tgt), tgt_mask=mask, tgt_is_causal=True)
        return {"loss": xent(self.head(h), y)}


class MLPBlock(nn.Module):
    def __init__(self, d: int = HID, p: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.up = nn.Linear(d, 2 * d)
        self.down = nn.Linear(2 * d, d)
        self.drop = nn.Dropout(p)

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class MLPTower(nn.Module):
    def __init__(self, p: float, n: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MLPBlock(p=p) for _ in range(n))
        self.head = nn.Linear(HID, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        for b in self.blocks:
            x = b(x)
        return {"loss": xent(self.head(x), y)}


class SequentialTower(nn.Module):
    """The same blocks, hidden in an nn.Sequential that is called once."""

    def __init__(self, p: float, n: int = 6) -> None:
        super().__init__()
        self.body = nn.Sequential(*(MLPBlock(p=p) for _ in range(n)), nn.LayerNorm(HID), nn.Linear(HID, 4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return {"loss": xent(self.body(x), y)}


class ConvBlock(nn.Module):
    """Residual block with BatchNorm (running statistics change in the forward) and in-place ReLUs."""

    def __init__(self, c: int, stride: int = 1, c_out: int | None = None) -> None:
        super().__init__()
        c_out = c_out or c
        self.a, self.na = nn.Conv2d(c, c_out, 3, stride, 1, bias=False), nn.BatchNorm2d(c_out)
        self.b, self.nb = nn.Conv2d(c_out, c_out, 3, 1, 1, bias=False), nn.BatchNorm2d(c_out)
        self.act = nn.ReLU(inplace=True)
        self.skip = nn.Identity() if c == c_out and stride == 1 else nn.Conv2d(c, c_out, 1, stride)

    def forward(self, x: torch.Tensor) -> Any:
        h = self.act(self.na(self.a(x)))
        return self.act(self.nb(self.b(h)) + self.skip(x))


class ConvTower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, 1, 1)
        self.stage1 = nn.Sequential(ConvBlock(16), ConvBlock(16), ConvBlock(16))
        self.stage2 = nn.Sequential(ConvBlock(16, 2, 32), ConvBlock(32), ConvBlock(32))
        self.head = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        h = self.stage2(self.stage1(self.stem(x)))
        return {"loss": xent(self.head(h.mean((2, 3))), y)}


class LSTMStack(nn.Module):
    def __init__(self, p: float, cell: type[nn.Module] = nn.LSTM) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCAB, HID)
        self.rnns = nn.ModuleList(cell(HID, HID, batch_first=True) for _ in range(LAYERS))
        self.drop = nn.Dropout(p)
        self.head = nn.Linear(HID, VOCAB)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        h = self.emb(x)
        for r in self.rnns:
            h = h + self.drop(r(h)[0])
        return {"loss": xent(self.head(h), y)}


def conv(c_in: int, c_out: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(c_in, c_out, 3, 1, 1), nn.GroupNorm(4, c_out), nn.SiLU())


class UNet(nn.Module):
    """Skips from each encoder block to its mirror: an activation that lives across the whole middle."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        w = [8, 16, 24, 32][: depth + 1]
        self.inp = conv(3, w[0])
        self.down = nn.ModuleList(conv(w[i], w[i + 1]) for i in range(depth))
        self.mid = conv(w[-1], w[-1])
        self.up = nn.ModuleList(conv(w[i + 1] + w[i + 1], w[i]) for i in reversed(range(depth)))
        self.out = nn.Conv2d(w[0], 3, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        h, skips = self.inp(x), []
        for d in self.down:
            h = d(h)
            skips.append(h)
            h = nn.functional.avg_pool2d(h, 2)
        h = self.mid(h)
        for u in self.up:
            h = nn.functional.interpolate(h, scale_factor=2.0)
            h = u(torch.cat([h, skips.pop()], 1))
        return {"loss": (self.out(h) - x).square().mean()}


class TwoTowers(nn.Module):
    """Two stacks side by side (as in CLIP) joined by a contrastive loss."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.left = nn.ModuleList(MLPBlock(p=p) for _ in range(4))
        self.right = nn.ModuleList(MLPBlock(p=p) for _ in range(4))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        a = b = x
        for m, n in zip(self.left, self.right, strict=False):
            a, b = m(a), n(b)
        logits = self.scale * nn.functional.normalize(a, dim=-1) @ nn.functional.normalize(b, dim=-1).T
        return {"loss": xent(logits, torch.arange(len(x)))}
