"""Plain PyTorch token models: one hand-written attention block, and the many ways in which blocks are called."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.zoo.plain_towers import xent
from tests.zoo.registry import HEADS, HID, LAYERS, SEQ, VOCAB


class AttnBlock(nn.Module):
    """Pre-norm causal attention block written by hand; the base of several entries below."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(HID), nn.LayerNorm(HID)
        self.qkv, self.o = nn.Linear(HID, 3 * HID), nn.Linear(HID, HID)
        self.up, self.down = nn.Linear(HID, 2 * HID), nn.Linear(2 * HID, HID)
        self.drop = nn.Dropout(p)

    def attend(self, x: torch.Tensor, mask: torch.Tensor | None = None, scale: float | None = None) -> torch.Tensor:
        b, s, d = x.shape
        q, k, v = (t.view(b, s, HEADS, d // HEADS).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        a = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)
        return self.o(a.transpose(1, 2).reshape(b, s, d))

    def forward(self, x: torch.Tensor) -> Any:
        x = x + self.drop(self.attend(self.n1(x)))
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.n2(x)))))


class TokenModel(nn.Module):
    """Embedding, `run(h)`, head. Subclasses say how the blocks are called and what comes back."""

    def __init__(self, p: float, n: int = LAYERS, block: type[nn.Module] = AttnBlock) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCAB, HID)
        self.pos = nn.Parameter(torch.zeros(SEQ, HID))
        self.blocks = nn.ModuleList(block(p) for _ in range(n))
        self.norm = nn.LayerNorm(HID)
        self.head = nn.Linear(HID, VOCAB, bias=False)

    def embed(self, x: torch.Tensor) -> torch.Tensor:
        return self.emb(x) + self.pos[: x.shape[1]]

    def run(self, h: torch.Tensor) -> torch.Tensor:
        for b in self.blocks:
            h = b(h)
        return h

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return {"loss": xent(self.head(self.norm(self.run(self.embed(x)))), y)}


class SharedLoop(TokenModel):
    """ALBERT-like: one block, called four times."""

    def __init__(self, p: float) -> None:
        super().__init__(p, n=1)

    def run(self, h: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            h = self.blocks[0](h)
        return h


class TiedModel(TokenModel):
    def __init__(self, p: float) -> None:
        super().__init__(p)
        self.head.weight = self.emb.weight


class TupleModel(TokenModel):
    """Returns (loss, logits, hidden states of every layer): the last keep every activation alive."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        h, hs = self.embed(x), []
        for b in self.blocks:
            h = b(h)
            hs.append(h)
        logits = self.head(self.norm(h))
        return xent(logits, y), logits, tuple(hs)


@dataclass
class PlainOutput:
    loss: torch.Tensor
    logits: torch.Tensor | None = None


class DataclassModel(TokenModel):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        logits = self.head(self.norm(self.run(self.embed(x))))
        return PlainOutput(loss=xent(logits, y), logits=logits)


class NestedDictModel(TokenModel):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        h = self.run(self.embed(x))
        logits = self.head(self.norm(h))
        return {
            "loss": xent(logits, y),
            "aux": {"logits": logits, "stats": {"norm": h.norm(), "last": [h[:, -1], None]}},
        }


class KwargsBlock(AttnBlock):
    """Takes everything, hidden states too, by keyword."""

    def forward(
        self, *, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, scale: float | None = None
    ) -> Any:
        x = hidden_states
        x = x + self.drop(self.attend(self.n1(x), attention_mask, scale))
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.n2(x)))))


class KwargsModel(TokenModel):
    def __init__(self, p: float) -> None:
        super().__init__(p, block=KwargsBlock)

    def run(self, h: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(SEQ, SEQ, dtype=torch.bool).tril()
        for b in self.blocks:
            h = b(hidden_states=h, attention_mask=mask, scale=0.3)
        return h


class TupleBlock(AttnBlock):
    """Returns (hidden states, a second tensor with grad, None)."""

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> Any:
        a = self.attend(self.n1(x))
        x = x + self.drop(a) + bias
        x = x + self.drop(self.down(nn.functional.gelu(self.up(self.n2(x)))))
        return x, bias * 0.5 + a.mean(-1, keepdim=True), None


class TupleBlockModel(TokenModel):
    def __init__(self, p: float) -> None:
        super().__init__(p, block=TupleBlock)

    def run(self, h: torch.Tensor) -> torch.Tensor:
        bias = torch.zeros(h.shape[0], h.shape[1], 1)
        for b in self.blocks:
            h, bias, _ = b(h, bias)
        return h + bias


class SkipFlagModel(TokenModel):
    """Six blocks, two of which a Python flag skips, so that module order is not call order."""

    def __init__(self, p: float) -> None:
        super().__init__(p, n=6)
        self.skip = [False, True, False, False, True, False]

    def run(self, h: torch.Tensor) -> torch.Tensor:
        for b, s in zip(self.blocks, self.skip, strict=False):
            if not s:
                h = b(h)
        return h


class StochasticDepthModel(TokenModel):
    """Drops a block's output with a random number drawn on the tensor side (no Python branch)."""

    def run(self, h: torch.Tensor) -> torch.Tensor:
        for b in self.blocks:
            keep = (torch.rand(h.shape[0], 1, 1) > 0.3).to(h.dtype)
            h = h + keep * (b(h) - h)
        return h


class LoRALinear(nn.Module):
    def __init__(self, base: nn.Linear, r: int = 4, p: float = 0.0) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, r, bias=False)
        self.b = nn.Linear(r, base.out_features, bias=False)
        self.drop = nn.Dropout(p)

    def forward(self, x: torch.Tensor) -> Any:
        return self.base(x) + self.b(self.a(self.drop(x)))


class LoRAModel(TokenModel):
    """Everything frozen; the upper half of six blocks has LoRA adapters, the lower half trains nothing."""

    def __init__(self, p: float) -> None:
        super().__init__(p, n=6)
        self.requires_grad_(False)
        for blk in self.blocks[3:]:
            blk.qkv = LoRALinear(blk.qkv, p=p)
            blk.down = LoRALinear(blk.down, p=p)


class LoRAAllModel(TokenModel):
    """Adapters in every block over a frozen base: the first block's input needs no grad."""

    def __init__(self, p: float) -> None:
        super().__init__(p)
        self.requires_grad_(False)
        for blk in self.blocks:
            blk.qkv = LoRALinear(blk.qkv, p=p)


class BufferBlock(AttnBlock):
    """Changes a buffer in its forward; a recomputed forward must not do so a second time."""

    def __init__(self, p: float) -> None:
        super().__init__(p)
        self.register_buffer("ema", torch.zeros(HID))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> Any:
        with torch.no_grad():
            self.ema.mul_(0.9).add_(0.1 * x.mean((0, 1)))
            self.steps.add_(1)
        return super().forward(x - self.ema)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * g


class CustomFnBlock(AttnBlock):
    """ReLU^2 through a torch.autograd.Function."""

    def forward(self, x: torch.Tensor) -> Any:
        x = x + self.drop(self.attend(self.n1(x)))
        return x + self.drop(self.down(Square.apply(nn.functional.relu(self.up(self.n2(x))))))


class GroupedModel(TokenModel):
    """Blocks in groups of two modules deep (nested ModuleLists), as in multi-stage models."""

    def __init__(self, p: float) -> None:
        super().__init__(p, n=0)
        self.stages = nn.ModuleList(nn.ModuleList(AttnBlock(p) for _ in range(2)) for _ in range(3))

    def run(self, h: torch.Tensor) -> torch.Tensor:
        for s in self.stages:
            for b in s:
                h = b(h)
        return h


def gc_layer_model(p: float) -> TokenModel:
    """A user's own model built on transformers' GradientCheckpointingLayer, outside any PreTrainedModel."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    class GCBlock(GradientCheckpointingLayer):
        def __init__(self, p: float) -> None:
            super().__init__()
            self.inner = AttnBlock(p)

        def forward(self, x: torch.Tensor) -> Any:
            return self.inner(x)

    return TokenModel(p, n=6, block=GCBlock)
