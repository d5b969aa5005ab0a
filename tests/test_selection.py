"""The layers that fxckpt recomputes are those whose flag transformers' `every_n_layers` turns on, on every entry."""

from __future__ import annotations

import warnings

import pytest
from torch import nn

import fxckpt
from tests.helpers import boundary_layers, gc_layers
from tests.zoo import REGISTRY, build

HF = [e.name for e in REGISTRY.values() if e.model_type]
PLAIN = [e.name for e in REGISTRY.values() if not e.model_type]


def flagged(model: nn.Module, every_n: int) -> list[str] | None:
    """Names of the boundary layers that transformers turns on; None where the model refuses checkpointing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        try:
            model.gradient_checkpointing_enable(every_n_layers=every_n)
        except (ValueError, NotImplementedError):
            return None
    return [n for n, m in gc_layers(model).items() if m.gradient_checkpointing]


def counted(model: nn.Module, every_n: int) -> list[str]:
    """transformers' rule by itself, for the models that refuse the switch."""
    return list(gc_layers(model))[::every_n]


def selected(name: str, every_n: int) -> list[str]:
    model, _ = build(name)
    return list(fxckpt.selected_layers(fxckpt.transform(model, every_n=every_n, layers=boundary_layers(name, model))))


@pytest.mark.parametrize("name", HF)
def test_selection_is_that_of_transformers(name: str) -> None:
    if not gc_layers(build(name)[0]):
        pytest.skip("no GradientCheckpointingLayer in this model")
    for every_n in (1, 2, 3):
        want = flagged(build(name)[0], every_n)
        if want is None:
            want = counted(build(name)[0], every_n)
        assert selected(name, every_n) == want, f"every_n={every_n}"


@pytest.mark.parametrize("name", PLAIN)
def test_selection_of_named_classes(name: str) -> None:
    model, _ = build(name)
    classes = boundary_layers(name, model)
    names = list(gc_layers(model)) if classes is None else [n for n, m in model.named_modules() if type(m) in classes]
    for every_n in (1, 2, 3):
        assert selected(name, every_n) == names[::every_n], f"every_n={every_n}"


def test_some_models_refuse_the_switch_of_transformers() -> None:
    """Pins that `counted` is used at all: JetMoe-like models have boundary layers but no switch (DESIGN, fact 15)."""
    assert flagged(build("layoutlmv3")[0], 1) is None
    assert selected("layoutlmv3", 1) == counted(build("layoutlmv3")[0], 1)
