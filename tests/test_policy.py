"""Policies: who is recomputed, what a policy may answer, and what it may not."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fxckpt
from fxckpt import Treatment
from fxckpt.capture.regions import BoundaryLayer
from fxckpt.config import Settings
from fxckpt.decide.policy import ask, decide_layers, policy_of
from tests.situations.models import Residual, Stack

KEEP, RECOMPUTE = Treatment.KEEP, Treatment.RECOMPUTE


def layers(*names: str) -> list[BoundaryLayer]:
    return [BoundaryLayer(name, i, nn.Identity()) for i, name in enumerate(names)]


def chosen(policy: Any, n: int = 4) -> list[str]:
    """Selected layers of a stack of `n` blocks under `policy=`, without ``blocks.``."""
    t = fxckpt.transform(Stack([Residual(4) for _ in range(n)]), layers=[Residual], policy=policy)
    return [name.removeprefix("blocks.") for name in fxckpt.selected_layers(t)]


# ---- every_n -----------------------------------------------------------------------------------------------------


@given(count=st.integers(1, 60), n=st.integers(1, 70))
def test_every_n_counts_from_the_first_layer(count: int, n: int) -> None:
    """Layers 0, n, 2n, ...: as many as fit, the first always, and n apart."""
    found = layers(*(f"l.{i}" for i in range(count)))
    treatments = decide_layers(found, Settings(every_n=n))
    assert list(treatments) == [layer.name for layer in found]
    picked = [i for i, treatment in enumerate(treatments.values()) if treatment.recompute]
    assert picked == list(range(count))[::n]
    assert len(picked) == -(-count // n) and picked[0] == 0
    assert decide_layers(found, Settings(policy=fxckpt.every_n(n))) == treatments


@given(count=st.integers(1, 30), n=st.integers(1, 8), factor=st.integers(1, 4))
def test_a_multiple_of_n_selects_fewer_of_the_same(count: int, n: int, factor: int) -> None:
    some = {i for i in range(count) if fxckpt.every_n(n)(layers(*"x" * count)[i]).recompute}
    fewer = {i for i in range(count) if fxckpt.every_n(n * factor)(layers(*"x" * count)[i]).recompute}
    assert fewer <= some


@given(n=st.one_of(st.integers(max_value=0), st.floats(), st.booleans(), st.text(max_size=3), st.none()))
def test_every_n_is_a_whole_number_of_at_least_one(n: Any) -> None:
    with pytest.raises(fxckpt.SettingsError, match="whole number of at least 1"):
        Settings(every_n=n)


@pytest.mark.parametrize("n", [0, -1, True, 1.5, "2"])
def test_the_policy_every_n_checks_its_number_as_well(n: Any) -> None:
    with pytest.raises(fxckpt.SettingsError, match="whole number of at least 1"):
        fxckpt.every_n(n)


# ---- names, either, callables ------------------------------------------------------------------------------------


def test_names() -> None:
    policy = fxckpt.names("model.layers.1", "decoder.*")
    found = layers("model.layers.1", "model.layers.10", "decoder.0", "decoder.0.mlp", "xmodel.layers.1", "model.layers")
    assert [policy(layer) for layer in found] == [RECOMPUTE, KEEP, RECOMPUTE, KEEP, KEEP, KEEP]


def test_names_take_wildcards_over_parts() -> None:
    (deep,) = layers("a.b.c.d")
    assert fxckpt.names("a.**")(deep) is fxckpt.names("**.d")(deep) is RECOMPUTE
    assert fxckpt.names("a.*")(deep) is KEEP
    assert fxckpt.names()(deep) is KEEP


def test_either_recomputes_what_any_would() -> None:
    assert chosen(fxckpt.either(fxckpt.every_n(3), fxckpt.names("blocks.1"))) == ["0", "1", "3"]
    assert chosen(fxckpt.either(lambda layer: layer.index == 2, lambda layer: KEEP)) == ["2"]
    assert chosen(fxckpt.either()) == []


def test_either_nests() -> None:
    inner = fxckpt.either(fxckpt.names("blocks.1"), fxckpt.names("blocks.2"))
    assert chosen(fxckpt.either(inner, fxckpt.names("blocks.3"))) == ["1", "2", "3"]


def test_callables_answer_treatments_or_bools() -> None:
    assert chosen(lambda layer: RECOMPUTE if layer.index > 1 else KEEP) == ["2", "3"]
    assert chosen(lambda layer: layer.name.endswith(".0")) == ["0"]


def test_a_callable_sees_the_layer() -> None:
    seen: list[BoundaryLayer] = []
    assert chosen(lambda layer: bool(seen.append(layer))) == []
    assert {(s.name, s.index) for s in seen} == {(f"blocks.{i}", i) for i in range(4)}
    assert all(isinstance(s.module, Residual) for s in seen)


@pytest.mark.parametrize("kind", [list, tuple, set, frozenset])
def test_a_list_of_names_is_a_policy(kind: type) -> None:
    assert chosen(kind(["blocks.1", "blocks.3"])) == ["1", "3"]
    assert chosen(kind(["blocks.*"])) == ["0", "1", "2", "3"]


def test_a_policy_stands_in_place_of_every_n() -> None:
    assert policy_of(Settings(every_n=3)) == fxckpt.every_n(3)
    assert policy_of(Settings(every_n=3, policy=["a"])) == fxckpt.names("a")


def test_policies_compare_and_print() -> None:
    assert fxckpt.either(fxckpt.every_n(2), fxckpt.names("a")) == fxckpt.either(fxckpt.every_n(2), fxckpt.names("a"))
    assert repr(fxckpt.every_n(2)) == "EveryN(n=2)" and repr(fxckpt.names("a")) == "Names(patterns=('a',))"


def test_settings_of_different_policies_have_different_keys() -> None:
    policies = [
        None,
        ["blocks.0"],
        ["blocks.1"],
        fxckpt.names("blocks.0"),
        fxckpt.every_n(2),
        fxckpt.either(fxckpt.every_n(2), fxckpt.names("a")),
        lambda layer: layer.index == 1,
        lambda layer: layer.index == 2,
    ]
    keys = [Settings(policy=p).key() for p in policies]
    assert len(set(keys)) == len(keys)


# ---- wrong answers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [None, 1, 0, "recompute", [], object])
def test_a_wrong_answer_is_an_error(answer: Any) -> None:
    (layer,) = layers("blocks.0")
    with pytest.raises(fxckpt.SettingsError, match=r"said .* of 'blocks\.0': a Treatment or a bool is needed"):
        ask(lambda _: answer, layer)
    with pytest.raises(fxckpt.SettingsError, match=r"blocks\.0"):  # told by transform, before any training
        chosen(lambda _: answer)
    with pytest.raises(fxckpt.SettingsError, match=r"blocks\.0"):
        chosen(fxckpt.either(fxckpt.every_n(1), lambda _: answer))


@pytest.mark.parametrize("policy", [3, "blocks.0", ["blocks.0", 1], object(), RECOMPUTE])
def test_what_is_no_policy_is_an_error(policy: Any) -> None:
    with pytest.raises(fxckpt.SettingsError, match=r"a callable .* or a list of layer names"):
        chosen(policy)


def test_what_a_policy_raises_comes_through() -> None:
    def broken(layer: BoundaryLayer) -> bool:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        chosen(broken)


@pytest.mark.parametrize("policy", [[], ["blocks.99"], ["blocks.0", "typo"], fxckpt.either(fxckpt.names("typo"))])
def test_names_that_match_nothing_are_refused(policy: Any) -> None:
    with pytest.raises(fxckpt.NoLayersError, match="policy"):
        decide_layers([BoundaryLayer("blocks.0", 0, nn.Identity())], Settings(policy=policy))
