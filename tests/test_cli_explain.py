"""`fxckpt explain`: what a step saves, said from tensors without contents, is what it saves."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fxckpt
from fxckpt import cli, torch_private
from fxckpt.models.load import load
from fxckpt.models.spec import ModelSpec
from fxckpt.show.data import Explanation

LAYERS = 9
SMALL = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": LAYERS,
}
SET = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]


def run_command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["fxckpt", "explain", *arguments])
    with pytest.raises(SystemExit) as done:
        cli.main()
    return done.value.code if isinstance(done.value.code, int) else 0


def explained(compiled: bool, **settings: Any) -> Explanation:
    """What `fxckpt.explain` says after a step that was run."""
    model, batch = load(ModelSpec("llama", batch=2, seq=64, overrides=SMALL, dropout=True))
    t = fxckpt.transform(model, **settings)
    torch._dynamo.reset()
    with torch_private.schedules_alone() if compiled else contextlib.nullcontext():
        (torch.compile(t) if compiled else t)(**batch)
    return fxckpt.explain(t)


def without_names_of_captures(figures: dict[str, Any]) -> dict[str, Any]:
    graphs = [{k: v for k, v in g.items() if k not in ("compile_id", "call")} for g in figures["graphs"]]
    return {**figures, "graphs": graphs, "transfers": None}


@pytest.mark.parametrize("compiled", [False, True])
def test_the_command_says_what_a_step_saves(
    compiled: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    given = ["--every-n", "2", "--offload", "--batch", "2", "--seq", "64", *(["--compiled"] if compiled else [])]
    assert run_command(monkeypatch, "llama", *SET, *given, "--json", str(tmp_path / "x.json")) == 0
    written = json.loads((tmp_path / "x.json").read_text())
    want = json.loads(explained(compiled, every_n=2, offload=True).to_json())
    assert without_names_of_captures(written) == without_names_of_captures(want)
    shown = capsys.readouterr().out
    assert "LlamaForCausalLM: every_n=2, offload to cpu" in shown
    assert "boundary: a recomputed region starts from it" in shown
    assert "modeling_llama.py:" in shown


def test_equal_layers_are_one_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """However deep the model is, its table is as long."""
    lengths, config = [], tmp_path / "config.json"
    for layers in (LAYERS, 2 * LAYERS):
        config.write_text(json.dumps({"model_type": "llama", **SMALL, "num_hidden_layers": layers}))
        assert run_command(monkeypatch, "--config", str(config), "--every-n", "3", "--seq", "32") == 0
        lengths.append(len(capsys.readouterr().out.splitlines()))
    assert lengths[0] == lengths[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "explain: give a model, or --config"),
        (["llama", "--config", "here"], "explain: give a model, or --config"),
        (["--config", "missing.json"], "is no model: missing.json"),
        (["llama", "--json", "no/such/folder/x.json"], "no such folder"),
        (["llama", "--every-n", "0"], "every_n"),
    ],
    ids=str,
)
def test_a_command_that_means_nothing(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(monkeypatch, *arguments) == 2
    assert message in " ".join(capsys.readouterr().err.split())
