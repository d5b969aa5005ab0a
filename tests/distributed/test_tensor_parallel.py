"""Tensor parallelism: layers whose parameters are DTensors, on two ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fxckpt
from tests.distributed.ranks import WORLD, Ranks
from tests.distributed.test_data_parallel import changed, farthest
from tests.helpers import DEVICE, Tensors, grads, seed_all
from tests.situations.models import qwen3, tokens

WAYS: dict[str, Any] = {
    "t": lambda model: changed(model),
    "t, every second": lambda model: changed(model, every_n=2),
    "t, products saved": lambda model: changed(model, save="matmul"),
    "compile(t)": lambda model: torch.compile(changed(model)),
}


def split(model: nn.Module) -> nn.Module:
    """Each layer's products column by column, then row by row."""
    mesh = init_device_mesh(DEVICE.split(":")[0], (WORLD,))
    columns, rows = ("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",)
    for layer in model.model.layers:
        ways = {name: ColwiseParallel() for name in columns} | {name: RowwiseParallel() for name in rows}
        parallelize_module(layer, mesh, ways)
    return model


def whole_gradients(model: nn.Module) -> Tensors:
    found = {}
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        found[name] = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
    return found


def two_steps(rank: int, way: str, dropout: float) -> tuple[float, int]:
    """How far gradients are from those of one process without fxckpt, and the transfers of a step."""
    plain, model = qwen3(3, attention_dropout=dropout), split(qwen3(3, attention_dropout=dropout))
    t = WAYS[way](model)
    for run in (plain, t):
        for _ in range(2):
            run.zero_grad(set_to_none=True)
            seed_all()
            run(**tokens()).loss.backward()
    return farthest(whole_gradients(model), grads(plain)), fxckpt.stats(t).offloads


@pytest.mark.parametrize(
    ("way", "dropout"),
    [
        *((way, 0.0) for way in WAYS if "compile" not in way),
        ("t", 0.3),
        pytest.param("compile(t)", 0.0, marks=pytest.mark.slow),
    ],
)
def test_gradients_are_those_of_one_process(ranks: Ranks, way: str, dropout: float) -> None:
    for far, offloads in ranks.run(two_steps, way, dropout):
        assert far <= 5e-6
        assert offloads > 3 if "saved" in way else offloads == (2 if "second" in way else 3)


def collectives(rank: int) -> tuple[int, list[str]]:
    """Recomputed collectives of the backward, and operators that are run under a random state of before."""
    t = changed(split(qwen3(3)))
    t(**tokens()).loss.backward()
    (record,) = fxckpt.graphs(t)
    names = [str(n.target) for n in record.backward.graph.nodes if n.op == "call_function"]
    return sum("all_reduce" in name for name in names), [name for name in names if "rng_state" in name]


def test_collectives_draw_no_random_numbers(ranks: Ranks) -> None:
    for reduces, again in ranks.run(collectives):
        assert reduces >= 3 and not again
