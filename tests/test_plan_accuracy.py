"""The page that ``tests/benchmarks/plan_accuracy.py`` writes, from made-up results."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from tests.benchmarks import plan_accuracy


def row(variant: str, peak: int, seconds: float, **given: Any) -> dict[str, Any]:
    times = {"seconds": seconds, "round_seconds": [seconds, 2 * seconds, seconds]}
    return {"variant": variant, "error": None, "peak_bytes": peak, **times, **given}


def result(plans: list[dict[str, Any]], rows: list[dict[str, Any]]) -> dict[str, Any]:
    machine = {"device": "cpu: a processor", "threads": 2, "torch": "2.13.0", "transformers": "5.23.0"}
    bench = {"variants": rows, "machine": machine, "settings": {"date": "2026-11-30", "rounds": 3}}
    return {"device": "measured on 2026-11-30", "planning_seconds": 1.0, "plans": plans, "bench": bench}


def said(variant: str, peak: int, seconds: float | None, **given: Any) -> dict[str, Any]:
    figures = {"saved": 5, "offloaded": 0, "layers": {"keep": 1, "recompute, save attention": 7}}
    return {"variant": variant, "peak": peak, "seconds": seconds, **figures, **given}


@pytest.fixture
def settings() -> dict[str, Any]:
    plans = [
        said("fxckpt-plain@1", 1000, 1.1, way="plain"),
        said("fxckpt-plain@2", 2000, 1.2, way="plain"),
        said("fxckpt@1", 1000, None, way="compiled"),
        said("fxckpt@2", 1000, None, way="compiled"),
    ]
    rows = [
        row("fxckpt-plain@1", 1000, 1.0, saved_bytes=5, offloaded_bytes=0),
        row("fxckpt-plain@2", 2500, 2.0, saved_bytes=6, offloaded_bytes=0),
        row("fxckpt@1", 1000, 1.0, saved_bytes=5, offloaded_bytes=0),
        {**row("fxckpt@2", 0, 0.0), "error": "it did not compile"},
    ]
    return result(plans, rows)


@pytest.fixture
def budgets() -> dict[str, Any]:
    plans = [
        said("fxckpt@a.json", 90, 1.0, budget=100),
        said("fxckpt@b.json", 190, 1.0, budget=200),
        said("fxckpt@b.json", 190, 1.0, budget=300),
    ]
    rows = [
        row("compile", 280, 0.5),
        row("eager", 190, 1.2),
        row("fxckpt@a.json", 101, 1.0),
        row("fxckpt@b.json", 200, 1.0),
    ]
    return result(plans, rows)


def test_settings_are_compared_with_what_was_measured(settings: dict[str, Any]) -> None:
    lines = plan_accuracy.settings_table("llama", settings)
    assert "| exact | 1000 B | 1000 B | 1.000 | 1.10 s | 1.00 s | 1.10 | 1 of 1 pairs |" in lines[0]
    assert "| 5 B for 6 B | 2.0 KiB | 2.4 KiB | 0.800 |" in lines[1]
    assert "unknown" in lines[2] and "fxckpt@2 failed: it did not compile" in lines[-1]
    assert "| plain | 10.0% | 20.0% | 25.0% | 40.0% |" in plan_accuracy.page({"llama": settings}, {})


def test_budgets_are_compared_with_the_fastest_peer_within(budgets: dict[str, Any]) -> None:
    first, second, third = plan_accuracy.kept(budgets)
    assert first.peer is None and first.ratio is None
    assert second.peer is not None and second.peer["variant"] == "eager"
    assert third.peer is not None and third.peer["variant"] == "compile" and third.ratio == 2.0
    text = plan_accuracy.page({}, {"llama": budgets})
    assert "within the budget for 2 of 3" in text and "101 B (over)" in text
    assert "| llama | 100 B | 1: keep; 7: recompute, save attention | 90 B |" in text
    assert "Peers need no more than the budget for 2" in text and "such peer for 1 (" in text


def test_an_order_is_asked_of_times_that_differ() -> None:
    assert plan_accuracy.in_order([(1.0, 1.0), (2.0, 1.01)]) == "0 of 0 pairs"
    assert plan_accuracy.in_order([(1.0, 1.0), (2.0, 1.5), (1.5, 2.0)]) == "2 of 3 pairs"
    assert plan_accuracy.in_order([(None, 1.0), (2.0, 1.5)]) == ""


def test_large_models_are_shown_with_what_planning_took() -> None:
    sizes = {"parameter_bytes": 2**34, "offloaded_bytes": 36 * 2**30, "peak_bytes": 2**35}
    one = {"name": "a model", "tokens": 131072, "way": "", "seconds": 5.5, "bytes": 2**29, **sizes}
    text = plan_accuracy.page({}, {}, [one])
    assert "| a model | 131,072 | as captured | 16.0 GiB | 36.0 GiB | 32.0 GiB | 5.50 s | 512.0 MiB |" in text
    assert "Large models" not in plan_accuracy.page({}, {})


def test_the_page_shows_what_was_measured() -> None:
    results = [plan_accuracy.read(plan_accuracy.RESULTS, part) for part in plan_accuracy.PARTS]
    large = json.loads((plan_accuracy.RESULTS / "large.json").read_text(encoding="utf-8"))
    assert plan_accuracy.DOCS.read_text(encoding="utf-8") == plan_accuracy.page(*results, large)
    for one in itertools.chain.from_iterable(map(plan_accuracy.kept, results[1].values())):
        assert one.ours["peak_bytes"] <= one.plan["budget"]
