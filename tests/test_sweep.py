"""`fxckpt.sweep` and `fxckpt plan --sweep`: plans of several settings side by side."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxckpt
from fxckpt import cli
from fxckpt.decide.policy import Given
from fxckpt.predict.budget import RESERVE
from fxckpt.show.sweep import Sweep, SweepRow
from fxckpt.show.tables import MARK
from tests.situations.models import stack

PROGRAM = """
import torch
from torch import nn

import fxckpt


class Block(fxckpt.GradientCheckpointingLayer):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def make(batch):
    return Tower(), {"x": torch.randn(batch, 16)}
"""


class Block(fxckpt.GradientCheckpointingLayer):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


def tower(layers: int) -> tuple[nn.Module, dict[str, Any]]:
    return stack(Block, n=layers, shape=(32, 16))


def run_command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["fxckpt", "plan", *arguments])
    with pytest.raises(SystemExit) as done:
        cli.main()
    return done.value.code if isinstance(done.value.code, int) else 0


@pytest.fixture(scope="module")
def six() -> Sweep:
    return fxckpt.sweep(*tower(6))


def test_rows_are_the_plans_of_their_settings(six: Sweep) -> None:
    model, batch = tower(6)
    want = {"nothing recomputed": fxckpt.plan(model, batch, policy=Given(()))}
    for n in (1, 2, 3, 4):
        want[f"every_n={n}"] = fxckpt.plan(model, batch, every_n=n)
        want[f"every_n={n}, offload"] = fxckpt.plan(model, batch, every_n=n, offload=True)
    assert {row.name: row.plan for row in six.rows} == want
    assert [row.name for row in six.rows] == list(want)


def test_the_first_row_is_the_step_without_the_rewrite(six: Sweep) -> None:
    model, batch = tower(6)
    first = six.rows[0].plan
    assert {layer.treatment for layer in first.layers} == {"keep"}
    assert first.recomputed_flops == first.offloaded_bytes == 0
    t = fxckpt.transform(model)
    t(**batch)
    assert first.saved_bytes == fxckpt.explain(t).baseline_saved_bytes


def test_settings_that_do_the_same_are_one_row() -> None:
    found = fxckpt.sweep(*tower(2), offload=False)
    assert [row.name for row in found.rows] == ["nothing recomputed", "every_n=1", "every_n=2"]
    assert {row.plan.offload for row in found.rows} == {None}


def test_the_frontier(six: Sweep) -> None:
    places = {row.name: (row.plan.peak_bytes, six.cost(row)) for row in six.rows}
    for name, (peak, cost) in places.items():
        beaten = any(p <= peak and c <= cost and (p, c) != (peak, cost) for p, c in places.values())
        assert (name in six.frontier) is not beaten
    assert "nothing recomputed" in six.frontier and not six.has_seconds


def timed(row: SweepRow, seconds: float | None) -> SweepRow:
    plan = replace(row.plan)
    object.__setattr__(plan, "predicted_seconds", seconds)
    return SweepRow(row.name, plan)


def test_the_frontier_is_one_of_time_where_all_times_are_known(six: Sweep) -> None:
    by_time = Sweep(tuple(timed(row, 1.0 + i) for i, row in enumerate(six.rows)))
    assert by_time.has_seconds and by_time.cost(by_time.rows[3]) == 4.0
    assert "4.00 s" in str(by_time) and "predicted time, and not higher" in str(by_time)
    assert by_time.to_dict()["cost"] == "predicted_seconds"
    partly = Sweep((timed(six.rows[0], None), *by_time.rows[1:]))
    assert not partly.has_seconds and partly.cost(partly.rows[0]) == 0.0
    assert "unknown" in str(partly)


def test_the_table(six: Sweep) -> None:
    text = str(six)
    for row in six.rows:
        (line,) = (line for line in text.splitlines() if f" {row.name}  " in line)
        assert (MARK in line) is (row.name in six.frontier)
    assert "recomputed share, and not higher in the other" in text
    assert repr(six).startswith("<fxckpt.Sweep of 9 settings")


def test_budgets_beside_the_usual_settings(six: Sweep) -> None:
    model, batch = tower(6)
    found = fxckpt.sweep(model, batch, offload=False, budgets=4)
    rows = [row for row in found.rows if row.plan.budget_bytes is not None]
    assert [row.name for row in rows] == [f"budget={row.plan.budget_bytes:,}" for row in rows]
    limits = [row.plan.budget_bytes or 0 for row in rows]
    steps = [b - a for a, b in itertools.pairwise(limits)]
    assert len(rows) == 4 and max(steps) - min(steps) <= 1
    assert limits[0] - RESERVE == rows[0].plan.peak_bytes == min(row.plan.peak_bytes for row in found.rows)
    assert limits[-1] - RESERVE == found.rows[0].plan.peak_bytes and rows[-1].plan.recomputed_flops == 0
    for row, limit in zip(rows, limits, strict=True):
        assert row.plan == fxckpt.plan(model, batch, budget=limit)
    assert fxckpt.sweep(model, batch, offload=False).rows == found.rows[: -len(rows)]


@pytest.mark.parametrize("budgets", [1, -1, True, 1.5, "4"])
def test_budgets_are_a_number(budgets: Any) -> None:
    with pytest.raises(fxckpt.SettingsError, match="at least 2"):
        fxckpt.sweep(*tower(2), budgets=budgets)


def test_arguments_of_the_wrong_kind() -> None:
    with pytest.raises(fxckpt.SettingsError, match="sweep needs a torch"):
        fxckpt.sweep("llama", {})  # type: ignore[arg-type]
    with pytest.raises(fxckpt.SettingsError, match="sweep needs the batch"):
        fxckpt.sweep(tower(2)[0], [torch.ones(2)])  # type: ignore[arg-type]


# ---- the command ----------------------------------------------------------------------------------------------------


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    program, file = tmp_path / "program.py", tmp_path / "sweep.json"
    program.write_text(PROGRAM)
    given = (f"{program}:make", "--sweep", "--every-n", "5", "--batch", "32", "--json", str(file))
    assert run_command(monkeypatch, *given) == 0
    written = json.loads(file.read_text())
    names = [row["name"] for row in written["rows"]]
    assert names[0] == "nothing recomputed" and names[-1] == "every_n=5" and len(names) == 10
    shown = capsys.readouterr().out
    assert all(name in shown for name in names)
    row = written["rows"][-1]
    plan = fxckpt.Plan.from_dict(row)  # a row is a plan's dict, and a little more
    assert [layer.treatment for layer in plan.layers] == ["recompute", *["keep"] * 4, "recompute"]
    assert {row["name"] for row in written["rows"] if row["frontier"]} >= {"nothing recomputed"}


def test_the_command_with_budgets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    assert run_command(monkeypatch, f"{program}:make", "--sweep", "--budgets", "3", "--batch", "32") == 0
    assert capsys.readouterr().out.count("budget=") == 3
    for wrong, why in ((["--budgets", "3"], "goes with --sweep"), (["--sweep", "--budgets", "1"], "at least 2")):
        assert run_command(monkeypatch, f"{program}:make", *wrong) != 0
        assert why in " ".join(capsys.readouterr().err.split())
