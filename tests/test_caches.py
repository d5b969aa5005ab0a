"""Compile caches on disk: used again by equal transforms, and by nothing else."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]

SCRIPT = """
import json, sys, torch
from torch import nn
from torch._dynamo.utils import counters

import fxckpt

torch.set_num_threads(1)


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.a, self.b = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        return x + self.b(torch.tanh(self.a(x)))


class Net(nn.Module):
    def __init__(self, broken):
        super().__init__()
        self.blocks = nn.ModuleList(Block(8) for _ in range(4 if broken else 3))
        self.broken = broken

    def forward(self, x):
        for b in self.blocks:
            x = self.call(b, x) if self.broken == "as an argument" else b(x)
            if self.broken:
                torch._dynamo.graph_break()
        return x.square().mean()

    def call(self, block, x):
        return block(x)


def held(node, seen):
    '''Shapes of what each compiled graph behind `node` really holds for its backward.'''
    if node is None or node in seen:
        return []
    seen.add(node)
    own = [sorted(list(t.shape) for t in node.saved_tensors)] if node.name() == "CompiledFunctionBackward" else []
    return own + [shapes for inner, _ in node.next_functions for shapes in held(inner, seen)]


def step(settings):
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    broken = settings.pop("broken", False)
    model, x = Net(broken), torch.randn(5, 8)
    source, inside = settings.pop("source", None), settings.pop("inside", False)
    if source:
        fxckpt.config.source_hash = lambda: source
    spare = settings.pop("spare", False)
    if spare:  # a boundary layer that is never called, counted before the others
        model._modules = {"spare": Block(8), **model._modules}
    if "predicate" in settings:
        last = settings.pop("predicate")
        settings["layers"] = lambda name, module: isinstance(module, Block) and not name.endswith(last)
    t = fxckpt.transform(model, **{"layers": "blocks.*", **settings}) if settings else model
    run = torch.compile((lambda x: t(x=x) + 0.0) if inside else t)
    loss = run(x=x)
    shapes = held(loss.grad_fn, set())
    loss.backward()
    result = {
        "held": shapes,
        # of captured graphs; below them is a cache of rewritten graphs, and equal ones may share an entry there
        "hits": counters["aot_autograd"]["autograd_cache_hit"],
        "misses": counters["aot_autograd"]["autograd_cache_miss"],
        "loss": loss.item(),
        "grads": [p.grad.double().abs().sum().item() for p in model.parameters() if p.grad is not None],
    }
    if settings and not inside:
        records = fxckpt.graphs(t)
        result["regions"] = [[r.name for r in g.regions] for g in records]
        result["recomputed"] = sorted(fxckpt.selected_layers(t))
        result["transfers"] = [list(g.transfers) for g in records]
        result["saved"] = [[(n.name, list(n.meta["val"].shape)) for n in g.saved] for g in records]
        result["explain"] = fxckpt.explain(t).to_dict()
        result["text"] = str(fxckpt.explain(t))
    return result


jobs = json.loads(sys.argv[1])
print("RESULT" + json.dumps([step(job) for job in jobs]))
"""


def process(folder: Path, *jobs: dict[str, Any]) -> list[dict[str, Any]]:
    """What each job, compiled one after the other in a process of its own, did with the caches in `folder`."""
    caches = {"TORCHINDUCTOR_FX_GRAPH_CACHE": "1", "TORCHINDUCTOR_AUTOGRAD_CACHE": "1"}
    env = {**os.environ, **caches, "TORCHINDUCTOR_CACHE_DIR": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(jobs)], env=env, cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results: list[dict[str, Any]] = json.loads(done.stdout.split("RESULT")[1].splitlines()[0])
    return results


def same_numbers(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert got["loss"] == pytest.approx(want["loss"], rel=1e-5)
    assert got["grads"] == pytest.approx(want["grads"], rel=1e-5)


BASE = {"every_n": 1, "offload": False, "source": "one"}
PLAIN: dict[str, Any] = {}
CHANGES: dict[str, dict[str, Any]] = {
    "every_n": {**BASE, "every_n": 2},
    "offload": {**BASE, "offload": True},
    "layers": {**BASE, "layers": ["blocks.0", "blocks.2"]},
    "predicate": {**BASE, "predicate": "0"},
    "other predicate": {**BASE, "predicate": "1"},
    "policy": {**BASE, "policy": ["blocks.1"]},
    "layers before": {**BASE, "every_n": 2, "layers": ["blocks.*", "spare"], "spare": True},
    "fxckpt's source": {**BASE, "source": "another"},
}


def test_a_second_process_uses_the_cache_and_can_be_inspected(tmp_path: Path) -> None:
    for settings in ({"every_n": 1, "offload": False}, {"every_n": 1, "offload": True}):  # and fxckpt's own source hash
        (cold,) = process(tmp_path, settings)
        (warm,) = process(tmp_path, settings)
        assert cold["hits"] == 0 and cold["misses"] > 0
        assert warm["hits"] > 0 and warm["misses"] == 0
        assert warm["loss"] == cold["loss"] and warm["grads"] == cold["grads"] and warm["held"] == cold["held"]
        assert warm["regions"] == cold["regions"] == [["blocks.0", "blocks.1", "blocks.2"]]
        assert bool(cold["transfers"][0]) == settings["offload"]
        for moved in (warm["explain"]["transfers"], cold["explain"]["transfers"]):
            for name in [n for n in moved if n.endswith("seconds")]:
                assert bool(moved.pop(name)) == settings["offload"]
        for result in (warm, cold):
            result["text"] = re.sub(r"\d+\.\d ms", "ms", result["text"])
        for what in ("transfers", "saved", "explain", "text"):
            assert warm[what] == cold[what], what


def test_other_settings_miss(tmp_path: Path) -> None:
    (cold,) = process(tmp_path, BASE)
    results = process(tmp_path, *CHANGES.values(), PLAIN, BASE)
    for name, result in zip([*CHANGES, "plain"], results, strict=False):
        assert result["hits"] == 0 and result["misses"] > 0, f"{name}: an artefact of other settings was used"
        same_numbers(result, cold)
    changed = dict(zip(CHANGES, results, strict=False))
    assert changed["every_n"]["recomputed"] == ["blocks.0", "blocks.2"]
    assert changed["layers before"]["recomputed"] == ["blocks.1", "spare"]
    assert changed["offload"]["transfers"][0] and not changed["every_n"]["transfers"][0]
    again = process(tmp_path, *CHANGES.values(), PLAIN)
    for name, result in zip([*CHANGES, "plain"], again, strict=True):
        assert result["hits"] > 0 and result["misses"] == 0, f"{name}: its own artefact was not found"


def test_calls_inside_a_compiled_function_are_told_apart(tmp_path: Path) -> None:
    """A layer that is counted and not called moves the choice of the others, and leaves the graph as it is."""
    one, other = (
        {**BASE, "every_n": 2, "inside": True},
        {**CHANGES["layers before"], "inside": True, "layers": ["blocks.*", "spare"]},
    )
    results = process(tmp_path, one, other, {**one, "offload": True}, one)
    assert [r["hits"] > 0 for r in results] == [False, False, False, True]
    assert results[0]["held"] != results[1]["held"]
    assert results[3]["held"] == results[0]["held"]


def test_the_plain_models_artefact_is_not_taken(tmp_path: Path) -> None:
    plain, ours, plain_again = process(tmp_path, PLAIN, BASE, PLAIN)
    assert plain["hits"] == 0 and ours["hits"] == 0 and plain_again["hits"] > 0
    same_numbers(ours, plain)
    assert ours["regions"] == [["blocks.0", "blocks.1", "blocks.2"]]


@pytest.mark.parametrize("broken", ["in its own call", "as an argument"])
def test_frames_of_alike_layers_are_told_apart(tmp_path: Path, broken: str) -> None:
    """After graph breaks each layer is a graph of its own, of the same text whether it is recomputed or kept."""
    settings = {**BASE, "every_n": 2, "broken": broken}
    cold, again = process(tmp_path, settings, settings)
    (warm,) = process(tmp_path, settings)
    assert cold["regions"] == [["blocks.0"], ["blocks.1"], ["blocks.2"]]
    kept, recomputed, kept_again, _ = cold["held"]  # blocks 3, 2, 1, 0
    assert kept == kept_again != recomputed
    for result in (again, warm):
        assert result["hits"] > 0 and result["misses"] == 0
        assert result["held"] == cold["held"], "a kept layer's artefact was taken for a recomputed layer"
        assert result["regions"] == cold["regions"] and result["saved"] == cold["saved"]
        assert result["loss"] == cold["loss"] and result["grads"] == cold["grads"]
