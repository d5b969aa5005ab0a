"""FSDP2: parameters sharded over two ranks, layer by layer, before and after the transform."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fxckpt
from tests.distributed.ranks import Ranks
from tests.distributed.test_data_parallel import alone, changed, farthest, part
from tests.helpers import Tensors
from tests.situations.models import qwen3

HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def sharded(model: nn.Module, **given: Any) -> nn.Module:
    """The model with each layer's parameters sharded, and the rest of them."""
    for layer in model.model.layers:
        fully_shard(layer, **given)
    fully_shard(model, **given)
    return model


WAYS: dict[str, Callable[..., Any]] = {
    "transform(FSDP)": lambda model, **given: changed(sharded(model, **given)),
    "transform(FSDP), every second": lambda model, **given: changed(sharded(model, **given), every_n=2),
    "FSDP(t)": lambda model, **given: sharded(changed(model), **given),
    "compile(transform(FSDP))": lambda model, **given: torch.compile(changed(sharded(model, **given))),
    "compile(FSDP(t))": lambda model, **given: torch.compile(sharded(changed(model), **given)),
}
KINDS: dict[str, dict[str, Any]] = {
    "resharded": {},
    "kept whole": {"reshard_after_forward": False},
    "bfloat16": {"mp_policy": HALF},
}


def gradients(model: nn.Module) -> Tensors:
    found = {}
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        found[name] = p.grad.full_tensor()  # type: ignore[attr-defined]
    return found


def trained(rank: int, model: nn.Module, run: Callable[..., Any]) -> Tensors:
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        run(**part(rank)).loss.backward()
    return gradients(model)


def two_steps(rank: int, way: str, kind: str) -> tuple[float, float]:
    """How far the gradients are from those of one process in float32, and how far those of FSDP2 alone are."""
    model, given = qwen3(3), KINDS[kind]
    found = trained(rank, model, WAYS[way](model, **given))
    plain = sharded(qwen3(3), **given)
    return farthest(found, alone(1)), farthest(trained(rank, plain, plain), alone(1))


@pytest.mark.parametrize(
    ("way", "kind"),
    [(way, kind) for way in WAYS for kind in KINDS if "compile" not in way or kind == "resharded"]
    + [("compile(transform(FSDP))", "bfloat16")],
)
def test_gradients_are_those_of_one_process(ranks: Ranks, way: str, kind: str) -> None:
    for off, plain_off in ranks.run(two_steps, way, kind):
        assert off <= (1.5 * plain_off if kind == "bfloat16" else 2e-6)


def kept_and_loaded(rank: int, folder: str) -> float:
    """The gradients of a model that was saved and loaded in shards, next to those of the one that was saved."""
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def made() -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
        model = sharded(qwen3(2))
        return model, changed(model), torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(run: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        run(**part(rank)).loss.backward()
        optimizer.step()

    first, run, optimizer = made()
    step(run, optimizer)
    names = set(run.state_dict())
    assert names == set(first.state_dict())
    model_state, optimizer_state = get_state_dict(run, optimizer)
    checkpoint.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    second, again, other = made()
    model_state, optimizer_state = get_state_dict(again, other)
    both = {"model": model_state, "optimizer": optimizer_state}
    checkpoint.load(both, checkpoint_id=folder)
    set_state_dict(again, other, model_state_dict=both["model"], optim_state_dict=both["optimizer"])
    for _ in range(2):
        step(run, optimizer)
        step(again, other)
    return farthest(gradients(second), gradients(first))


def test_a_distributed_checkpoint_goes_on_exactly(ranks: Ranks, tmp_path: Any) -> None:
    assert max(ranks.run(kept_and_loaded, str(tmp_path))) == 0.0


def layers_recomputed(rank: int) -> tuple[list[str], int]:
    model = sharded(qwen3(4))
    t = fxckpt.transform(model, every_n=2)
    trained(rank, model, t)
    return fxckpt.selected_layers(t), fxckpt.explain(t).saved_bytes


def test_each_rank_recomputes_the_same(ranks: Ranks) -> None:
    first, second = ranks.run(layers_recomputed)
    assert first == second and first[0] == ["model.layers.0", "model.layers.2"] and first[1] > 0


def moved(rank: int, around: bool, compiled: bool) -> tuple[int, int, int]:
    """Transfers of one step, of three layers, and the bytes of the activations that those start from."""
    model = qwen3(3)
    t = changed(model if around else sharded(model))
    run = sharded(t) if around else t
    batch = part(rank)
    trained(rank, model, torch.compile(run) if compiled else run)
    stats = fxckpt.stats(t)
    return stats.offloads, stats.reloads, stats.offloaded_bytes // (batch["input_ids"].numel() * 4)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("around", [False, True])
def test_what_each_layer_starts_from_is_offloaded(ranks: Ranks, around: bool, compiled: bool) -> None:
    for offloads, reloads, widths in ranks.run(moved, around, compiled):
        assert (offloads, reloads, widths) == (3, 3, 3 * qwen3(1).config.hidden_size)
