"""Compilations: no more of them than the plain model needs, and none at all in a second process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import fxckpt
from tests.helpers import Step, assert_close, train_step
from tests.situations.models import qwen3, tokens

ROOT = Path(__file__).parents[2]
LENGTHS = (8, 11, 13, 17)


def test_no_recompile_storm() -> None:
    """Source: unslothai/unsloth-zoo#1146, pytorch/pytorch#163329, #141589.

    Rule: four sequence lengths through a compiled transform cost no more compilations than the plain model plus two,
    and every step matches eager.
    """

    def run(model: nn.Module, step: Any) -> list[Step]:
        return [train_step(step, model, tokens(s=s, seed=s)) for s in LENGTHS]

    plain = qwen3(layers=2)
    wants = run(plain, plain)

    counts = []
    for transform in (lambda m: m, lambda m: fxckpt.transform(m, every_n=2, offload=True)):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        model = qwen3(layers=2)
        for got, want in zip(run(model, torch.compile(transform(model), backend=counter)), wants, strict=True):
            assert_close(got, want, rtol=1e-4, atol=1e-6)
        counts.append(counter.frame_count)
    plain_count, count = counts
    assert count <= plain_count + 2, (count, plain_count)


SCRIPT = """
import json, sys, torch
from torch import nn
from torch._dynamo.utils import counters

torch.set_num_threads(1)

class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.a, self.b = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)
    def forward(self, x):
        return x + self.b(torch.tanh(self.a(x)))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(8)])
    def forward(self, x):
        for b in self.blocks:
            x = b(x)
        return x.square().mean()

torch.manual_seed(0)
model, x = Net(), torch.randn(5, 8)
target = model
if sys.argv[1] == "fxckpt":
    import fxckpt
    target = fxckpt.transform(model, every_n=1, offload=True, layers=[Block])
torch.compile(target)(x=x).backward()
inductor, aot = counters["inductor"], counters["aot_autograd"]
print("RESULT" + json.dumps({
    "hits": inductor["fxgraph_cache_hit"] + aot["autograd_cache_hit"],
    "misses": inductor["fxgraph_cache_miss"],
    "grad": float(sum(p.grad.double().abs().sum() for p in model.parameters())),
}))
"""


def in_a_process(kind: str, folder: Path) -> dict[str, float]:
    """Cache hits, misses and the sum of gradients of one compiled step in a process of its own."""
    caches = {"TORCHINDUCTOR_FX_GRAPH_CACHE": "1", "TORCHINDUCTOR_AUTOGRAD_CACHE": "1"}
    env = {**os.environ, **caches, "TORCHINDUCTOR_CACHE_DIR": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, kind], env=env, cwd=ROOT, capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.split("RESULT")[1].splitlines()[0])


def check_second_process_hits(kind: str, folder: Path) -> None:
    cold, warm = in_a_process(kind, folder), in_a_process(kind, folder)
    assert cold["hits"] == 0 and warm["hits"] > 0 and warm["misses"] == 0, (cold, warm)
    assert abs(cold["grad"] - warm["grad"]) < 1e-9


def test_warm_compile_cache_of_the_plain_model(tmp_path: Path) -> None:
    """The yardstick of the next test: stock torch.compile hits its cache in a second process."""
    check_second_process_hits("plain", tmp_path)


def test_warm_compile_cache(tmp_path: Path) -> None:
    """Source: pytorch/pytorch#139094, facebookresearch/fairchem#2162.

    Rule: a second process with the same cache folder gets cache hits (as the plain model does) and gives the same
    gradients.
    """
    check_second_process_hits("fxckpt", tmp_path)
