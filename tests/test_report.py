"""`fxckpt plan --html`: the page says what the plan says, and a browser shows it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxckpt
from fxckpt.config import Settings, make_settings
from fxckpt.decide.memory import KINDS, OTHER, SAVED, GraphTimeline, Value
from fxckpt.predict.capture import Captures, capture_step
from fxckpt.predict.plan import Target
from fxckpt.predict.report import Report, make_report, step_timelines
from fxckpt.predict.steps import read_steps
from fxckpt.show.fold import fold_names
from fxckpt.show.plan_tables import fold_layers
from fxckpt.show.report import Run, render_report
from fxckpt.show.report_data import COLUMNS, VALUES, run_data, spans
from fxckpt.show.sweep import Sweep, SweepRow
from fxckpt.show.tables import bytes_text
from tests.browser import colours, open_browser, set_colours
from tests.test_sweep import PROGRAM, Block, run_command, tower

EVIL = "</script><script>document.title='run'</script><img src=x onerror=\"document.title='run'\">"


def settings(**given: Any) -> Settings:
    every: dict[str, Any] = {"every_n": 1, "offload": False, "layers": None, "policy": None}
    return make_settings(**{**every, **given}, verify=False, debug_dir=None)


@pytest.fixture(scope="module")
def report() -> Report:
    model, batch = tower(6)
    return make_report(Captures(model, batch), settings(every_n=2))


@pytest.fixture(scope="module")
def timelines() -> list[GraphTimeline]:
    """Those that the page of `report` shows as planned."""
    model, batch = tower(6)
    return step_timelines(capture_step(model, batch, settings(every_n=2)))


def data_of(html: str) -> Any:
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    return json.loads(text)


def totals(timelines: list[GraphTimeline]) -> list[int]:
    return [n for t in timelines for n in t.totals]


# ---- the data -------------------------------------------------------------------------------------------------------


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[1](self.blocks[0](x))
        torch._dynamo.graph_break()
        return self.blocks[3](self.blocks[2](x)).square().mean()


CASES = [("one graph", {}), ("one graph", {"every_n": 2, "offload": True}), ("two graphs", {"every_n": 2})]


@pytest.mark.parametrize(("which", "given"), CASES, ids=str)
def test_values_over_the_whole_step_add_up_to_what_is_in_memory(which: str, given: dict[str, Any]) -> None:
    model, batch = (Broken(), {"x": torch.randn(4, 16)}) if which == "two graphs" else tower(4)
    records = capture_step(model, batch, settings(**given))
    found = step_timelines(records)
    assert totals(found) == read_steps(records).levels
    assert len(found) == (4 if which == "two graphs" else 2)
    alive = spans(found)
    for step, total in enumerate(totals(found)):
        assert sum(s.value.nbytes for s in alive if s.first <= step <= s.last) == total


def test_columns_are_exact_and_have_the_peak() -> None:
    """A long step has fewer columns than nodes, and many values are only summed up."""
    values = tuple(
        Value(f"v{i}", SAVED if i % 3 else OTHER, 1000 + i % 7, f"layers.{i % 5}.up", "", i, min(i + i % 50, 2999))
        for i in range(3000)
    )
    found = [GraphTimeline(is_backward, ("",) * 3000, values, around=10) for is_backward in (False, True)]
    data = run_data(found, {f"layers.{i}": "keep" for i in range(4)})
    assert len(data["starts"]) == len(data["at"]) <= COLUMNS and len(data["values"]) == VALUES
    assert data["steps"] == 6000 and data["forward"] == 3000 and 3000 in data["starts"]
    kinds, layers = (
        [list(accumulate(d)) for d in parts] for parts in (data["kinds"], [x["bytes"] for x in data["layers"]])
    )
    want = totals(found)
    for c, step in enumerate(data["at"]):
        assert sum(k[c] for k in kinds) == sum(x[c] for x in layers) == want[step]
        shown = [v for v in data["values"] if v[6] <= c <= v[7]]
        for kind in range(len(KINDS)):
            assert sum(v[1] for v in shown if v[2] == kind) <= kinds[kind][c]
    assert max(want) == max(want[step] for step in data["at"])
    assert [x["name"] for x in data["layers"]] == ["", "layers.0", "layers.1", "layers.2", "layers.3"]


def test_the_page_has_the_plans_figures(report: Report, timelines: list[GraphTimeline]) -> None:
    model, batch = tower(6)
    assert report.plan == fxckpt.plan(model, batch, every_n=2)
    before, planned = data_of(report.html)["runs"]
    assert before["name"] == "nothing recomputed" and planned["name"] == "every_n=2"
    peak = max(sum(column) for column in zip(*(accumulate(k) for k in planned["kinds"]), strict=True))
    assert peak == report.plan.peak_bytes == max(totals(timelines))
    assert [layer["treatment"] for layer in planned["layers"]] == ["", *["recompute", "keep"] * 3]
    for row in report.sweep.rows:
        assert f'<th scope="row">{row.name}' in report.html
    assert bytes_text(report.plan.peak_bytes) in report.html
    for layers in fold_layers(report.plan):
        assert fold_names(layer.name for layer in layers) in report.html


def test_the_picture_of_a_compiled_step_has_the_plans_peak() -> None:
    model, batch = tower(2)
    report = make_report(Captures(model, batch), settings(), Target(compiled=True))
    assert report.plan == fxckpt.plan(model, batch, compiled=True)
    before, planned = data_of(report.html)["runs"]
    peaks = [max(map(sum, zip(*(accumulate(k) for k in run["kinds"]), strict=True))) for run in (before, planned)]
    assert peaks == [report.sweep.rows[0].plan.peak_bytes, report.plan.peak_bytes]


def test_the_page_needs_nothing_else(report: Report) -> None:
    assert not re.search(r"(?:src|href)\s*=|@import|url\(|https?://(?!www\.w3\.org/2000/svg)", report.html)
    assert "{{" not in report.html


def hostile(report: Report) -> str:
    """The page of a model whose names are markup."""
    plan = report.plan
    layers = tuple(replace(layer, name=f"{EVIL}.{layer.name}") for layer in plan.layers)
    row = SweepRow(EVIL, replace(plan, model=EVIL, batch={EVIL: EVIL}, layers=layers))
    value = Value(EVIL, SAVED, 4096, f"{EVIL}.{plan.layers[0].name}", EVIL, 0, 1)
    run = Run(row, [GraphTimeline(True, (EVIL, EVIL), (value,))])
    return render_report(Sweep((row,)), run, run)


def test_text_of_the_model_is_no_markup(report: Report) -> None:
    html = hostile(report)
    assert EVIL not in html and "<img" not in html
    assert html.count("<script") == report.html.count("<script") == 2
    assert data_of(html)["runs"][0]["texts"][0] == EVIL


def test_the_page_of_a_deep_model_stays_small(report: Report) -> None:
    names = [f"model.layers.{i}" for i in range(36)]
    source = "modeling_qwen3.py:{} in forward: hidden_states = self.mlp(self.post_attention_layernorm(hidden_states))"
    values = tuple(
        Value(f"node_{i}", KINDS[i % 3], 2**20, f"{names[i // 200]}.mlp", source.format(i % 90), i, i + 40 + i % 900)
        for i in range(7000)
    )
    deep = GraphTimeline(True, tuple(f"{names[i // 250]}.mlp" for i in range(8000)), values)
    layers = tuple(replace(report.plan.layers[0], name=name) for name in names)
    row = SweepRow("every_n=1", replace(report.plan, layers=layers))
    html = render_report(Sweep((row,)), Run(SweepRow("before", row.plan), [deep]), Run(row, [deep]))
    assert len(html) < 2 * 2**20


# ---- the command ----------------------------------------------------------------------------------------------------


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    program, page, file = (tmp_path / name for name in ("program.py", "page.html", "plan.json"))
    program.write_text(PROGRAM)
    given = (f"{program}:make", "--every-n", "3", "--offload", "--html", str(page), "--json", str(file))
    assert run_command(monkeypatch, *given) == 0
    assert [run["name"] for run in data_of(page.read_text())["runs"]] == ["nothing recomputed", "every_n=3, offload"]
    assert fxckpt.Plan.load(file).offload == fxckpt.Offload()
    assert "what a training step will cost" in capsys.readouterr().out


def test_a_page_in_no_folder(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(monkeypatch, "llama", "--html", "no/such/folder/page.html") == 2
    assert "--html no/such/folder/page.html: there is no such folder" in capsys.readouterr().err


# ---- in a browser ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with open_browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture
def page(browser: Any, report: Report, tmp_path: Path) -> Any:
    return opened(browser, report.html, tmp_path)


def opened(browser: Any, html: str, folder: Path, scheme: str = "light") -> Any:
    path = folder / "page.html"
    path.write_text(html, encoding="utf-8")
    set_colours(browser, scheme)
    browser.get(path.as_uri())
    return browser


def one(page: Any, css: str) -> Any:
    return page.find_element("css selector", css)


def told(page: Any) -> dict[str, str]:
    """What the page says of the moment and the value that are pointed at."""
    names = ("moment", "total", "value", "bytes", "kind", "treatment", "module", "source")
    return {name: one(page, f"#at-{name}").text for name in names}


def point(page: Any, x: float, y: float) -> dict[str, str]:
    """Move the pointer there, counted from the upper left corner of the picture of the memory."""
    from selenium.webdriver import ActionChains

    chart = one(page, "#memory svg")
    left, up = chart.size["width"] // 2, chart.size["height"] // 2
    ActionChains(page).move_to_element_with_offset(chart, round(x) - left, round(y) - up).perform()
    return told(page)


def scales(page: Any) -> tuple[float, float, float, float]:
    """Where step 0 and 0 bytes are in the picture, and pixels to a step and to a byte, read off its marks."""
    marks = page.execute_script(
        "return [...document.querySelectorAll('#memory text')].map(t => "
        "[t.textContent, +t.getAttribute('x'), +t.getAttribute('y')])"
    )
    units = {"B": 1, "KiB": 2**10, "MiB": 2**20}
    heights = [
        (float(m[1]) * units[m[2]], y - 4) for text, _, y in marks if (m := re.fullmatch(r"(\S+) (B|KiB|MiB)", text))
    ]
    steps = [(int(text), x) for text, x, _ in marks if text.isdigit() and text != "0"]
    (floor,) = (y - 4 for text, _, y in marks if text == "0")
    most, top = heights[-1]
    (a, left), (b, right) = steps[0], steps[-1]
    wide = (right - left) / (b - a)
    return left - a * wide, floor, wide, (floor - top) / most


def test_a_page_opens_without_errors(page: Any) -> None:
    assert page.get_log("browser") == []
    assert page.title == "Stack: what a training step will cost"
    assert one(page, "#memory svg").size["width"] > 600
    peak = told(page)
    assert peak["total"] == bytes_text(max(map(int, data_peaks(page))))


def data_peaks(page: Any) -> list[int]:
    """The bytes of each column as planned."""
    data = json.loads(one(page, "#data").get_attribute("textContent"))
    return [sum(column) for column in zip(*(accumulate(k) for k in data["runs"][1]["kinds"]), strict=True)]


@pytest.mark.parametrize("part", [0.1, 0.35, 0.5, 0.62, 0.8, 0.999])
@pytest.mark.parametrize("height", [0.1, 0.5, 0.9])
def test_pointing_tells_what_is_there(page: Any, timelines: list[GraphTimeline], part: float, height: float) -> None:
    want, start = totals(timelines), len(timelines[0].modules)
    step = int(part * len(want))
    left, floor, wide, tall = scales(page)
    y = round(floor - height * want[step] * tall)
    shown = point(page, left + (step + 0.5) * wide, y)
    assert shown["moment"].startswith(f"step {step + 1} of {len(want)}, {'backward' if step >= start else 'forward'}")
    assert shown["total"] == bytes_text(want[step])
    timeline, at = (timelines[1], step - start) if step >= start else (timelines[0], step)
    values = {v.name: v for v in timeline.values if v.first <= at <= v.last}
    value = values[shown["value"]]
    assert shown["bytes"] == bytes_text(value.nbytes)
    assert (shown["kind"], shown["module"]) == (value.kind, value.module or "unknown")
    assert shown["source"] == (value.source or "unknown")
    low = 0
    for kind, found in timeline.bytes_by_kind().items():  # the pointer is in the band of the kind that is told
        high = low + found[at]
        if kind == value.kind:
            assert floor - high * tall - 1 <= y <= floor - low * tall + 1
        low = high
    (span,) = (s for s in spans(timelines) if s.value.name == value.name and s.first <= step <= s.last)
    box = page.execute_script("const b = find('pointed').getBBox(); return [b.x, b.x + b.width, b.y, b.y + b.height]")
    assert box[:2] == pytest.approx([left + span.first * wide, left + (span.last + 1) * wide], abs=0.2)
    assert box[2] - 1 <= y <= box[3] + 1  # under the pointer


def test_the_treatment_is_that_of_the_layer(page: Any) -> None:
    from selenium.webdriver import ActionChains, Keys

    data = json.loads(one(page, "#data").get_attribute("textContent"))["runs"][1]
    chosen = {x["name"]: x["treatment"] for x in data["layers"]}
    page.execute_script("document.getElementById('memory').focus()")
    ActionChains(page).send_keys("p", *[Keys.DOWN] * 60).perform()
    seen = set()
    for _ in range(40):
        shown = told(page)
        layer = re.match(r"blocks\.\d", shown["module"])
        assert shown["treatment"] == (f"{chosen[layer[0]]} {layer[0]}" if layer else "outside the layers")
        seen.add(shown["treatment"].split()[0])
        ActionChains(page).send_keys(Keys.UP).perform()
    assert seen >= {"recompute", "keep"}


def test_the_keyboard_moves_through_the_step(page: Any) -> None:
    from selenium.webdriver import ActionChains, Keys

    page.execute_script("document.getElementById('memory').focus()")
    steps = []
    for key in (Keys.HOME, Keys.RIGHT, Keys.RIGHT, Keys.LEFT, Keys.END, "p"):
        ActionChains(page).send_keys(key).perform()
        steps.append(int(re.match(r"step (\d+)", told(page)["moment"])[1]))  # type: ignore[index]
    peaks = data_peaks(page)
    assert steps == [1, 2, 3, 2, len(peaks), peaks.index(max(peaks)) + 1]


def bands(page: Any) -> list[str]:
    return [p.get_attribute("d") for p in page.find_elements("css selector", "#memory .band")]


def test_the_toggles_change_the_picture(page: Any) -> None:
    from selenium.webdriver import ActionChains, Keys

    planned, kinds = bands(page), one(page, "#memory-legend").text
    total = told(page)["total"]
    assert "recomputed" in kinds and "with nothing recomputed" in kinds
    one(page, "input[name=run][value='0']").click()
    before = bands(page)
    assert before != planned and told(page)["total"] != total
    assert "with every_n=2" in one(page, "#memory-legend").text
    one(page, "input[name=mode][value=layers]").click()
    assert len(bands(page)) == 7 and "kept layers" in one(page, "#memory-legend").text
    assert "recomputed layers" not in one(page, "#memory-legend").text
    ActionChains(page).send_keys(Keys.LEFT).perform()  # radio buttons move with the arrow keys
    assert bands(page) == before
    one(page, "input[name=run][value='1']").click()
    assert bands(page) == planned and told(page)["total"] == total
    assert page.get_log("browser") == []


def test_both_ways_are_drawn_to_one_scale(page: Any) -> None:
    planned = scales(page)
    one(page, "input[name=run][value='0']").click()
    assert scales(page) == planned


def test_light_and_dark(browser: Any, report: Report, tmp_path: Path) -> None:
    grounds = []
    for scheme in ("light", "dark"):
        page = opened(browser, report.html, tmp_path, scheme)
        ground, text = page.execute_script(
            "const s = getComputedStyle(document.body); return [s.backgroundColor, s.color]"
        )
        grounds.append(ground)
        assert contrast(ground, text) > 7
        assert colours(page.get_screenshot_as_png()) > 50  # letters alone give shades of one colour
        assert colours(one(page, "#memory").screenshot_as_png) > 20
        assert colours(one(page, "#settings").screenshot_as_png) > 20
    assert len(set(grounds)) == 2


def contrast(one: str, other: str) -> float:
    """The ratio of contrast of two colours, as WCAG defines it."""

    def light(colour: str) -> float:
        parts = [int(n) / 255 for n in re.findall(r"\d+", colour)[:3]]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, bright = sorted((light(one), light(other)))
    return (bright + 0.05) / (dark + 0.05)


def test_the_picture_of_the_settings(page: Any, report: Report) -> None:
    titles = [t.get_attribute("textContent") for t in page.find_elements("css selector", "#settings .dot title")]
    assert len(titles) == len(report.sweep.rows)
    for row, title in zip(report.sweep.rows, titles, strict=True):
        assert title.startswith(f"{row.name}: {bytes_text(row.plan.peak_bytes)}")
    assert len(page.find_elements("css selector", "#settings .ring")) == 1
    on = page.find_elements("css selector", "#settings .dot.frontier")
    assert len(on) == len(report.sweep.frontier)


def test_markup_in_names_is_shown_and_not_run(browser: Any, report: Report, tmp_path: Path) -> None:
    page = opened(browser, hostile(report), tmp_path)
    assert page.title == f"{EVIL}: what a training step will cost"
    assert told(page)["value"] == EVIL
    assert page.find_elements("css selector", "img") == [] and page.get_log("browser") == []


def test_the_tables_need_no_script(browser: Any, report: Report, tmp_path: Path) -> None:
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        page = opened(browser, report.html, tmp_path)
        text = one(page, "main").text
        assert "need JavaScript" in text and "Point at the picture" not in text
        for row in report.sweep.rows:
            assert row.name in text and bytes_text(row.plan.saved_bytes) in text
        assert len(page.find_elements("css selector", "table")) == 4
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def test_a_narrow_window(browser: Any, report: Report, tmp_path: Path) -> None:
    page = opened(browser, report.html, tmp_path)
    size = page.get_window_size()
    try:
        page.set_window_size(500, 900)
        wide = page.execute_script("return [document.documentElement.scrollWidth, window.innerWidth]")
        assert wide[0] <= wide[1]
    finally:
        page.set_window_size(size["width"], size["height"])
