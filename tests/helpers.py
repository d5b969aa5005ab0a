"""What the tests share: seeds, steps, snapshots of gradients and buffers, comparisons, and memory readings."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from torch import nn

import fxckpt
from tests.zoo import get_loss

T = TypeVar("T")
Tensors = Mapping[str, "torch.Tensor | None"]

DEVICE = os.environ.get("FXCKPT_TEST_DEVICE", "cpu")
RTOL, ATOL = 1e-4, 1e-5
GC_LAYER = "GradientCheckpointingLayer"


def seed_all(seed: int = 7) -> None:
    """Seed every stream a model may draw from (SpecAugment draws from numpy's)."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def grads(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """A copy of every parameter's gradient, None where there is none."""
    return {n: None if p.grad is None else p.grad.detach().clone() for n, p in model.named_parameters()}


def buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: b.detach().clone() for n, b in model.named_buffers()}


# ---- one step ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """What one training step left behind."""

    loss: torch.Tensor
    grads: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)

    def values(self) -> dict[str, torch.Tensor | None]:
        """Loss, gradients and buffers under one roof, for comparisons."""
        named: dict[str, torch.Tensor | None] = {"loss": self.loss}
        named |= {f"grad of {k}": v for k, v in self.grads.items()}
        named |= {f"buffer {k}": v for k, v in self.buffers.items()}
        return named


def train_step(
    run: Callable[..., Any], model: nn.Module, batch: Mapping[str, Any], seed: int = 7, autocast: bool = False
) -> Step:
    """Forward through `run`, backward, and a snapshot of `model`; `autocast` puts the forward under bfloat16."""
    model.zero_grad(set_to_none=True)
    seed_all(seed)
    with torch.autocast(DEVICE.split(":")[0], dtype=torch.bfloat16, enabled=autocast):
        loss = get_loss(run(**batch))
    loss.backward()
    return Step(loss.detach().clone(), grads(model), buffers(model))


# ---- comparisons ------------------------------------------------------------------------------------------------


def differences(got: Tensors, want: Tensors) -> list[str]:
    """One line for every name whose value is not bit for bit the same."""
    lines = [f"{name}: only in one of the two" for name in sorted(got.keys() ^ want.keys())]
    for name in (n for n in want if n in got):
        g, w = got[name], want[name]
        if g is None or w is None:
            if g is not w:
                lines.append(f"{name}: got {describe(g)}, want {describe(w)}")
        elif g.shape != w.shape or g.dtype != w.dtype:
            lines.append(f"{name}: got {describe(g)}, want {describe(w)}")
        elif not torch.equal(g, w) and not same_with_nan(g, w):
            lines.append(f"{name}: largest difference {float((g.double() - w.double()).abs().max()):.3g}")
    return lines


def same_with_nan(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.is_floating_point() and torch.equal(a.nan_to_num(), b.nan_to_num()) and torch.equal(a.isnan(), b.isnan())


def describe(t: torch.Tensor | None) -> str:
    return "None" if t is None else f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}"


def assert_same(got: Tensors | Step, want: Tensors | Step) -> None:
    """Bit for bit the same names and values."""
    lines = differences(_values(got), _values(want))
    assert not lines, f"{len(lines)} values differ:\n" + "\n".join(lines[:20])


def assert_close(
    got: Tensors | Step, want: Tensors | Step, *, rtol: float = RTOL, atol: float = ATOL, none_is_zero: bool = False
) -> None:
    """The same names, None in the same places, and values within the tolerance.

    With `none_is_zero` a gradient of zeros is accepted where the reference has none.
    """
    got, want = _values(got), _values(want)
    assert got.keys() == want.keys(), sorted(got.keys() ^ want.keys())
    for name, w in want.items():
        g = got[name]
        if w is None:
            assert g is None or (none_is_zero and not g.any()), f"{name}: expected none, got {describe(g)}"
            continue
        assert g is not None, f"{name}: missing"
        torch.testing.assert_close(g, w, rtol=rtol, atol=atol, equal_nan=True, msg=lambda m, name=name: f"{name}: {m}")


def _values(x: Tensors | Step) -> Tensors:
    return x.values() if isinstance(x, Step) else x


# ---- boundary layers --------------------------------------------------------------------------------------------


def gc_layers(model: nn.Module) -> dict[str, nn.Module]:
    """transformers' own boundary layers, recognised by name in the MRO, in module order."""
    return {n: m for n, m in model.named_modules() if any(c.__name__ == GC_LAYER for c in type(m).__mro__)}


def block_classes(model: nn.Module) -> Counter[type[nn.Module]]:
    """How many blocks of each class stand in the model's lists and sequences, beside others of their class."""
    repeated: Counter[type[nn.Module]] = Counter()
    alone: Counter[type[nn.Module]] = Counter()
    for container in model.modules():
        if isinstance(container, (nn.ModuleList, nn.Sequential)):
            for cls, n in Counter(type(c) for c in container if is_block(c)).items():
                (repeated if n > 1 else alone)[cls] += n
    return repeated or alone  # one block alone in its list is one that the model calls in a loop


def is_block(module: nn.Module) -> bool:
    """Whether a module is worth a boundary: it computes something, and is more than a single torch layer."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)) or not any(True for _ in module.parameters()):
        return False
    return any(True for _ in module.children()) or isinstance(module, nn.RNNBase)


def boundary_layers(name: str, model: nn.Module) -> tuple[type[nn.Module], ...] | None:
    """The `layers=` argument an entry needs: None where it has GradientCheckpointingLayers, else its repeated blocks.

    Skips the test where the model has no list of blocks.
    """
    if gc_layers(model):
        return None
    found = block_classes(model)
    if not found:
        pytest.skip(f"{name} has no GradientCheckpointingLayer and no list of blocks: nothing to checkpoint")
    most = max(found.values())
    best = {cls for cls, n in found.items() if n == most}
    holders = {type(m) for m in model.modules() for c in m.modules() if c is not m and type(c) in best}
    return tuple(cls for cls in found if cls in best - holders)


def recomputed(t: nn.Module) -> set[str]:
    """Names of the layers that captured graphs recompute."""
    chosen = set(fxckpt.selected_layers(t))
    return {r.layer.name for g in fxckpt.graphs(t) for r in g.regions if r.layer.name in chosen}


# ---- memory -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Memory:
    """Bytes on the test device, relative to the start of a call: held when it returned, and at its peak."""

    held: int
    peak: int


def measured(fn: Callable[[], T]) -> tuple[T, Memory]:
    """The result of `fn()` and what it held and peaked at.

    On the CPU from the profiler's memory events (they see Inductor's buffers too); what runs on threads that the
    profiler does not follow is not in them.
    """
    if DEVICE.startswith("cuda"):
        torch.cuda.synchronize()
        base = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out = fn()
        torch.cuda.synchronize()
        return out, Memory(torch.cuda.memory_allocated() - base, torch.cuda.max_memory_allocated() - base)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as prof:
        out = fn()
    events = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return out, Memory(held, peak)
