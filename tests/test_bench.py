"""``fxckpt bench``: the language of variants, the models, the figures, the outputs, and one run from end to end."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from transformers import dynamic_module_utils

import fxckpt
from fxckpt import cli
from fxckpt.bench.plot import check_plot, plot
from fxckpt.bench.process import WorkerError, WorkerProcess
from fxckpt.bench.result import BenchResult, VariantResult, median_ratio
from fxckpt.bench.run import run_bench
from fxckpt.bench.step import TrainingStep, gradient_difference, loss_of
from fxckpt.bench.table import WIDTH, render
from fxckpt.bench.variants import KINDS, Variant, parse_variant, parse_variants
from fxckpt.decide.pareto import pareto
from fxckpt.errors import SettingsError
from fxckpt.models.load import load
from fxckpt.models.spec import ModelSpec, parse_overrides
from fxckpt.show.tables import seconds_text, spread_text
from tests.benchmarks import bench_set
from tests.helpers import measured

SMALL = {
    "llama": {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    },
    "bert": {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    "t5": {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
    "vit": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "image_size": 32, "patch_size": 8},
    "whisper": {
        "vocab_size": 64,
        "d_model": 32,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
        "max_source_positions": 16,
        "pad_token_id": 0,
        "decoder_start_token_id": 1,
    },
}
SMALL["bert"]["num_attention_heads"] = SMALL["vit"]["num_attention_heads"] = 2
SMALL["whisper"]["encoder_attention_heads"] = SMALL["whisper"]["decoder_attention_heads"] = 2

PLAIN_MODEL = """
import torch
from torch import nn


class Stack(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def make(batch, seq):
    return Stack(8), {"x": torch.randn(batch, seq, 8)}


def fixed():
    return Stack(8), {"x": torch.randn(3, 8)}


def typed(dtype):
    return Stack(8).to(dtype), {"x": torch.randn(3, 8, dtype=dtype)}


def wrong():
    return Stack(8)
"""


@pytest.fixture
def plain_model(tmp_path: Path) -> Path:
    file = tmp_path / "plain_model.py"
    file.write_text(PLAIN_MODEL, encoding="utf-8")
    return file


OWN_CONFIGURATION = """
from transformers import PretrainedConfig


class OwnConfig(PretrainedConfig):
    model_type = "own"

    def __init__(self, vocab_size=64, width=16, layers=2, **others):
        self.vocab_size, self.width, self.layers = vocab_size, width, layers
        super().__init__(**others)
"""
OWN_MODEL = """
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutput

from .configuration_own import OwnConfig


class Layer(GradientCheckpointingLayer):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return x + self.linear(x).relu()


class OwnForCausalLM(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.width)
        self.layers = nn.ModuleList(Layer(config.width) for _ in range(config.layers))
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids, labels=None):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return CausalLMOutput(loss=nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits=logits)
"""


# ---- variants ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("eager", Variant("eager")),
        (" compile ", Variant("compile")),
        ("hf-eager@2", Variant("hf-eager", 2)),
        ("hf-eager@2+offload", Variant("hf-eager", 2, "offload")),
        ("hf-compile@1", Variant("hf-compile", 1)),
        ("torch-budget@0.5", Variant("torch-budget", 0.5)),
        ("torch-budget@0", Variant("torch-budget", 0)),
        ("fxckpt-plain@3", Variant("fxckpt-plain", 3)),
        ("fxckpt@12+offload", Variant("fxckpt", 12, "offload")),
        ("fxckpt-plain@1+disk", Variant("fxckpt-plain", 1, "disk")),
        ("fxckpt@1.5GiB+offload", Variant("fxckpt", option="offload", given="1.5GiB")),
        ("fxckpt@plans/a.json", Variant("fxckpt", given="plans/a.json")),
    ],
)
def test_variants_are_parsed(text: str, wanted: Variant) -> None:
    assert parse_variant(text) == wanted
    assert str(wanted) == text.strip()
    assert wanted.ours is text.startswith("fxckpt")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fxcheckpoint@1", "There is no variant 'fxcheckpoint@1'. There are: eager, hf-eager@n[+offload], compile,"),
        ("eager@@1", "There is no variant"),
        ("eager@2", "eager takes no number"),
        ("fxckpt", "write fxckpt@n"),
        ("fxckpt@0", "a whole number of at least 1"),
        ("hf-eager@1.5", "a whole number of at least 1"),
        ("hf-eager@2GiB", "a whole number of at least 1"),
        ("fxckpt@1.5", "a whole number of at least 1, a budget such as 24GiB, or a plan"),
        ("fxckpt@much", "a whole number of at least 1, a budget such as 24GiB, or a plan"),
        ("fxckpt@a.json+offload", "a plan says itself what is offloaded"),
        ("torch-budget@2", "a fraction between 0 and 1"),
        ("torch-budget@nan", "a fraction between 0 and 1"),
        ("compile+offload", "takes nothing after +"),
        ("fxckpt@1+tape", "takes only fxckpt@n+offload|+disk"),
        ("hf-eager@1+disk", "takes only hf-eager@n+offload"),
    ],
)
def test_what_is_no_variant_is_told(text: str, message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        parse_variant(text)
    assert message in str(caught.value)


def test_each_variant_once_and_at_least_one() -> None:
    with pytest.raises(SettingsError, match=r"given twice: fxckpt@1$|given twice: fxckpt@1\."):
        parse_variants(["fxckpt@1", "eager", "fxckpt@01"])
    with pytest.raises(SettingsError, match="No variant is given"):
        parse_variants([" "])


def test_the_bench_set_names_what_exists() -> None:
    assert {v.kind for v in parse_variants(bench_set.VARIANTS.split(","))} == KINDS.keys()


# ---- what is measured -------------------------------------------------------------------------------------------


def test_overrides() -> None:
    found = parse_overrides(["a=1", "b.c=true", "b.d=text", "e=[1, 2]", "f=None", "g=x=y"])
    assert found == {"a": 1, "b": {"c": True, "d": "text"}, "e": [1, 2], "f": None, "g": "x=y"}


@pytest.mark.parametrize("texts", [["a"], ["=1"], ["a..b=1"], ["a=1", "a=2"], ["a=1", "a.b=2"]])
def test_wrong_overrides_are_told(texts: list[str]) -> None:
    with pytest.raises(SettingsError, match="--set"):
        parse_overrides(texts)


@pytest.mark.parametrize(
    "fields", [{"batch": 0}, {"seq": 1.5}, {"dtype": "int8"}, {"device": "tpu"}, {"batch": True}, {"device": "cuda:x"}]
)
def test_wrong_settings_are_told(fields: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=next(iter(fields))):
        ModelSpec("llama", **fields)


@pytest.mark.parametrize(
    ("model_type", "model_class", "batch"),
    [
        ("llama", "LlamaForCausalLM", {"input_ids": (3, 8), "labels": (3, 8)}),
        ("bert", "BertForMaskedLM", {"input_ids": (3, 8), "labels": (3, 8)}),
        ("t5", "T5ForConditionalGeneration", {"input_ids": (3, 8), "labels": (3, 8)}),
        ("vit", "ViTForImageClassification", {"pixel_values": (3, 3, 32, 32), "labels": (3,)}),
        ("whisper", "WhisperForConditionalGeneration", {"input_features": (3, 80, 32), "labels": (3, 8)}),
    ],
)
def test_a_model_type_is_trained_for_what_it_is_made_for(model_type: str, model_class: str, batch: Any) -> None:
    spec = ModelSpec(model_type, batch=3, seq=8, overrides=SMALL[model_type])
    model, made = load(spec)
    assert type(model).__name__ == model_class
    assert {name: tuple(value.shape) for name, value in made.items()} == batch
    rates = [m.p for m in model.modules() if isinstance(m, nn.Dropout)]
    assert model.training and not any(rates)
    first, second = (TrainingStep(m, m, b, 0) for m, b in ((model, made), load(spec)))
    for step in (first, second):
        assert step.timed() > 0
    assert gradient_difference(first.gradients(), second.gradients()) == (0.0, "")


def test_a_folder_with_a_configuration(tmp_path: Path) -> None:
    """Its architecture decides the task; nothing in it is executed, and the overrides win."""
    fields = {"model_type": "bert", "architectures": ["BertForSequenceClassification"], **SMALL["bert"]}
    fields |= {"auto_map": {"AutoModelForMaskedLM": "evil.Evil"}, "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    (tmp_path / "evil.py").write_text("raise SystemExit('executed')", encoding="utf-8")
    model, batch = load(ModelSpec(str(tmp_path), seq=8, overrides={"num_hidden_layers": 1}, dtype="bf16", dropout=True))
    assert type(model).__name__ == "BertForSequenceClassification"
    assert model.config.num_hidden_layers == 1 and model.config.hidden_size == 32
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert batch["labels"].shape == (2,)
    assert any(m.p for m in model.modules() if isinstance(m, nn.Dropout))


def test_a_folder_with_code_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is run where that is asked for, and refused else."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "configuration_own.py").write_text(OWN_CONFIGURATION, encoding="utf-8")
    (folder / "modeling_own.py").write_text(OWN_MODEL, encoding="utf-8")
    code = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    fields = {"model_type": "own", "auto_map": code, "width": 24}
    (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    with pytest.raises(SettingsError, match=r"code of its own .* --trust-remote-code"):
        load(ModelSpec(str(folder)))
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    spec = ModelSpec(str(folder), batch=3, seq=8, overrides={"layers": 5}, trust_remote_code=True)
    model, batch = load(spec, shapes=True)
    assert type(model).__name__ == "OwnForCausalLM" and batch["labels"].shape == (3, 8)
    plan = fxckpt.plan(model, batch, every_n=2)
    assert [layer.treatment for layer in plan.layers] == ["recompute", "keep", "recompute", "keep", "recompute"]
    assert plan.parameter_bytes == 4 * (64 * 24 * 2 + 5 * (24 * 24 + 24))
    real, batch = load(spec)
    assert TrainingStep(real, real, batch, 0).timed() > 0
    fields["auto_map"] = {"AutoConfig": code["AutoConfig"]}
    (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    with pytest.raises(SettingsError, match="code of the folder is for none of the tasks"):
        load(spec)


@pytest.mark.parametrize("function", ["make", "fixed", "typed"])
def test_a_function_in_a_file(plain_model: Path, function: str) -> None:
    spec = ModelSpec(f"{plain_model}:{function}", batch=2, seq=5, dtype="bf16")
    model, batch = load(spec)
    assert batch["x"].shape == ((2, 5, 8) if function == "make" else (3, 8))
    assert {p.dtype for p in model.parameters()} | {batch["x"].dtype} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("model", "fields", "message"),
    [
        ("lama", {}, "no model type 'lama'. Did you mean .*llama"),
        ("llama", {"overrides": {"hiden_size": 3}}, "--set hiden_size: .* Did you mean hidden_size"),
        ("llama", {"overrides": {"hidden_size": 2**16, "num_hidden_layers": 2}}, "GiB for weights and gradients"),
        ("bert", {"overrides": SMALL["bert"], "seq": 600}, "seq=600 .* max_position_embeddings of 512"),
        ("sam", {}, "for none of the tasks"),
        ("no/such/folder", {}, "no folder"),
        ("{tmp}", {}, "is no model"),
        ("{tmp}/no.py:make", {}, "no file"),
        ("{tmp}/plain_model.py:nothing", {}, "no function 'nothing'"),
        ("{tmp}/plain_model.py:wrong", {}, r"must return \(model, batch\)"),
        ("{tmp}/plain_model.py:make", {"overrides": {"a": 1}}, "--set"),
    ],
)
def test_a_model_that_does_not_exist_is_told(
    plain_model: Path, model: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        load(ModelSpec(model.replace("{tmp}", str(plain_model.parent)), **fields))


def test_without_transformers_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SettingsError, match=r"pip install 'fxckpt\[transformers\]'"):
        load(ModelSpec("llama"))


# ---- one step ---------------------------------------------------------------------------------------------------


def test_the_memory_of_a_step_is_what_the_tests_measure(plain_model: Path) -> None:
    model, batch = load(ModelSpec(f"{plain_model}:make", batch=4, seq=64))
    step = TrainingStep(model, model, batch, seed=0)
    step.timed()
    held, peak = step.memory()
    step.prepare()
    loss, forward = measured(step.forward)
    del loss
    step.prepare()
    _, whole = measured(lambda: step.forward().backward())
    assert (held, peak) == (forward.held, whole.peak)
    assert held >= 3 * 4 * 64 * 8 * 4  # the outputs of the three layers


def test_flops_of_checkpointed_steps_are_more() -> None:
    model, batch = load(ModelSpec("llama", seq=8, overrides=SMALL["llama"]))
    step = TrainingStep(model, model, batch, seed=0)
    plain = step.flops()
    model.activation_checkpointing_enable()
    assert plain < step.flops() < 1.5 * plain


def test_the_loss_is_found() -> None:
    loss = torch.ones(())
    for output in (loss, {"loss": loss}, (loss, 1), torch.ones(1)):
        assert loss_of(output).shape == ()
    for output in (torch.ones(2), None, {"logits": loss}, ()):
        with pytest.raises(SettingsError, match="has no loss"):
            loss_of(output)


def test_gradient_differences() -> None:
    wanted = {"a": torch.tensor([1.0, -2.0]), "b": torch.tensor([0.0, 0.0])}
    assert gradient_difference(wanted, wanted) == (0.0, "")
    assert gradient_difference({**wanted, "a": torch.tensor([1.0, -2.5])}, wanted) == (0.25, "a")
    assert gradient_difference({"b": wanted["b"]}, wanted) == (1.0, "a")
    # a gradient that is rounding only is compared with the model's largest, not with itself
    noise, name = gradient_difference({**wanted, "b": torch.tensor([1e-9, 0.0])}, wanted)
    assert name == "b" and noise == pytest.approx(5e-7)
    worst, name = gradient_difference({**wanted, "a": torch.tensor([1.0, float("nan")])}, wanted)
    assert name == "a" and worst != worst


# ---- figures ----------------------------------------------------------------------------------------------------


def test_a_ratio_is_the_median_of_the_rounds_ratios() -> None:
    """Where the machine slows down halfway, the ratio of the medians would be off."""
    assert median_ratio([2.0, 2.2, 20.0, 40.0, 18.0], [1.0, 1.1, 10.0, 10.0, 9.0]) == 2.0
    assert median_ratio([1.0], [2.0, 4.0]) == 0.5
    assert median_ratio([], [1.0]) is None


def test_the_pareto_frontier() -> None:
    points = {"a": (1.0, 5.0), "b": (2.0, 3.0), "c": (3.0, 3.0), "d": (4.0, 1.0), "e": (4.0, 6.0), "f": (1.0, 5.0)}
    assert pareto(points) == ("a", "f", "b", "d")


def result() -> BenchResult:
    mib, batch = 2**20, {"input_ids": [2, 8], "labels": [2, 8]}
    eager = VariantResult("eager", False, None, 100 * mib, 90 * mib, None, [1.0, 1.2, 1.1], 1.0, 1.3, None, 0)
    eager.gradient_difference = 0.0
    slow = VariantResult("compile", False, None, 120 * mib, 80 * mib, None, [1.4, 1.3, 1.5], 1.3, 30.0, 1)
    ours = VariantResult("fxckpt@1", True, None, 40 * mib, 20 * mib, 0, [1.5, 1.6, 1.7], 1.4, 40.0, 1, 3 * 10**9)
    ours.pass_seconds, ours.gradient_difference = 0.4, 2e-6
    failed = VariantResult("hf-eager@1+offload", False, "RuntimeError: no pinned memory")
    machine = {"device": "cpu: x", "threads": 1, "cores": 2, "torch": "2.13", "transformers": None}
    machine |= {"fxckpt": "0.1.0", "python": "3.11"}
    return BenchResult(
        ModelSpec("llama"),
        (eager, slow, ours, failed),
        {"model": "Llama", "parameters": 10**6, "parameter_bytes": 4 * 10**6, "batch": batch},
        machine,
        {"steps": 1, "rounds": 3, "warmup": 1, "date": "2026-01-01", "peak": "somehow"},
    )


def test_the_table() -> None:
    console = Console(width=WIDTH, record=True, file=io.StringIO())
    console.print(render(result()))
    text = console.export_text()
    lines = text.splitlines()
    row = {name: next(line for line in lines if f" {name} " in line) for name in ("eager", "compile", "fxckpt@1")}
    assert row["eager"].lstrip().startswith("●") and row["fxckpt@1"].lstrip().startswith("●")
    assert not row["compile"].lstrip().startswith("●")
    for cell in ("40.0 MiB", "1.60 s", "1.55–1.65 s", "1.400", "3.0 GFLOP", "400 ms (1.0%)", "2.0e-06"):
        assert cell in row["fxckpt@1"]
    assert "hf-eager@1+offload failed: RuntimeError: no pinned memory" in text
    assert "1 threads of 2 cores; torch 2.13, fxckpt 0.1.0" in text and "peak: somehow" in text


def test_the_json_holds_everything() -> None:
    found = json.loads(json.dumps(result().to_dict()))
    assert found["frontier"] == ["fxckpt@1", "eager"] and found["baseline"] == "eager"
    assert found["variants"][2]["round_seconds"] == [1.5, 1.6, 1.7]
    assert found["variants"][2]["pass_share"] == 0.01
    assert found["variants"][3]["error"].startswith("RuntimeError")
    assert ModelSpec.from_dict(found["spec"]) == result().spec


def test_times_are_written_with_three_digits() -> None:
    assert [seconds_text(s) for s in (0.00123, 0.9994, 0.9996, 12.34, 123.4)] == [
        "1.23 ms",
        "999 ms",
        "1.00 s",
        "12.3 s",
        "123 s",
    ]
    assert spread_text(0.5, 1.5) == "0.500–1.50 s"


@pytest.mark.parametrize("ending", [".png", ".svg"])
def test_the_plot(tmp_path: Path, ending: str) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / f"plot{ending}"
    plot(result(), file)
    assert file.stat().st_size > 1000


def test_a_plot_that_cannot_be_drawn_is_told_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match=r"must end in one of \.png"):
        check_plot(tmp_path / "plot.gif")
    with pytest.raises(SettingsError, match="no such folder"):
        check_plot(tmp_path / "no" / "plot.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SettingsError, match=r"pip install 'fxckpt\[plot\]'"):
        check_plot(tmp_path / "plot.png")


def test_the_page_of_the_bench_set() -> None:
    """From results as they are in the files; without any it says so."""
    data = result().to_dict()
    peer = {**data["variants"][2], "variant": "hf-eager@1", "ours": False, "peak_bytes": 50 * 2**20}
    found = bench_set.page({"llama": {**data, "variants": [*data["variants"], peer]}})
    assert "| fxckpt@1 peak / hf-eager@1 peak | 0.800 | 1 | 0.800 | 0.800 |" in found
    assert "| **eager** | 100.0 MiB |" in found and "- hf-eager@1+offload failed: RuntimeError" in found
    assert "Not measured yet" in bench_set.page({})
    tables = [line for line in found.splitlines() if line.startswith("| ") and "hf-" not in line.partition("peak /")[0]]
    assert len({line.count("|") for line in tables if "MiB" in line}) == 1


# ---- processes --------------------------------------------------------------------------------------------------


def test_a_dead_process_tells_its_last_words(tmp_path: Path, plain_model: Path) -> None:
    plain_model.write_text(
        "import os, sys\ndef make():\n    print('last words', file=sys.stderr, flush=True)\n    os._exit(3)"
    )
    worker = WorkerProcess(tmp_path / "worker", threads=1)
    with pytest.raises(WorkerError, match=r"exit status 3\): .*last words"):
        worker.ask("load", spec=ModelSpec(f"{plain_model}:make").to_dict(), threads=1)
    worker.close()


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Exit status of the command."""
    monkeypatch.setattr(sys, "argv", ["fxckpt", *arguments])
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return int(caught.value.code or 0)


def test_failures_are_in_the_table_and_ours_is_in_the_exit_status(
    plain_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = plain_model.parent / "out.json"
    options = ["bench", f"{plain_model}:make", "--threads", "1", "--rounds", "2", "--warmup", "0"]
    # the first process gives the model; the peer fails, ours finds no boundary layer
    status = run_main(monkeypatch, *options, "--variants", "eager,hf-eager@1,fxckpt-plain@1", "--json", str(file))
    out = capsys.readouterr().out
    assert status == 1
    assert "hf-eager@1 failed: Stack is no transformers model" in out
    assert "fxckpt-plain@1 failed:" in out and "Traceback" not in out
    found = json.loads(file.read_text())
    assert [v["error"] is None for v in found["variants"]] == [True, False, False]
    assert len(found["variants"][0]["round_seconds"]) == 2


def test_the_failure_of_a_peer_is_none_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(cli, "run_bench", lambda *args, **kwargs: result())
    assert run_main(monkeypatch, "bench", "llama", "--plot", str(tmp_path / "plot.svg")) == 0
    assert "hf-eager@1+offload failed: RuntimeError" in capsys.readouterr().out
    assert (tmp_path / "plot.svg").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["llama", "--variants", "nothing"], "There is no variant 'nothing'"),
        (["llama", "--dtype", "int4"], "dtype='int4'"),
        (["llama", "--set", "x"], "write key=value"),
        (["llama", "--plot", "x.bmp"], "must end in"),
        (["llama", "--dropout", "maybe"], "use on or off"),
        (["llama", "--rounds", "0"], "rounds=0"),
        (["llama", "--json", "no/such/folder/x.json"], "no such folder"),
        (["no/model", "--variants", "eager"], "There is no folder 'no/model'"),
    ],
)
def test_errors_of_the_command_are_one_line(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(monkeypatch, "bench", *arguments) == 2
    told = capsys.readouterr()
    assert told.out == "" and len(told.err.strip().splitlines()) == 1
    assert told.err.startswith("fxckpt: ") and message in told.err


def test_wrong_options_are_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main(monkeypatch, "bench", "llama", "--sequence", "3") == 2
    assert "No such option: --sequence" in capsys.readouterr().err


def test_a_benchmark_from_end_to_end() -> None:
    """Eager, transformers' checkpointing, and fxckpt with ordinary kernels and with Inductor."""
    said: list[tuple[int, int]] = []
    variants = ["hf-eager@1", "fxckpt-plain@1+offload", "fxckpt@2"]
    spec = ModelSpec("llama", batch=4, seq=32, overrides=SMALL["llama"])
    found = run_bench(
        spec, variants, rounds=3, warmup=1, threads=1, on_progress=lambda done, total, _: said.append((done, total))
    )
    assert [v.variant for v in found.variants] == variants and not found.failed
    hf, plain, ours = found.variants
    for v in found.variants:
        assert len(v.round_seconds) == 3 and v.ratio and v.spread
        assert v.peak_bytes is not None and v.held_bytes is not None and v.peak_bytes >= v.held_bytes > 0
        assert v.gradient_difference is not None and v.gradient_difference < 1e-4
    assert hf.ratio == 1.0 and hf.graphs is None and plain.graphs == ours.graphs == 1
    assert plain.offloaded_bytes == 2 * 4 * 32 * 32 * 4 and ours.offloaded_bytes == 0
    assert plain.saved_bytes and ours.saved_bytes and plain.saved_bytes < ours.saved_bytes
    assert hf.recomputed_flops and plain.recomputed_flops and ours.recomputed_flops
    assert hf.recomputed_flops == pytest.approx(plain.recomputed_flops, rel=0.3)
    assert 0 < (ours.pass_share or 0) < 0.5 and (ours.partition_seconds or 0) > 0
    assert found.machine["threads"] == 1 and found.model["model"] == "LlamaForCausalLM"
    assert said[-1][0] < said[-1][1]
