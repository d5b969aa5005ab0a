"""Processes that train one model together: what each decides by itself has to be what the others decide."""

from __future__ import annotations

import hashlib
from collections import Counter

from fxckpt import torch_private
from fxckpt.decide.plan import Plan
from fxckpt.errors import BudgetError

_asked: Counter[str] = Counter()
"""How often this process has compared plans of models with these layers. All ranks count alike."""


def check_same_plan(plan: Plan) -> None:
    """Raise where another rank of this process's group has chosen something else for a model with the same layers.

    Nobody waits: the first rank that comes leaves its choice where the ranks have found each other (PyTorch's store),
    and those after it compare. Ranks with other layers, as in pipelines, are others' business.

    Raises:
        BudgetError: the plans differ; the message names both ranks.
    """
    store = torch_private.rank_store()
    if store is None:
        return
    layers = _digest(plan.model, *(layer.name for layer in plan.layers))
    chosen = _digest(str(plan.offload), *(layer.decided.text for layer in plan.layers))
    _asked[layers] += 1
    mine = f"{store.rank} {chosen}"
    first = store.first(f"fxckpt/plan/{layers}/{_asked[layers]}", mine)
    other, _, theirs = first.partition(" ")
    if theirs != chosen:
        raise BudgetError(
            f"fxckpt: rank {store.rank} would keep its budget by another plan than rank {other}, since their batches, "
            "or their devices, differ. Make one plan, for the largest batch (fxckpt.plan(...).save(path)), and give "
            "transform(model, plan=path) on all ranks."
        )


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
