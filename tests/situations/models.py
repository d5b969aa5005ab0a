"""Small models that the situations share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.helpers import DEVICE

Batch = dict[str, Any]


class Residual(nn.Module):
    """`x + down(act(up(x)))`, with a wide middle, so that what is inside outweighs what goes in."""

    def __init__(self, d: int, wide: int = 2, act: Callable[[torch.Tensor], torch.Tensor] = torch.tanh) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(d, wide * d), nn.Linear(wide * d, d)
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(self.act(self.a(x)))


class Tanh(nn.Module):
    """`x + tanh(w(x))`."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.w = nn.Linear(d, d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.w(x))


class TwiceUsed(nn.Module):
    """One block used twice, around another."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.other = Tanh(16), Tanh(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shared(self.other(self.shared(x))).square().mean()


class Stack(nn.Module):
    """Blocks one after the other, a buffer that scales, and a mean of squares as the loss.

    With `eager_checkpoint` set it checkpoints each block with torch.utils.checkpoint: the yardstick.
    """

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.register_buffer("scale", torch.ones(()))
        self.eager_checkpoint = False

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        for b in self.blocks:
            x = torch.utils.checkpoint.checkpoint(b, x, use_reentrant=False) if self.eager_checkpoint else b(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.hidden(x) * self.scale).float().square().mean()


def stack(
    make: Callable[[], nn.Module] = lambda: Residual(8), n: int = 4, shape: tuple[int, int] = (5, 8)
) -> tuple[Stack, Batch]:
    """A seeded stack of `n` blocks in train mode and an input of `shape`."""
    torch.manual_seed(0)
    model = Stack([make() for _ in range(n)]).to(DEVICE).train()
    return model, {"x": torch.randn(*shape, device=DEVICE)}


def qwen3(layers: int = 4, **over: Any) -> nn.Module:
    """A seeded, tiny Qwen3ForCausalLM in train mode."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "use_cache": False,
    }
    return Qwen3ForCausalLM(Qwen3Config(**sizes | over)).to(DEVICE).train()


def tokens(b: int = 2, s: int = 16, seed: int = 1) -> Batch:
    """A causal LM batch of `b` rows of `s` tokens."""
    ids = torch.randint(0, 64, (b, s), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


class LoRA(nn.Module):
    """A frozen linear layer with a trained low-rank addition."""

    def __init__(self, base: nn.Linear, r: int = 4, p: float = 0.1) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, r, bias=False)
        self.b = nn.Linear(r, base.out_features, bias=False)
        self.drop = nn.Dropout(p)
        nn.init.normal_(self.b.weight, std=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(self.drop(x)))


def qwen3_lora(p: float, layers: int = 4) -> nn.Module:
    """A frozen Qwen3 with adapters on the queries and values of every layer."""
    model = qwen3(layers).requires_grad_(False)
    torch.manual_seed(3)
    for layer in model.model.layers:
        layer.self_attn.q_proj = LoRA(layer.self_attn.q_proj, p=p)
        layer.self_attn.v_proj = LoRA(layer.self_attn.v_proj, p=p)
    return model.to(DEVICE).train()


def sigmoid_sin(x: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(x).sin()
