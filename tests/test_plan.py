"""`fxckpt.plan`: what a step will cost, said from tensors without contents, is what it costs."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxckpt
from fxckpt import cli, torch_private
from fxckpt.bench.step import TrainingStep
from fxckpt.config import make_settings
from fxckpt.models.load import load
from fxckpt.models.spec import ModelSpec
from fxckpt.predict import capture as capturing
from fxckpt.predict import plan as planning
from fxckpt.predict.capture import CapturedStep, Captures
from fxckpt.predict.steps import read_steps
from fxckpt.record import GraphRecord, simulate_records
from tests.helpers import assert_same, train_step
from tests.situations.models import stack
from tests.zoo import build

WIDTHS = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
DECODER = {**WIDTHS, "num_key_value_heads": 2, "num_hidden_layers": 9}
SPECS = {
    "llama": ModelSpec("llama", batch=2, seq=64, overrides=DECODER),
    "bert": ModelSpec("bert", batch=2, seq=64, overrides={**WIDTHS, "num_hidden_layers": 9}),
    "t5": ModelSpec(
        "t5",
        batch=2,
        seq=32,
        overrides={
            "vocab_size": 256,
            "d_model": 64,
            "d_kv": 16,
            "d_ff": 128,
            "num_layers": 8,
            "num_decoder_layers": 9,
            "num_heads": 4,
        },
    ),
    "gemma3_text": ModelSpec(
        "gemma3_text",
        batch=1,
        seq=32,
        overrides={**DECODER, "num_hidden_layers": 31, "head_dim": 16, "sliding_window": 8},
    ),
}


COMPILED = planning.Target(compiled=True)


def settings(**given: Any) -> Any:
    every: dict[str, Any] = {"every_n": 1, "offload": False, "layers": None, "policy": None}
    return make_settings(**{**every, **given}, verify=True, debug_dir=None)


def figures(plan: fxckpt.Plan) -> dict[str, int]:
    names = ("saved_bytes", "offloaded_bytes", "flops", "recomputed_flops", "peak_bytes")
    return {name: getattr(plan, name) for name in names}


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many layers each capture for a plan has."""
    found: list[int] = []
    original = capturing._run

    def capture(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        found.append(len([m for m in model.modules() if "GradientCheckpointingLayer" in str(type(m).__mro__)]))
        return original(model, *args, **kwargs)

    monkeypatch.setattr(capturing, "_run", capture)
    return found


# ---- against what happens -------------------------------------------------------------------------------------------


STEPS = [
    ("llama", {"every_n": 2}, ""),
    ("t5", {"offload": True}, ""),
    ("gpt2", {"every_n": 2, "offload": True}, ""),
    ("mixtral", {"offload": True}, ""),
    ("swin", {"every_n": 3}, ""),
    ("llama", {"every_n": 2, "offload": True}, "kernels"),
    ("bert", {"every_n": 2}, "schedules"),  # without the kernels, which take half a minute
    ("t5", {"every_n": 2}, "schedules"),
    ("gpt2", {"offload": True}, "schedules"),
]


def peak(records: Sequence[GraphRecord], schedules: Sequence[torch_private.Schedule] | None) -> int:
    if schedules is None:
        return max(g.peak_bytes for g in simulate_records(records))
    return read_steps(CapturedStep(records, schedules)).peak_bytes


@pytest.mark.parametrize(("name", "given", "compiled"), STEPS, ids=str)
def test_a_plan_says_what_a_step_costs(name: str, given: Mapping[str, Any], compiled: str) -> None:
    model, batch = build(name, False)
    plan = fxckpt.plan(model, batch, **given, compiled=bool(compiled))
    torch._dynamo.reset()
    t = fxckpt.transform(model, **given)
    recorded = torch_private.recorded_schedules if compiled == "kernels" else torch_private.schedules_alone
    with recorded() if compiled else contextlib.nullcontext() as schedules:
        train_step(torch.compile(t) if compiled else t, model, batch)  # a backward is compiled when it runs
    told = fxckpt.explain(t)
    assert figures(plan) == {
        "saved_bytes": told.saved_bytes,
        "offloaded_bytes": told.offloaded_bytes,
        "flops": told.flops,
        "recomputed_flops": told.recomputed_flops,
        "peak_bytes": peak(fxckpt.graphs(t), schedules),
    }
    assert [layer.name for layer in plan.layers if layer.treatment == "recompute"] == fxckpt.selected_layers(t)
    by_layer: dict[str, int] = {}
    for graph in told.current:
        for region in graph.regions:
            by_layer[region.layer] = by_layer.get(region.layer, 0) + region.offloaded_bytes
    assert {layer.name: layer.offloaded_bytes for layer in plan.layers} == by_layer


@pytest.mark.parametrize(
    ("name", "given"),
    [("llama", {}), ("llama", {"every_n": 2}), ("llama", {"offload": True}), ("bert", {"offload": True}), ("t5", {})],
    ids=str,
)
def test_equal_layers_are_captured_once_and_counted_often(
    name: str, given: Mapping[str, Any], captured: list[int]
) -> None:
    model, batch = load(SPECS[name])
    if given.get("every_n") == 2:  # four periods of two layers, and one more
        model, batch = load(ModelSpec(**{**vars(SPECS[name]), "overrides": _deeper(SPECS[name].overrides, 11)}))
    folded = planning.plan_step(Captures(model, batch), settings(**given), planning.Target())
    whole = planning.plan_step(Captures(model, batch), settings(**given), planning.Target(), fold=False)
    assert folded.plan == whole.plan
    if given.get("every_n") != 2:  # there a view without memory of its own stands elsewhere
        assert folded.steps == whole.steps
    few, all_of_them = captured
    assert few < all_of_them == len(whole.plan.layers)


@pytest.mark.parametrize(("name", "random"), [("gpt2", True), ("t5", False), ("mixtral", False)])
def test_other_settings_need_no_other_capture(name: str, random: bool, captured: list[int]) -> None:
    model, batch = build(name, random)
    captures = Captures(model, batch)
    every: list[dict[str, Any]] = [
        {"every_n": 2},
        {"offload": True, "save": ("matmul",)},
        {"policy": lambda layer: False},
    ]
    for given in every:
        found = planning.plan_step(captures, settings(**given), planning.Target())
        assert found == planning.plan_step(Captures(model, batch), settings(**given), planning.Target())
    assert len(captured) == 1 + len(every)
    with pytest.raises(fxckpt.SettingsError, match="save="):
        captures.step(settings(save="aten.cosh"))
    assert len(captured) == 1 + len(every)


def test_a_step_in_frames_of_alike_modules_is_captured_each_time(captured: list[int]) -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Half() for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x.sum()

    class Half(fxckpt.GradientCheckpointingLayer):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x).relu()
            torch._dynamo.graph_break()
            return self.second(x)

    model, batch = Broken(), {"x": torch.ones(4, 16)}
    captures = Captures(model, batch)
    for n in (1, 2):
        assert captures.step(settings(every_n=n)).records
    assert len(captured) == 2


def _deeper(overrides: Mapping[str, Any], layers: int) -> dict[str, Any]:
    return {k: layers if "layers" in k else v for k, v in overrides.items()}


@pytest.mark.slow
def test_a_pattern_of_layers_is_one_period(captured: list[int]) -> None:
    model, batch = load(SPECS["gemma3_text"])  # every sixth layer attends to all tokens
    folded = planning.make_plan(Captures(model, batch), settings())
    assert captured == [25]
    assert len(folded.layers) == 31
    assert folded == planning.make_plan(Captures(model, batch), settings(), fold=False)


class Narrowing(fxckpt.GradientCheckpointingLayer):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, width), nn.Linear(width, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Tower(nn.Module):
    def __init__(self, widths: list[int], counted: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Narrowing(width) for width in widths)
        self.number = len(widths) if counted else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks if self.number is None else [self.blocks[i] for i in range(self.number)]:
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("widths", [[32] * 12, [8, 16, 24, 32, 40, 48, 56, 64], [64, *[32] * 9]], ids=str)
def test_layers_that_cannot_be_left_out_are_not(widths: list[int], counted: bool, captured: list[int]) -> None:
    model, batch = Tower(widths, counted), {"x": torch.randn(4, 16)}
    plan = planning.make_plan(Captures(model, batch), settings())
    same = len(set(widths)) < 3
    assert captured == [len(widths)] if not same else captured[0] < len(widths)
    assert len(captured) == (2 if counted and same else 1)  # a model that counts its layers is captured as a whole then
    assert plan == planning.make_plan(Captures(model, batch), settings(), fold=False)


def test_equal_kernels_are_counted_often(captured: list[int]) -> None:
    model, batch = Tower([32] * 12), {"x": torch.randn(64, 16)}
    plan = planning.make_plan(Captures(model, batch), settings(), COMPILED)
    assert captured[0] < 12 and len(captured) == 1
    assert plan == planning.make_plan(Captures(model, batch), settings(), COMPILED, fold=False)


@pytest.mark.parametrize("given", [{}, {"every_n": 2}, {"policy": lambda layer: False}], ids=["1", "2", "kept"])
def test_the_peak_of_a_compiled_step(given: Mapping[str, Any]) -> None:
    model, batch = Tower([256] * 3), {"x": torch.randn(512, 16)}
    plan = fxckpt.plan(model, batch, **given, compiled=True)
    step = TrainingStep(model, torch.compile(fxckpt.transform(model, **given)), batch, seed=0)
    step.timed()
    _, measured = step.memory()
    assert abs(plan.peak_bytes - measured) <= 64, "the loss and its gradient"


# ---- without memory -------------------------------------------------------------------------------------------------


def qwen3(layers: int, hidden: int, seq: int, **fields: Any) -> tuple[nn.Module, dict[str, Any]]:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        num_hidden_layers=layers, hidden_size=hidden, use_cache=False, max_position_embeddings=seq, **fields
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
        ids = torch.empty(1, seq, dtype=torch.long)
    return model, {"input_ids": ids, "labels": ids}


def test_published_arithmetic() -> None:
    """Qwen3's shape, 8 layers, hidden 1024, 8192 tokens, bf16: 128 MiB of boundary activations."""
    model, batch = qwen3(8, 1024, 8192, intermediate_size=3072, num_attention_heads=16, num_key_value_heads=8)
    plan = fxckpt.plan(model, batch, offload=True)
    assert plan.offloaded_bytes == 128 * 2**20
    assert all(p.is_meta for p in model.parameters())


@pytest.mark.slow
def test_published_arithmetic_of_a_large_model() -> None:
    """Qwen3-8B at 131,072 tokens: 36 GiB of boundary activations, planned on a machine that has not this memory."""
    model, batch = qwen3(36, 4096, 131072, intermediate_size=12288, num_attention_heads=32, num_key_value_heads=8)
    plan = fxckpt.plan(model, batch, offload=True)
    assert plan.offloaded_bytes == 36 * 2**30
    assert plan.parameter_bytes > 8e9 * 2 * 0.95


def test_a_plan_leaves_the_model_alone() -> None:
    model, batch = build("llama", False)
    want = train_step(model, model, batch)
    before = {name: (id(p), p.detach().clone()) for name, p in model.named_parameters()}
    fxckpt.plan(model, batch, offload=True)
    assert {n: id(p) for n, p in model.named_parameters()} == {n: i for n, (i, _) in before.items()}
    assert all(torch.equal(p, before[n][1]) for n, p in model.named_parameters())
    assert_same(train_step(model, model, batch), want)
    t = fxckpt.transform(model, offload=True)
    assert_same(train_step(t, model, batch), want)
    assert figures(fxckpt.plan(t, batch)) == figures(fxckpt.plan(model, batch))


def test_what_needs_contents_is_refused() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Narrowing(8) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
                if x.sum().item() > 1e9:
                    x = x / 2
            return x.mean()

    model, batch = Reads(), {"x": torch.randn(4, 16)}
    with pytest.raises(fxckpt.CaptureError, match="contents"):
        fxckpt.plan(model, batch)


@pytest.mark.parametrize(
    ("model", "batch", "message"),
    [("llama", {}, "torch.nn.Module"), (nn.Linear(2, 2), [torch.ones(2)], "dict of keyword arguments")],
)
def test_arguments_of_the_wrong_kind(model: Any, batch: Any, message: str) -> None:
    with pytest.raises(fxckpt.SettingsError, match=message):
        fxckpt.plan(model, batch)


# ---- followed and kept ----------------------------------------------------------------------------------------------


def test_a_plan_is_followed(tmp_path: Path) -> None:
    model, batch = build("llama", False)
    plan = fxckpt.plan(model, batch, every_n=2, offload=fxckpt.Offload(prefetch=2))
    plan.save(tmp_path / "plan.json")
    assert fxckpt.Plan.load(tmp_path / "plan.json") == plan
    want = train_step(model, model, batch)
    for given in (plan, tmp_path / "plan.json", str(tmp_path / "plan.json")):
        t = fxckpt.transform(model, plan=given)
        assert_same(train_step(t, model, batch), want)
        told = fxckpt.explain(t)
        assert (told.saved_bytes, told.offloaded_bytes) == (plan.saved_bytes, plan.offloaded_bytes)


def test_a_plan_for_another_model_is_refused() -> None:
    model, batch = stack(lambda: Narrowing(8), n=3, shape=(2, 16))
    other, _ = stack(lambda: Narrowing(8), n=4, shape=(2, 16))
    plan = fxckpt.plan(model, batch)
    with pytest.raises(fxckpt.SettingsError, match="3 boundary layers"):
        fxckpt.transform(other, plan=plan)
    with pytest.raises(fxckpt.SettingsError, match="leave these out"):
        fxckpt.transform(model, plan=plan, every_n=2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fxckpt_plan": 1}, "anew"),
        ({"layers": None}, "field"),
        ({"layers": [{"name": "a"}]}, "field"),
        ({"peak_bytes": -1}, "at least 0"),
        ({"peak_bytes": "much"}, "at least 0"),
        ({"predicted_seconds": 0}, "above 0"),
        ({"predicted_seconds": "long"}, "above 0"),
        ({"offload": {"to": "moon"}}, "cpu"),
        ({"offload": {"where": "cpu"}}, "field"),
    ],
    ids=str,
)
def test_broken_files_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    model, batch = stack(lambda: Narrowing(8), n=2, shape=(2, 16))
    plan = fxckpt.plan(model, batch)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({**plan.to_dict(), **change}))
    with pytest.raises(fxckpt.SettingsError, match=message):
        fxckpt.transform(model, plan=path)


def test_files_that_are_no_plans(tmp_path: Path) -> None:
    with pytest.raises(fxckpt.SettingsError, match="cannot be read"):
        fxckpt.Plan.load(tmp_path / "missing.json")
    (tmp_path / "text.json").write_text("not json")
    with pytest.raises(fxckpt.SettingsError, match="no plan"):
        fxckpt.Plan.load(tmp_path / "text.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(fxckpt.SettingsError, match="no plan"):
        fxckpt.Plan.load(tmp_path / "list.json")


# ---- the command ----------------------------------------------------------------------------------------------------


def run_command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["fxckpt", "plan", *arguments])
    with pytest.raises(SystemExit) as done:
        cli.main()
    return done.value.code if isinstance(done.value.code, int) else 0


@pytest.mark.parametrize("as_file", [False, True])
def test_the_command_plans_a_configuration(
    as_file: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = tmp_path / "config.json"
    fields = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **DECODER, "auto_map": {"A": "code.B"}}
    config.write_text(json.dumps(fields))
    (tmp_path / "code.py").write_text("raise SystemExit('this must not run')")
    given = ["--config", str(config if as_file else tmp_path), "--batch", "2", "--seq", "64", "--dtype", "bfloat16"]
    status = run_command(monkeypatch, *given, "--every-n", "2", "--offload", "--json", str(tmp_path / "plan.json"))
    assert status == 0
    plan = fxckpt.Plan.load(tmp_path / "plan.json")
    assert plan.offloaded_bytes == 5 * 2 * 64 * 64 * 2
    shown = capsys.readouterr().out
    assert "model.layers.{1,3,5,7}" in shown or "model.layers.{1,3,5}" in shown
    spec = ModelSpec("llama", batch=2, seq=64, dtype="bfloat16", overrides=DECODER)
    assert plan == fxckpt.plan(*load(spec, shapes=True), every_n=2, offload=True)
    on_cpu = fxckpt.plan(*load(spec), every_n=2, offload=True)  # a CPU's copies lie in its own memory
    assert on_cpu.offloaded_bytes == plan.offloaded_bytes and on_cpu.peak_bytes > plan.peak_bytes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a model, or --config"),
        (["llama", "--config", "here"], "give a model, or --config"),
        (["--config", "missing.json"], "is no model: missing.json"),
        (["llama", "--json", "no/such/folder/plan.json"], "no such folder"),
        (["llama", "--every-n", "0"], "every_n"),
    ],
    ids=str,
)
def test_a_command_that_means_nothing(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(monkeypatch, *arguments) == 2
    assert message in " ".join(capsys.readouterr().err.split())
