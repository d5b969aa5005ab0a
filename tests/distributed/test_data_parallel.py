"""DistributedDataParallel around a transformed model, and the other way round, on two ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import fxckpt
from tests.distributed.ranks import WORLD, Ranks
from tests.helpers import Tensors, grads
from tests.situations.models import qwen3, tokens

Wrap = Callable[[nn.Module], Any]


def changed(model: nn.Module, **settings: Any) -> nn.Module:
    return fxckpt.transform(model, **{"every_n": 1, "offload": True, **settings})


WAYS: dict[str, Wrap] = {
    "DDP(t)": lambda model: DDP(changed(model)),
    "DDP(t), every second": lambda model: DDP(changed(model, every_n=2)),
    "DDP(t), static graph": lambda model: DDP(changed(model), static_graph=True),
    "DDP(t), unused parameters": lambda model: DDP(changed(model), find_unused_parameters=True),
    "DDP(t), gradients are views": lambda model: DDP(changed(model), gradient_as_bucket_view=True),
    "DDP(t), small buckets": lambda model: DDP(changed(model), bucket_cap_mb=0.01),
    "transform(DDP)": lambda model: changed(DDP(model)),
    "compile(DDP(t))": lambda model: torch.compile(DDP(changed(model))),
    "DDP(compile(t))": lambda model: DDP(torch.compile(changed(model))),
}


def part(rank: int, seed: int = 1) -> dict[str, torch.Tensor]:
    """The rank's rows of a batch."""
    return {name: value.chunk(WORLD)[rank] for name, value in tokens(2 * WORLD, seed=seed).items()}


def alone(*seeds: int) -> Tensors:
    """The gradients of one process: the mean over the ranks' parts, summed over batches of these seeds."""
    model = qwen3(3)
    for seed in seeds:
        for rank in range(WORLD):
            (model(**part(rank, seed)).loss / WORLD).backward()
    return grads(model)


def farthest(found: Tensors, wanted: Tensors) -> float:
    """The largest difference of a gradient, relative to the largest value in it."""
    assert found.keys() == wanted.keys()
    worst = 0.0
    for name, want in wanted.items():
        got = found[name]
        assert got is not None and want is not None, name
        worst = max(worst, float((got - want).abs().max() / want.abs().max()))
    return worst


def two_steps(rank: int, way: str) -> float:
    model = qwen3(3)
    run = WAYS[way](model)
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        run(**part(rank)).loss.backward()
    return farthest(grads(model), alone(1))


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_those_of_one_process(ranks: Ranks, way: str) -> None:
    assert max(ranks.run(two_steps, way)) <= 2e-6


def accumulated(rank: int, way: str) -> float:
    model = qwen3(3)
    run = WAYS[way](model)
    with run.no_sync():
        run(**part(rank, 1)).loss.backward()
    run(**part(rank, 2)).loss.backward()
    return farthest(grads(model), alone(1, 2))


@pytest.mark.parametrize("way", ["DDP(t)", "DDP(compile(t))"])
def test_gradients_add_up_without_communication(ranks: Ranks, way: str) -> None:
    assert max(ranks.run(accumulated, way)) <= 2e-6


def part_of_the_parameters(rank: int) -> list[str]:
    """Parameters without a gradient where a layer is not called."""

    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = qwen3(2)
            self.never = nn.Linear(4, 4)

        def forward(self, **batch: Any) -> torch.Tensor:
            loss: torch.Tensor = self.model(**batch).loss
            return loss

    model = Skips()
    run = DDP(changed(model), find_unused_parameters=True)
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        run(**part(rank)).backward()
    return [name for name, p in model.named_parameters() if p.grad is None]


def test_parameters_without_a_use(ranks: Ranks) -> None:
    assert ranks.run(part_of_the_parameters) == [["never.weight", "never.bias"]] * WORLD


WIDE = {"hidden_size": 96, "intermediate_size": 400, "head_dim": 24}
"""Layers of 0.7 MiB each, of which buckets of 1 MiB end somewhere inside."""


def in_several_buckets(rank: int, way: str) -> tuple[float, int, int]:
    """The difference to one process, the graphs of a step, and the transfers."""
    plain, model = qwen3(4, **WIDE), qwen3(4, **WIDE)
    t = changed(model)
    run = {
        "DDP(t)": lambda: DDP(t, bucket_cap_mb=1),
        "compile(DDP(t))": lambda: torch.compile(DDP(t, bucket_cap_mb=1), backend="aot_eager"),
        "DDP(compile(t))": lambda: DDP(torch.compile(t, backend="aot_eager"), bucket_cap_mb=1),
    }[way]()
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        run(**part(rank)).loss.backward()
    for other in range(WORLD):
        (plain(**part(other)).loss / WORLD).backward()
    return farthest(grads(model), grads(plain)), len(fxckpt.graphs(t)), fxckpt.stats(t).offloads


@pytest.mark.parametrize("way", ["DDP(t)", "compile(DDP(t))", "DDP(compile(t))"])
def test_buckets_that_split_the_graph(ranks: Ranks, way: str) -> None:
    """Where a bucket is full the graph is split, so that its gradients travel while the others are computed."""
    for far, graphs, offloads in ranks.run(in_several_buckets, way):
        assert far <= 5e-6
        assert graphs > 1 and offloads >= 4
