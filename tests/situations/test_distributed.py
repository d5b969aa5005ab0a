"""DDP and FSDP2 with a gloo group of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fxckpt
from tests.helpers import DEVICE, Tensors, assert_close, grads, train_step
from tests.situations.models import Stack, Tanh, TwiceUsed, stack

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch was built without distributed")


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_ddp_accepts_a_shared_block(group: None) -> None:
    """Source: pytorch/pytorch#81296, microsoft/FocalNet#4, huggingface/accelerate#2017.

    Rule: with one block used twice in a step, DDP accepts it (no parameter is marked ready twice) and gradients match
    eager.
    """

    def make() -> tuple[TwiceUsed, torch.Tensor]:
        torch.manual_seed(0)
        return TwiceUsed().to(DEVICE), torch.randn(7, 16, device=DEVICE)

    plain, x = make()
    want = train_step(plain, plain, {"x": x})
    model, x = make()
    step = DistributedDataParallel(fxckpt.transform(model, every_n=1, offload=True, layers=[Tanh]))
    for _ in range(2):
        assert_close(train_step(step, model, {"x": x}), want, rtol=1e-4, atol=1e-6)


class NormBlock(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(torch.tanh(self.a(self.norm(x))))


def shard(model: Stack) -> None:
    """FSDP2 on each block and on the whole, computing in bfloat16 over fp32 weights."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(DEVICE.split(":")[0], (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh, mp_policy=policy)


def two_steps(model: nn.Module, run: Callable[..., Any], x: torch.Tensor) -> Tensors:
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        run(x=x).backward()
    return {n: p.grad.full_tensor() for n, p in model.named_parameters()}


@pytest.mark.parametrize("every_n", [1, 2])
def test_fsdp2_sharded_layers(group: None, every_n: int) -> None:
    """Source: pytorch/pytorch#159359, Modalities/modalities#361, huggingface/accelerate#3897.

    Rule: a one-process fully_shard model with bf16 compute (fp32 weights) gives the unwrapped sharded model's gradients
    over two steps, or a clear error.
    """

    def make() -> tuple[Stack, torch.Tensor]:
        model, batch = stack(lambda: NormBlock(16), shape=(6, 16))
        return model, batch["x"]

    unsharded, x = make()
    unsharded(x=x).backward()
    plain, x = make()
    shard(plain)
    want = two_steps(plain, plain, x)
    assert_close(want, grads(unsharded), rtol=5e-2, atol=5e-3)

    model, x = make()
    shard(model)
    try:
        got = two_steps(model, fxckpt.transform(model, every_n=every_n, offload=True, layers=[NormBlock]), x)
    except fxckpt.FxckptError:
        return
    assert_close(got, want, rtol=2e-2, atol=1e-3)
