"""Budgets on several ranks: one plan for all, or an error."""

from __future__ import annotations

from typing import Any

import pytest
from torch.nn.parallel import DistributedDataParallel as DDP

import fxckpt
from tests.distributed.ranks import RankError, Ranks
from tests.distributed.test_data_parallel import alone, farthest, part
from tests.helpers import grads
from tests.situations.models import qwen3, tokens


def within_budget(rank: int, budget: int) -> tuple[float, dict[str, Any]]:
    model = qwen3(3)
    t = fxckpt.transform(model, budget=budget)
    run = DDP(t)
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        run(**part(rank)).loss.backward()
    return farthest(grads(model), alone(1)), fxckpt.chosen_plan(t).to_dict()


def budget_for(rows: int) -> int:
    """Bytes between what a step of so many rows needs at most and at least."""
    peaks = [fxckpt.plan(qwen3(3), tokens(rows), policy=policy).peak_bytes for policy in (None, lambda layer: False)]
    return sum(peaks) // 2


def test_ranks_choose_one_plan(ranks: Ranks) -> None:
    (near, plan), (other_near, other) = ranks.run(within_budget, budget_for(2))
    assert max(near, other_near) <= 2e-6
    assert plan == other and any(layer["treatment"] == "recompute" for layer in plan["layers"])


def larger_on_one(rank: int, budget: int) -> str:
    t = fxckpt.transform(qwen3(3), budget=budget)
    try:
        t(**tokens(4 + rank)).loss.backward()
    except fxckpt.BudgetError as error:
        return str(error)
    return ""


def test_ranks_that_would_choose_other_plans_are_told(ranks: Ranks) -> None:
    budget = fxckpt.plan(qwen3(3), tokens(4), policy=lambda layer: False).peak_bytes + 4096
    told = [text for text in ranks.run(larger_on_one, budget) if text]
    assert len(told) == 1 and "another plan than rank" in told[0] and "plan=path" in told[0]


def fails_on_one(rank: int) -> None:
    if rank == 1:
        raise ValueError("out of data")
    alone(1)


def test_what_a_rank_raises_is_told(ranks: Ranks) -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1:.*out of data"):
        ranks.run(fails_on_one)
