"""`fxckpt timeline`: what is in memory at each step of a compiled training step."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console, RenderableType

from fxckpt import cli
from fxckpt.bench.timeline import (
    OF_PARAMETERS,
    OTHER,
    RECOMPUTED,
    SAVED,
    GraphTimeline,
    Timeline,
    measure_timeline,
    plot_timeline,
    render_timeline,
)
from fxckpt.decide.memory import Value
from fxckpt.errors import SettingsError
from fxckpt.models.spec import ModelSpec
from tests.helpers import DEVICE

SPEC = ModelSpec(
    "llama",
    batch=2,
    seq=128,
    device=DEVICE,
    overrides={
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    },
)


@pytest.fixture(scope="module")
def llama() -> Timeline:
    return measure_timeline(SPEC, "fxckpt@1")


def test_a_step_is_a_forward_and_a_backward(llama: Timeline) -> None:
    forward, backward = llama.graphs
    assert not forward.is_backward and backward.is_backward
    for graph in llama.graphs:
        assert all(0 <= v.first <= v.last < len(graph.modules) for v in graph.values)
        assert graph.totals[graph.peak] == max(graph.totals) == sum(v.nbytes for v in graph.alive(graph.peak))


def test_what_is_saved_is_the_layers_inputs(llama: Timeline) -> None:
    forward, backward = llama.graphs
    boundary = 2 * 128 * 64 * 4
    for graph in llama.graphs:
        saved = [v.name for v in graph.values if v.kind == SAVED and v.nbytes == boundary]
        assert len(saved) >= 3
    kept = {v.name for v in forward.values if v.kind == SAVED}
    assert {v.name for v in backward.values if v.kind == SAVED} & kept
    assert forward.bytes_by_kind()[RECOMPUTED] == [0] * len(forward.modules)


def test_regions_are_recomputed_one_at_a_time(llama: Timeline) -> None:
    backward = llama.graphs[1]
    wide = [v for v in backward.values if v.kind == RECOMPUTED and v.nbytes >= 2 * 128 * 256 * 4]
    layers = {n for n in range(3) for v in wide if f"layers.{n}." in v.module}
    assert layers == {0, 1, 2}
    for step in range(len(backward.modules)):
        assert len({v.module.split(".")[2] for v in wide if v.first <= step <= v.last}) <= 1
    gradients = backward.bytes_by_kind()[OF_PARAMETERS]
    assert gradients[0] < gradients[-1] and gradients == sorted(gradients)


def test_the_account_is_near_what_is_measured(llama: Timeline) -> None:
    """What operators allocate inside themselves is not in it; all else is."""
    peak = max(max(g.totals) for g in llama.graphs)
    assert 0.75 * llama.measured_bytes <= peak <= 1.1 * llama.measured_bytes


def made_up() -> Timeline:
    values = (
        Value("x", SAVED, 4096, "layers.0", "model.py:3 in forward: x = f(x)", 0, 1),
        Value("y", RECOMPUTED, 2048, "layers.0", "", 1, 2),
        Value("dw", OF_PARAMETERS, 1024, "", "", 2, 2),
        Value("z", OTHER, 10, "", "", 1, 1),
    )
    return Timeline("fxckpt@1", (GraphTimeline(True, ("", "layers.0", "layers.0"), values),), 7000)


def text_of(shown: RenderableType) -> str:
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(shown)
    return console.export_text()


def test_the_table() -> None:
    text = text_of(render_timeline(made_up(), rows=2))
    assert "fxckpt@1, backward: 6.0 KiB at step 2 of 3 in layers.0" in text
    assert "saved for backward 4.0 KiB, recomputed 2.0 KiB, other 10 B" in text
    assert "model.py:3 in forward" in text and "1 more" in text and "measured peak of the step: 6.8 KiB" in text


def test_the_json() -> None:
    found = json.loads(json.dumps(made_up().to_dict()))
    (graph,) = found["graphs"]
    assert graph["peak"] == 1 and graph["bytes"][SAVED] == [4096, 4096, 0]
    assert [v["name"] for v in graph["alive"]] == ["x", "y", "z"]


def test_the_picture(tmp_path: Path) -> None:
    plot_timeline([made_up(), made_up()], tmp_path / "x.svg")
    text = (tmp_path / "x.svg").read_text(encoding="utf-8")
    assert "<svg" in text


@pytest.mark.parametrize("variant", ["eager", "hf-eager@2"])
def test_what_runs_no_graphs_has_none(variant: str) -> None:
    with pytest.raises(SettingsError, match="has a timeline"):
        measure_timeline(SPEC, variant)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cli, "measure_timeline", lambda spec, variant: made_up())
    file = tmp_path / "x.json"
    monkeypatch.setattr("sys.argv", ["fxckpt", "timeline", "llama", "--json", str(file), "--rows", "1"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    assert "2 more" in capsys.readouterr().out and len(json.loads(file.read_text())) == 1
