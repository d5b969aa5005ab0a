"""The survey of transformers' architectures, its tiny models, and the page that it writes."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn

import fxckpt
from tests.benchmarks import models_page, models_table
from tests.benchmarks.models_page import COLUMNS
from tests.helpers import Step
from tests.zoo import automatic
from tests.zoo.architectures import Architecture, Program, architectures
from tests.zoo.registry import Built

ARCHITECTURES = {a.name: a for a in architectures()}
QUICK = ["llama", "clip", "smollm3", "siglip2", "xglm", "wav2vec2", "vit_mae"]
"""Some of the zoo, and some that are made from their class alone."""


class Layer(fxckpt.GradientCheckpointingLayer):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.w(x))


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Unsteady(Tower):
    """Another loss at each call."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        type(self).calls += 1
        return super().forward(x) * type(self).calls


class Failing(Tower):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such luck")


def dies(program: Program) -> models_page.Row:
    os._exit(1)


def program(cls: type[nn.Module]) -> Program:
    def build() -> Built:
        torch.manual_seed(0)
        return cls().train(), {"x": torch.randn(4, 8, generator=torch.Generator().manual_seed(1))}

    return Program(cls.__name__, build, frozenset({"Layer"}))


def test_every_modelling_file_with_layers_is_an_architecture() -> None:
    assert len(ARCHITECTURES) > 350
    assert ARCHITECTURES["llama"].layers == ("LlamaDecoderLayer",)
    assert ARCHITECTURES["clip"].module == "transformers.models.clip.modeling_clip"
    assert set(ARCHITECTURES["wav2vec2"].layers) >= {"Wav2Vec2EncoderLayer", "Wav2Vec2EncoderLayerStableLayerNorm"}


@pytest.mark.parametrize("name", QUICK)
def test_models_are_made_from_a_class_alone(name: str) -> None:
    found = ARCHITECTURES[name].programs()
    assert frozenset().union(*(p.layers for p in found)) == {*ARCHITECTURES[name].layers}, ARCHITECTURES[name].failed
    (_, batch), (_, again) = found[0].build(), found[0].build()
    assert all(torch.equal(batch[key], again[key]) for key in batch if isinstance(batch[key], torch.Tensor))


@pytest.mark.slow
def test_every_architecture_trains_in_eager() -> None:
    short = {}
    for architecture in ARCHITECTURES.values():
        held = frozenset[str]().union(*(p.layers for p in architecture.programs()))
        if held != {*architecture.layers}:
            short[architecture.name] = {*architecture.layers} - held
    assert short.keys() <= models_page.EXPLAINED.keys(), short


def test_what_is_written_by_hand_is_of_classes_that_there_are() -> None:
    import transformers

    named = {*automatic.FIELDS, *automatic.VARIANTS, *automatic.BATCHES}
    models = {cls.__name__ for a in ARCHITECTURES.values() for cls in automatic.model_classes(a.imported())}
    configs = {value.__name__ for value in transformers.CONFIG_MAPPING.values()}
    assert not {n for n in named - models - configs if not n.endswith("Config")}


def test_a_model_is_surveyed_in_a_process_of_its_own() -> None:
    row = models_table.in_own_process(models_table.survey, program(Tower))
    assert [row[column] for column in COLUMNS] == ["runs", "runs", "bit for bit", "bit for bit", "bit for bit"]
    assert row["name"] == "Tower" and not row["why"] and models_page.equal(row)


@pytest.mark.parametrize(("name", "model"), [("minimax_m3_vl", "MiniMaxM3VLVisionModel"), ("mimi", "MimiEncoderModel")])
def test_models_that_break_only_where_all_is_captured(name: str, model: str) -> None:
    """Sizes that tensors tell are numbers to these models' layers, which cannot do with symbols."""
    (found,) = [p for p in ARCHITECTURES[name].programs() if p.name == model]
    got, want = models_table.transformed_step(found, offload=True), models_table.plain_step(found)
    assert models_table.verdict(got, want, None)[0] in ("bit for bit", "close")


def test_what_fails_is_told() -> None:
    row = models_table.survey(program(Failing))
    assert [row[column] for column in COLUMNS] == ["fails", "fails", "fails", "fails", "fails"]
    assert "no such luck" in row["why"]["plain"]
    row = models_table.in_own_process(dies, program(Tower))
    assert row["eager"] == "fails" and row["why"] == {"eager": "the process died"} and not models_page.equal(row)


def test_other_numbers_are_told() -> None:
    row = models_table.survey(program(Unsteady))
    assert row["plain"] == row["offload"] == row["compiled"] == "differs"
    assert "loss: largest difference" in row["why"]["plain"]


def test_a_step_is_compared() -> None:
    one, near, far = (Step(torch.tensor(x), {}) for x in (1.0, 1.00001, 1.1))
    assert models_table.verdict(one, None, None) == ("runs", "")
    assert models_table.verdict(one, one, None) == ("bit for bit", "")
    assert models_table.verdict(near, one, None) == ("close", "")
    assert models_table.verdict(far, one, far) == ("as aot_eager", "")
    assert models_table.verdict(far, one, near)[0] == "differs"


def cells(**given: str) -> dict[str, Any]:
    good = dict(zip(COLUMNS, ("runs", "runs", "bit for bit", "close", "as aot_eager"), strict=True))
    return {"name": "Model", "why": {}, "seconds": 1, **good, **given}


def row(name: str, *programs: dict[str, Any], **given: Any) -> models_page.Row:
    return {"name": name, "layers": 1, "missing": [], "failed": {}, "programs": [*programs], "torch": "2", **given}


def test_the_page() -> None:
    odd = cells(compiled="differs", why={"compiled": "loss: largest difference 1\nand more"})
    alone = cells(compiles="fails", compiled="refused")
    rows = [row("a", cells()), row("b", odd), row("c", alone), row("d", missing=["Lost"], failed={"D": "no reason"})]
    assert [models_page.fell_short(r) for r in rows] == [False, True, True, True]
    text = models_page.page(rows)
    assert "4 architectures, 4 layer classes, 3 of them in 3 models" in text
    assert "| compiled: equal numbers | 1 | 3 |" in text
    assert "| all three, of those that train under `torch.compile` without fxckpt | 1 (50.0%) | 2 |" in text
    assert "| a | Model | runs | runs | bit for bit | close | as aot_eager |" in text
    assert "  - Model, compiled: differs. loss: largest difference 1 and more" in text
    assert "  - in no model: Lost. D: no reason" in text and "**a**" not in text


def test_a_survey_goes_on_where_it_stopped(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []

    def measure(architecture: Architecture) -> models_page.Row:
        measured.append(architecture.name)
        return row(architecture.name, cells(compiled="differs") if architecture.name == "clip" else cells())

    file = tmp_path / "rows.jsonl"
    monkeypatch.setattr(models_table, "measure", measure)
    monkeypatch.setattr(models_table, "architectures", lambda: [ARCHITECTURES[n] for n in ("clip", "llama")])
    for given in (["llama"], [], ["--again"], ["--again", "llama"]):
        monkeypatch.setattr("sys.argv", ["models_table", "--out", str(file), *given])
        models_table.main()
    assert measured == ["llama", "clip", "clip", "llama"]
    assert list(models_table.read(file)) == ["clip", "llama"]
