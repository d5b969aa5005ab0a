"""A training step as people run it, on which the sum of its operators' seconds is set right.

One by one and again and again, as they are measured, operators find their data in caches and the processor at its best.
In a step they do not.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from fxckpt.bench.step import TrainingStep
from fxckpt.decide.device import DeviceSpec
from fxckpt.planning import plan
from fxckpt.transform import transform

WIDTH, HEADS, LAYERS, TOKENS, VALUES = 512, 8, 4, 1024, 4096
"""Sizes of the model: of what is between layers, of attention, of the batch, and of what it predicts."""


class Layer(nn.Module):
    """Attention and two products, as in a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.inner, self.outer = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` and the result are of shape (rows, tokens, width)."""
        q, k, v = self.inner(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.outer(seen.transpose(1, 2).flatten(2))
        out: torch.Tensor = x + self.down(F.gelu(self.up(self.norms[1](x))))
        return out


class Reference(nn.Module):
    """A small decoder and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VALUES, WIDTH), nn.Linear(WIDTH, VALUES)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The loss of predicting `tokens`, of shape (rows, tokens), from those before."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class ReferenceStep:
    """The step, of float32, on a device; every second layer is recomputed.

    Args:
        device: where.
    """

    def __init__(self, device: torch.device) -> None:
        model = Reference().to(device)
        self._model, self._batch = model, {"tokens": torch.randint(VALUES, (1, TOKENS), device=device)}
        self._step = TrainingStep(model, transform(model, every_n=2, layers=[Layer]), self._batch, seed=0)
        for _ in range(2):
            self._step.timed()

    def seconds(self) -> float:
        """Seconds of one step."""
        return self._step.timed()

    def predicted(self, device: DeviceSpec) -> float | None:
        """Seconds that a plan says it takes on `device`."""
        return plan(self._model, self._batch, every_n=2, layers=[Layer], device=device).predicted_seconds
