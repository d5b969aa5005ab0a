"""One training step of `fxckpt.transform(model)` gives the numbers of the model itself.

The rule, for loss, all gradients and all buffers: bit for bit those of the eager model wherever the plain model under
`torch.compile(backend="aot_eager")` is; elsewhere those of aot_eager, or close to eager.

CI takes the spread, two settings a model; `-m slow` takes every entry at every setting.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product

import pytest
import torch

import fxckpt
from tests.helpers import Step, assert_close, assert_same, boundary_layers, differences, train_step
from tests.zoo import CI_SPREAD, REGISTRY, build

Setting = tuple[int, bool, bool]  # every_n, offload, dropout

SETTINGS: list[Setting] = [(n, o, d) for d, n, o in product((False, True), (1, 2, 3), (False, True))]
CI_PAIRS: list[tuple[Setting, Setting]] = [
    ((1, True, False), (2, False, True)),
    ((2, True, True), (1, False, False)),
    ((3, False, False), (1, True, True)),
    ((2, True, False), (3, False, True)),
    ((1, False, True), (3, True, False)),
    ((2, False, False), (3, True, True)),
]
CI_CASES = [(name, *s) for i, name in enumerate(CI_SPREAD) for s in CI_PAIRS[i % len(CI_PAIRS)]]
ALL_CASES = [(name, *s) for name in REGISTRY for s in SETTINGS]


def case_id(value: object) -> str:
    return str(value)


@lru_cache(maxsize=1)
def eager(name: str, dropout: bool) -> Step:
    model, batch = build(name, dropout)
    return train_step(model, model, batch)


@lru_cache(maxsize=1)
def aot_eager(name: str, dropout: bool) -> Step | None:
    """The plain model's step under aot_eager, None where torch itself fails."""
    torch._dynamo.reset()
    model, batch = build(name, dropout)
    try:
        return train_step(torch.compile(model, backend="aot_eager"), model, batch)
    except Exception:
        return None
    finally:
        torch._dynamo.reset()


def transformed(name: str, every_n: int, offload: bool, dropout: bool) -> Step:
    model, batch = build(name, dropout)
    t = fxckpt.transform(model, every_n=every_n, offload=offload, layers=boundary_layers(name, model))
    return train_step(t, model, batch)


def check(name: str, every_n: int, offload: bool, dropout: bool) -> bool:
    """Apply the rule of this file; True where the result is bit for bit eager's."""
    got, want = transformed(name, every_n, offload, dropout), eager(name, dropout)
    if not differences(got.values(), want.values()):
        return True
    plain = aot_eager(name, dropout)  # compiled only for the entries that need it
    if plain is not None and not differences(plain.values(), want.values()):
        assert_same(got, want)
    if plain is None or differences(got.values(), plain.values()):
        assert_close(got, want)
    return False


@pytest.mark.parametrize(("name", "every_n", "offload", "dropout"), CI_CASES, ids=case_id)
def test_step_equals_eager(name: str, every_n: int, offload: bool, dropout: bool) -> None:
    check(name, every_n, offload, dropout)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "every_n", "offload", "dropout"), ALL_CASES, ids=case_id)
def test_step_equals_eager_everywhere(
    name: str, every_n: int, offload: bool, dropout: bool, record_property: pytest.RecordProperty
) -> None:
    record_property("bitwise", check(name, every_n, offload, dropout))


def test_spread_covers_every_family() -> None:
    assert len(set(CI_SPREAD)) == len(CI_SPREAD) >= 25
    assert {REGISTRY[n].family for n in CI_SPREAD} == {e.family for e in REGISTRY.values()}


def test_ci_settings_cover_every_value() -> None:
    used = [s for pair in CI_PAIRS for s in pair]
    assert {frozenset(v) for v in zip(*used, strict=True)} == {frozenset((1, 2, 3)), frozenset((False, True))}
    assert len(set(used)) == len(SETTINGS)
