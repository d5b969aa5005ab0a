"""Budgets: the solver against brute force, and plans whose steps stay below their budgets."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxckpt
from fxckpt.bench.step import TrainingStep
from fxckpt.config import Budget, make_settings, parse_budget
from fxckpt.decide.budget import Chain, Choice, Link, cheapest, smallest
from fxckpt.models.load import load
from fxckpt.models.spec import ModelSpec
from fxckpt.predict.amount import budget_bytes
from fxckpt.predict.budget import RESERVE
from fxckpt.predict.capture import capture_step
from fxckpt.predict.chain import find_order
from fxckpt.predict.optimizer import optimizer_bytes
from fxckpt.predict.steps import read_steps
from fxckpt.show.plan_tables import figures
from tests.helpers import assert_close, assert_same, train_step
from tests.situations.models import Residual
from tests.zoo import build


def random_chain(seed: int) -> Chain:
    """A few decisions of two to four choices, over links of which some share a decision, some have no choice."""
    draw = random.Random(seed)
    counts = [draw.randint(1, 4) for _ in range(draw.randint(1, 5))]
    order = [*range(len(counts)), *(draw.randrange(len(counts)) for _ in range(draw.randint(0, 2)))]
    draw.shuffle(order)
    links = []
    for place, decider in enumerate(order):
        choices = []
        for _ in range(counts[decider]):
            held = draw.randint(0, 20)
            forward, backward = held + draw.randint(0, 15), held + draw.randint(0, 30)
            choices.append(Choice(held, forward, backward, draw.choice([0.0, 0.5, 1.0, draw.random()])))
        links.append(Link(f"link {place}", decider, tuple(choices)))
    return Chain(tuple(links))


def every_way(chain: Chain) -> list[tuple[int, ...]]:
    counts = {link.decider: len(link.choices) for link in chain.links}
    return list(itertools.product(*(range(counts[d]) for d in sorted(counts))))


@pytest.mark.parametrize("seed", range(200))
def test_the_solver_finds_what_trying_all_finds(seed: int) -> None:
    chain = random_chain(seed)
    ways = every_way(chain)
    lowest = min(map(chain.peak, ways))
    assert chain.peak(smallest(chain)) == lowest
    highest = max(map(chain.peak, ways))
    for limit in sorted({lowest - 1, lowest, (lowest + highest) // 2, highest, *range(lowest, highest, 7)}):
        found = cheapest(chain, limit)
        fitting = [way for way in ways if chain.peak(way) <= limit]
        assert (found is None) == (not fitting)
        if found is not None:
            assert chain.peak(found) <= limit
            least = min(map(chain.cost, fitting))
            assert chain.cost(found) == pytest.approx(least, abs=1e-9)
            assert chain.peak(found) == min(chain.peak(w) for w in fitting if chain.cost(w) <= least + 1e-12)


def test_a_hundred_layers_take_seconds() -> None:
    gib = 2**30
    keep = Choice(3 * gib, 4 * gib, 5 * gib, 0.0)
    attention = Choice(gib, 4 * gib, 5 * gib, 0.21)
    recompute = Choice(gib // 4, 4 * gib, 6 * gib, 0.3)
    offload = Choice(0, 4 * gib, 6 * gib, 0.31)
    layers = tuple(Link(f"layers.{i}", i, (keep, attention, recompute, offload)) for i in range(100))
    tail = Link("the loss", 100, (Choice(0, 8 * gib, 12 * gib),))
    chain = Chain((*layers, tail))
    everything, least = chain.peak([0] * 101), chain.peak(smallest(chain))
    costs = []
    for part in range(1, 10):
        limit = least + (everything - least) * part // 10
        start = time.perf_counter()
        found = cheapest(chain, limit)
        assert time.perf_counter() - start < 20
        assert found is not None and chain.peak(found) <= limit
        costs.append(chain.cost(found))
    assert costs == sorted(costs, reverse=True) and len(set(costs)) == 9


# ---- plans within a budget ------------------------------------------------------------------------------------------


DEEP = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 6,
}
LLAMA = ModelSpec("llama", batch=2, seq=128, overrides=DEEP)
SPECS = {
    "llama": LLAMA,
    "bert": ModelSpec("bert", batch=2, seq=128, overrides={k: v for k, v in DEEP.items() if "key_value" not in k}),
    "t5": ModelSpec(
        "t5",
        batch=2,
        seq=96,
        overrides={
            "vocab_size": 256,
            "d_model": 64,
            "d_kv": 16,
            "d_ff": 128,
            "num_layers": 2,
            "num_decoder_layers": 3,
            "num_heads": 4,
        },
    ),
}


def everything_kept(model: nn.Module, batch: Any, **given: Any) -> fxckpt.Plan:
    return fxckpt.plan(model, batch, policy=lambda layer: False, **given)


def measured_peak(t: nn.Module, batch: Any) -> int:
    run = TrainingStep(t, t, batch, 0)
    run.timed()
    return run.memory()[1]


@pytest.mark.parametrize("name", SPECS)
def test_a_plan_keeps_its_budget_and_more_memory_takes_no_longer(name: str) -> None:
    model, batch = load(SPECS[name])
    recomputed = []
    for row in fxckpt.sweep(model, batch, offload=False, budgets=4).rows[-4:]:
        plan = row.plan
        assert plan.budget_bytes is not None
        recomputed.append(plan.recomputed_flops)
        t = fxckpt.transform(model, plan=fxckpt.Plan.from_dict(plan.to_dict()))
        measured = measured_peak(t, batch)
        assert plan.peak_bytes <= measured <= plan.peak_bytes + 64  # autograd's own scalars
        assert measured <= plan.budget_bytes
    assert recomputed == sorted(recomputed, reverse=True)
    assert recomputed[0] > recomputed[-1] == 0


def test_too_small_a_budget_is_told_with_the_smallest_that_can_be_kept() -> None:
    model, batch = load(LLAMA)
    with pytest.raises(
        fxckpt.BudgetError, match=r"smallest that was found is ([\d,]+) bytes.* in the backward of "
    ) as told:
        fxckpt.plan(model, batch, budget=1000)
    least = int(re.search(r"found is ([\d,]+)", str(told.value))[1].replace(",", ""))  # type: ignore[index]
    assert least <= fxckpt.plan(model, batch).peak_bytes + RESERVE
    assert fxckpt.plan(model, batch, budget=least).peak_bytes == least - RESERVE
    with pytest.raises(fxckpt.BudgetError):
        fxckpt.plan(model, batch, budget=least - 1)


def test_where_little_is_missing_compiled_steps_make_cheap_values_anew() -> None:
    model, batch = load(dataclasses.replace(LLAMA, overrides={**DEEP, "num_hidden_layers": 2}))
    whole = fxckpt.plan(model, batch, policy=lambda layer: False, compiled=True)
    plan = fxckpt.plan(model, batch, budget=whole.peak_bytes - 1, compiled=True)
    assert plan.recomputed_flops < 0.02 * plan.flops and plan.peak_bytes < 0.9 * whole.peak_bytes
    assert all("matmul" in layer.save for layer in plan.layers)
    expected = train_step(torch.compile(fxckpt.transform(model, policy=lambda layer: False)), model, batch)
    torch._dynamo.reset()
    t = torch.compile(fxckpt.transform(model, plan=fxckpt.Plan.from_dict(plan.to_dict())))
    assert_close(train_step(t, model, batch), expected)
    assert plan.peak_bytes <= measured_peak(t, batch) <= plan.peak_bytes + 64


@pytest.mark.parametrize("compiled", [False, True])
def test_a_transformed_model_keeps_its_budget_from_the_first_call_on(compiled: bool) -> None:
    model, batch = load(LLAMA)
    most, least = everything_kept(model, batch).peak_bytes, fxckpt.plan(model, batch).peak_bytes
    budget = (most + least) // 2
    expected = train_step(fxckpt.transform(model), model, batch)
    t = fxckpt.transform(model, budget=budget)
    with pytest.raises(fxckpt.CaptureError, match="first call chooses"):
        fxckpt.selected_layers(t)
    with pytest.raises(fxckpt.CaptureError, match="No plan was made"):
        fxckpt.chosen_plan(t)
    torch._dynamo.reset()
    found = train_step(torch.compile(t, backend="aot_eager") if compiled else t, model, batch)
    assert_same(found, expected)
    plan = fxckpt.chosen_plan(t)
    assert plan == fxckpt.plan(model, batch, budget=budget)
    assert fxckpt.selected_layers(t) == [one.name for one in plan.layers if one.treatment == "recompute"]
    assert 0 < len(fxckpt.selected_layers(t)) <= 6
    train_step(t, model, batch)
    assert fxckpt.chosen_plan(t) is plan


def test_random_numbers_are_not_drawn_by_planning() -> None:
    model, batch = build("llama", True)
    expected = train_step(model, model, batch)
    budget = everything_kept(model, batch).peak_bytes * 2
    assert_same(train_step(fxckpt.transform(model, budget=budget), model, batch), expected)


def test_offload_is_chosen_where_recomputing_is_not_enough(tmp_path: Path) -> None:
    model, batch = load(dataclasses.replace(LLAMA, overrides={**DEEP, "vocab_size": 2048}))  # a wide loss
    place = fxckpt.Offload(to="disk", dir=str(tmp_path))
    least = fxckpt.plan(model, batch).peak_bytes
    with pytest.raises(fxckpt.BudgetError):
        fxckpt.plan(model, batch, budget=int(least * 0.9))
    lowest = fxckpt.plan(model, batch, offload=place).peak_bytes
    assert lowest < least
    plan = fxckpt.plan(model, batch, budget=(lowest + least) // 2, offload=place)
    assert plan.offloaded_bytes and plan.peak_bytes <= (lowest + least) // 2
    t = fxckpt.transform(model, plan=plan)
    assert_same(train_step(t, model, batch), train_step(fxckpt.transform(model), model, batch))


def test_layers_that_lie_in_others_are_decided_one_by_one() -> None:
    model, batch = build("swin", False)
    most, least = everything_kept(model, batch).peak_bytes, fxckpt.plan(model, batch).peak_bytes
    for budget in (least, (least + most) // 2):
        plan = fxckpt.plan(model, batch, budget=budget)
        assert plan.peak_bytes <= budget


def test_layers_that_run_among_each_other_are_decided_together() -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Residual(64) for _ in range(3))
            self.last = Residual(64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(4):
                x = self.blocks[1](self.blocks[0](x))
            return self.last(self.blocks[2](x)).sum()

    model, batch = Loop(), {"x": torch.randn(64, 64)}
    settings = make_settings(layers=Residual, policy=lambda layer: False)
    steps = read_steps(capture_step(model, batch, settings))
    order = find_order(steps, ["blocks.0", "blocks.1", "blocks.2", "last", "never"])
    assert order.groups == (("blocks.0", "blocks.1"), ("blocks.2",), ("last",))
    least = fxckpt.plan(model, batch, layers=Residual).peak_bytes
    assert fxckpt.plan(model, batch, layers=Residual, budget=least + RESERVE).peak_bytes <= least


def test_a_switch_of_transformers_takes_a_budgets_place() -> None:
    model, batch = load(LLAMA)
    t = fxckpt.transform(model, budget="1TB")
    t.gradient_checkpointing_enable(every_n_layers=3)  # type: ignore[operator]
    assert len(fxckpt.selected_layers(t)) == 2
    train_step(t, model, batch)


@pytest.mark.parametrize(
    ("given", "nbytes"),
    [(5, 5), ("5", 5), ("24GiB", 24 * 2**30), ("1.5 gb", 1_500_000_000), ("300k", 300_000), ("2MiB", 2**21)],
)
def test_budgets_are_bytes(given: Any, nbytes: int) -> None:
    assert parse_budget(given) == Budget(nbytes)


@pytest.mark.parametrize("given", [0, -1, True, 1.5, "", "GiB", "0%", "101%", "80 percent", "0.2", None, [3]])
def test_what_is_no_budget_is_told(given: Any) -> None:
    with pytest.raises(fxckpt.SettingsError, match="give bytes, a text such as"):
        parse_budget(given)


def test_a_share_of_the_device_holds_the_parameters_too() -> None:
    model = nn.Linear(1000, 1000)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert budget_bytes(parse_budget("50%"), model) == total // 2 - 1001 * 1000 * 4
    with torch.device("meta"):
        nowhere = nn.Linear(3, 3)
    with pytest.raises(fxckpt.SettingsError, match="lies on meta"):
        budget_bytes(parse_budget("50%"), nowhere)


@pytest.mark.parametrize("made", ["adamw", torch.optim.AdamW, lambda given: torch.optim.AdamW(given, amsgrad=True)])
def test_an_optimizer_keeps_what_it_says(made: Any) -> None:
    model, batch = load(LLAMA)
    next(model.parameters()).requires_grad_(False)
    real = torch.optim.AdamW(model.parameters()) if isinstance(made, str) else made(model.parameters())
    train_step(model, model, batch)
    real.step()
    kept = [t for state in real.state.values() for name, t in state.items() if name != "step"]  # a number on the host
    plan = fxckpt.plan(model, batch, optimizer=made)
    assert plan.optimizer_bytes == sum(t.nbytes for t in kept) > 0
    assert "what the optimizer keeps" in [name for name, _ in figures(plan)]
    assert fxckpt.Plan.from_dict(plan.to_dict()) == plan
    assert replace(plan, optimizer_bytes=None) == fxckpt.plan(model, batch)


def test_optimizers_without_state_and_by_bytes() -> None:
    model = nn.Linear(30, 30)
    assert optimizer_bytes(model, "SGD") == 0
    assert optimizer_bytes(model, lambda given: torch.optim.SGD(given, 0.1, momentum=0.9)) == 930 * 4
    assert optimizer_bytes(model, 123) == 123
    assert optimizer_bytes(model.requires_grad_(False), "adam") == 0


@pytest.mark.parametrize("given", ["adamx", True, 1.5, -3, "LBFGS", lambda given: None])
def test_what_is_no_optimizer_is_told(given: Any) -> None:
    with pytest.raises(fxckpt.SettingsError, match=r"optimizer=.*(give a name of torch.optim|Give the bytes)"):
        optimizer_bytes(nn.Linear(3, 3), given)


def test_a_share_of_the_device_holds_the_optimizer_too() -> None:
    model, batch = load(LLAMA)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    beside = total - 2 * 2**20 - sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    t = fxckpt.transform(model, budget="100%", optimizer=beside)
    with pytest.raises(fxckpt.BudgetError, match="within 2,097,152 bytes"):
        t(**batch)
    with pytest.raises(fxckpt.SettingsError, match="parameters and the optimizer take more"):
        fxckpt.transform(model, budget="100%", optimizer=total)
    with pytest.raises(fxckpt.SettingsError, match="optimizer= is for a budget="):
        fxckpt.transform(model, optimizer="adamw")


def test_a_budget_chooses_alone() -> None:
    model, _ = load(LLAMA)
    with pytest.raises(fxckpt.SettingsError, match="budget= chooses"):
        fxckpt.transform(model, budget="1GiB", every_n=2)
    with pytest.raises(fxckpt.SettingsError, match="plan= says"):
        fxckpt.transform(model, budget="1GiB", plan="a file")
    with pytest.raises(fxckpt.NoLayersError):
        fxckpt.transform(nn.Linear(3, 3), budget="1GiB")


def test_products_may_be_saved_where_no_kernel_for_attention_is() -> None:
    model, batch = build("gpt2", True)  # dropout, for which a CPU has none
    most, least = everything_kept(model, batch).peak_bytes, fxckpt.plan(model, batch).peak_bytes
    plan = fxckpt.plan(model, batch, budget=most - (most - least) // 4)
    assert ("matmul",) in {layer.save for layer in plan.layers}
