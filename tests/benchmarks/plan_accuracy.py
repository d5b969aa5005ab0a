"""What a plan says, against what is then measured: bytes saved and offloaded, peak, seconds; and budgets against peers.

    fxckpt calibrate                                                     # once, on a quiet machine
    python -m tests.benchmarks.plan_accuracy --out results               # all; resumes where it stopped
    python -m tests.benchmarks.plan_accuracy --out results --only llama,bert --parts settings
    python -m tests.benchmarks.plan_accuracy --replan --parts settings   # new plans beside what was measured before
    python -m tests.benchmarks.plan_accuracy --write-docs                # docs/plan-accuracy.md

Models are those of the bench set, or with --small a quarter of their tokens. For each model the plans are made first;
then each of them, and with budgets the peers, runs in a process of its own, all in turn (``fxckpt.bench``). The part
``large`` plans models that no machine like this one could run. The results that the page shows are in
``tests/benchmarks/plan-results``, where --out puts them by default.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import fxckpt
from fxckpt.bench.result import median_ratio
from fxckpt.bench.run import run_bench
from fxckpt.bench.variants import parse_variant
from fxckpt.decide.device import find_device
from fxckpt.models.load import load
from fxckpt.models.spec import ModelSpec
from fxckpt.show.tables import bytes_text, seconds_text
from tests.benchmarks.bench_set import SPECS
from tests.benchmarks.large_plans import large_section, measure_large

RESULTS = Path("tests/benchmarks/plan-results")
"""Where results are kept, from the repository's root."""
DOCS = Path(__file__).resolve().parent.parent.parent / "docs" / "plan-accuracy.md"
COMMAND = "python -m tests.benchmarks.plan_accuracy"
PARTS = ("settings", "budgets")
LARGE = "large"
WAYS = {"plain": "fxckpt-plain", "compiled": "fxckpt"}
SETTINGS = ("1", "1+offload", "2", "8")
PEERS = (
    "eager,hf-eager@1,hf-eager@2,compile,hf-compile@1,hf-compile@2,torch-budget@0.25,torch-budget@0.5,torch-budget@0.75"
)
BUDGETS = 10
APART = 1.03
"""Times that differ by less than this are not told apart: settings have no order then, and neither is slower."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of JSON files for each model")
    parser.add_argument("--only", default=",".join(SPECS), help="models, with commas between")
    parser.add_argument("--parts", default=",".join((*PARTS, LARGE)), help="settings, budgets, large")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--replan", action="store_true", help="settings: plans anew, of what was measured already")
    parser.add_argument("--small", action="store_true", help="a quarter of the tokens")
    parser.add_argument("--write-docs", action="store_true", help="measure nothing; write docs/plan-accuracy.md")
    options = parser.parse_args()
    names, parts = options.only.split(","), options.parts.split(",")
    unknown = sorted({*names} - {*SPECS}) + sorted({*parts} - {*PARTS, LARGE})
    if unknown:
        known = ", ".join((*PARTS, LARGE))
        parser.error(f"there are {', '.join(SPECS)}, and the parts {known}; not: {', '.join(unknown)}")
    large = options.out / f"{LARGE}.json"
    if options.write_docs:
        planned = json.loads(large.read_text(encoding="utf-8")) if large.exists() else []
        DOCS.write_text(page(*(read(options.out, part) for part in PARTS), planned), encoding="utf-8")
        return
    if find_device(torch.device("cpu")) is None:
        print("This machine has not been measured (fxckpt calibrate), so no time is predicted.", flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    if LARGE in parts and not large.exists():
        large.write_text(json.dumps(measure_large(), indent=1) + "\n", encoding="utf-8")
    for part in (part for part in parts if part != LARGE):
        for name in names:
            spec = SPECS[name]
            if options.small:
                spec = dataclasses.replace(spec, batch=max(spec.batch // 2, 1), seq=spec.seq // 2)
            measure(name, spec, part, options)


def measure(name: str, spec: ModelSpec, part: str, options: argparse.Namespace) -> None:
    """One part of one model into its file, unless it is there already."""
    file = options.out / f"{name}.{part}.json"
    if file.exists():
        if options.replan and part == "settings":
            result = json.loads(file.read_text(encoding="utf-8"))
            device = find_device(torch.device("cpu"))
            result |= {"plans": plan_settings(spec), "device": device.source if device else "not measured"}
            file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
            print("\n".join(settings_table(name, result)), flush=True)
        else:
            print(f"{name} {part}: {file} is there already", flush=True)
        return

    def say(done: int, total: int, text: str) -> None:
        print(f"{name} {part} {done}/{total} {text}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        plans = plan_budgets(spec, Path(folder)) if part == "budgets" else plan_settings(spec)
        planning = time.perf_counter() - start
        print(f"{name} {part}: {len(plans)} plans in {planning:.0f} s", flush=True)
        peers = PEERS.split(",") if part == "budgets" else []
        variants = dict.fromkeys([*peers, *(plan["variant"] for plan in plans)])
        bench = run_bench(spec, variants, rounds=options.rounds, on_progress=say)
    device = find_device(torch.device("cpu"))
    result = {
        "device": device.source if device else "not measured",
        "planning_seconds": planning,
        "plans": plans,
        "bench": bench.to_dict(),
    }
    text = json.dumps(result, indent=1).replace(f"{folder}/", "")  # a plan's file is named alike wherever it was
    result = json.loads(text)
    file.write_text(text + "\n", encoding="utf-8")
    shown = settings_table(name, result) if part == "settings" else budgets_table(name, result)
    print("\n".join(shown), flush=True)


def plan_settings(spec: ModelSpec) -> list[dict[str, Any]]:
    """What the plans of the settings say, with ordinary kernels and compiled."""
    found = []
    for way, kind in WAYS.items():
        for setting in SETTINGS:
            chosen = parse_variant(f"{kind}@{setting}")
            model, batch = load(spec, shapes=True)
            plan = fxckpt.plan(
                model,
                batch,
                every_n=int(chosen.number),
                offload=chosen.offload,
                compiled=way == "compiled",
                device="cpu",
            )
            found.append({"variant": str(chosen), "way": way, **_said(plan)})
    return found


def plan_budgets(spec: ModelSpec, folder: Path) -> list[dict[str, Any]]:
    """What the plans within budgets say, with the plans in files; plans that do the same are one variant."""
    model, batch = load(spec, shapes=True)
    sweep = fxckpt.sweep(model, batch, offload=False, budgets=BUDGETS, compiled=True, device="cpu")
    files: dict[Any, Path] = {}
    found = []
    for row in sweep.rows:
        if row.plan.budget_bytes is None:
            continue
        file = files.setdefault(row.plan.layers, folder / f"plan{len(files)}.json")
        row.plan.save(file)
        found.append({"variant": f"fxckpt@{file}", "budget": row.plan.budget_bytes, **_said(row.plan)})
    return found


def _said(plan: fxckpt.Plan) -> dict[str, Any]:
    return {
        "saved": plan.saved_bytes,
        "offloaded": plan.offloaded_bytes,
        "peak": plan.peak_bytes,
        "seconds": plan.predicted_seconds,
        "layers": Counter(layer.decided.text for layer in plan.layers),
    }


# ---- docs/plan-accuracy.md --------------------------------------------------------------------------------------


HEAD = f"""\
# Accuracy of plans

What `fxckpt.plan` says of a training step, against what was then measured, for the models of the
[benchmarks](benchmarks.md). This page is written by the third command from what the second one measured
(`tests/benchmarks/plan-results`, or another folder with `--out`, since results that are there are not measured again):

    fxckpt calibrate
    {COMMAND}
    {COMMAND} --write-docs

Every variant runs in a process of its own, and they take turns; times are medians. Times that differ by less than
{APART - 1:.0%} are not told apart.
"""
NOTE = """\
T5's compiled steps take longer than planned. Its attention adds a bias whose heads lie innermost, so Inductor's kernels
of the softmax evaluate `exp` value by value and not in vectors; the rates of plans are those of vectors.
"""
SETTINGS_HEAD = (
    "| model | variant | saved, offloaded | peak planned | measured | ratio | time planned | measured | ratio "
    "| order of times |\n|---|---|---|---|---|---|---|---|---|---|"
)
BUDGETS_HEAD = (
    "| model | budget | layers | peak planned | measured | step | best peer within | its peak | its step "
    "| ratio |\n|---|---|---|---|---|---|---|---|---|---|"
)

Result = Mapping[str, Any]


def read(folder: Path, part: str) -> dict[str, Result]:
    """The results of a part that there are, by model."""
    files = {name: folder / f"{name}.{part}.json" for name in SPECS}
    return {name: json.loads(file.read_text(encoding="utf-8")) for name, file in files.items() if file.exists()}


def page(settings: Mapping[str, Result], budgets: Mapping[str, Result], large: Sequence[Result] = ()) -> str:
    """docs/plan-accuracy.md."""
    lines = [HEAD]
    for text in dict.fromkeys(_measured_with(r) for r in (*settings.values(), *budgets.values())):
        lines.append(text)
    lines += ["## Settings", "", *_errors(settings.values()), "", *([NOTE] if "t5" in settings else []), SETTINGS_HEAD]
    for name, result in settings.items():
        lines += settings_table(name, result)
    lines += ["", "## Budgets", "", *_kept(budgets.values()), "", BUDGETS_HEAD]
    for name, result in budgets.items():
        lines += budgets_table(name, result)
    lines += ["", *large_section(large)] if large else []
    return "\n".join(lines) + "\n"


def _measured_with(result: Result) -> str:
    machine, settings = result["bench"]["machine"], result["bench"]["settings"]
    return (
        f"Measured on {settings['date']}: {machine['device']}, {machine['threads']} threads, PyTorch "
        f"{machine['torch']}, transformers {machine['transformers']}, {settings['rounds']} rounds; speed of the device "
        f"{result['device']}.\n"
    )


def _rows(result: Result) -> dict[str, Mapping[str, Any]]:
    return {row["variant"]: row for row in result["bench"]["variants"] if row["error"] is None}


def _errors(results: Iterable[Result]) -> list[str]:
    """How far off plans are."""
    pairs = [(plan, _rows(r)[plan["variant"]]) for r in results for plan in r["plans"] if plan["variant"] in _rows(r)]
    lines = ["| way | peak: mean error | largest | time: mean error | largest |", "|---|---|---|---|---|"]
    for way in WAYS:
        cells = []
        for what in ("peak", "time"):
            ratios = [_ratios(plan, row)[what] for plan, row in pairs if plan["way"] == way]
            errors = [abs(ratio - 1) for ratio in ratios if ratio is not None]
            cells += [f"{statistics.mean(errors):.1%}", f"{max(errors):.1%}"] if errors else ["", ""]
        lines.append(f"| {way} | {' | '.join(cells)} |")
    return lines


def _ratios(plan: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, float | None]:
    known = plan["seconds"] is not None and row["seconds"] is not None
    return {"peak": plan["peak"] / row["peak_bytes"], "time": plan["seconds"] / row["seconds"] if known else None}


def settings_table(name: str, result: Result) -> list[str]:
    """A line for each setting."""
    rows, lines = _rows(result), []
    for way in WAYS:
        plans = [plan for plan in result["plans"] if plan["way"] == way and plan["variant"] in rows]
        order = in_order([(plan["seconds"], rows[plan["variant"]]["seconds"]) for plan in plans])
        for i, plan in enumerate(plans):
            row = rows[plan["variant"]]
            exact = plan["saved"] == row["saved_bytes"] and plan["offloaded"] == row["offloaded_bytes"]
            ratios = _ratios(plan, row)
            cells = [
                name,
                plan["variant"],
                "exact" if exact else f"{bytes_text(plan['saved'])} for {bytes_text(row['saved_bytes'])}",
                bytes_text(plan["peak"]),
                bytes_text(row["peak_bytes"]),
                f"{ratios['peak']:.3f}",
                "unknown" if plan["seconds"] is None else seconds_text(plan["seconds"]),
                seconds_text(row["seconds"]),
                "" if ratios["time"] is None else f"{ratios['time']:.2f}",
                order if i == 0 else "",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    failed = [row for row in result["bench"]["variants"] if row["error"] is not None]
    return lines + [f"| {name} | {row['variant']} failed: {row['error'][:200]} |" + " |" * 8 for row in failed]


def in_order(times: Sequence[tuple[float | None, float]]) -> str:
    """Whether settings that differ in their measured times differ in the same direction in the planned ones."""
    pairs = right = 0
    for i, (planned_a, a) in enumerate(times):
        for planned_b, b in times[i + 1 :]:
            if planned_a is None or planned_b is None:
                return ""
            if abs(math.log(a / b)) > math.log(APART):
                pairs += 1
                right += (planned_a < planned_b) is (a < b)
    return f"{right} of {pairs} pairs"


@dataclasses.dataclass(frozen=True)
class Kept:
    """A budget, what ran within it, and the fastest peer that needs no more.

    Attributes:
        plan: what was said.
        ours: what was measured.
        peer: what was measured of the peer; None where none needs so little.
        ratio: our time relative to the peer's, the median of the rounds'.
    """

    plan: Mapping[str, Any]
    ours: Mapping[str, Any]
    peer: Mapping[str, Any] | None
    ratio: float | None


def kept(result: Result) -> list[Kept]:
    """All budgets of a model, the smallest first."""
    rows, found = _rows(result), []
    peers = [row for name, row in rows.items() if name in PEERS.split(",")]
    for plan in result["plans"]:
        ours = rows[plan["variant"]]
        within = [row for row in peers if row["peak_bytes"] <= plan["budget"]]
        peer = min(within, key=lambda row: float(row["seconds"]), default=None)
        ratio = None if peer is None else median_ratio(ours["round_seconds"], peer["round_seconds"])
        found.append(Kept(plan, ours, peer, ratio))
    return found


def _kept(results: Iterable[Result]) -> list[str]:
    """How many budgets were kept, and how the times compare with the peers'."""
    found = [one for result in results for one in kept(result)]
    ratios = [one.ratio for one in found if one.ratio is not None]
    within = sum(one.ours["peak_bytes"] <= one.plan["budget"] for one in found)
    if not ratios:
        return ["Not measured yet."]
    mean = math.exp(statistics.mean(map(math.log, ratios)))
    return [
        f"The measured peak is within the budget for {within} of {len(found)}. Peers need no more than the budget for "
        f"{len(ratios)}; of these ours is not slower than the fastest such peer for {sum(r <= APART for r in ratios)} "
        f"(ratio of times: geometric mean {mean:.3f}, smallest {min(ratios):.3f}, largest {max(ratios):.3f}).",
        "",
        f"Peers: {PEERS.replace(',', ', ')}.",
    ]


def budgets_table(name: str, result: Result) -> list[str]:
    """A line for each budget."""
    lines = []
    for one in kept(result):
        plan, ours, peer = one.plan, one.ours, one.peer
        of_peer = ["none", "", "", ""]
        if peer is not None:
            of_peer = [peer["variant"], bytes_text(peer["peak_bytes"]), seconds_text(peer["seconds"])]
            of_peer.append(f"{one.ratio:.3f}")
        cells = [
            name,
            bytes_text(plan["budget"]),
            "; ".join(f"{count}: {text}" for text, count in plan["layers"].items()),
            bytes_text(plan["peak"]),
            f"{bytes_text(ours['peak_bytes'])}{'' if ours['peak_bytes'] <= plan['budget'] else ' (over)'}",
            seconds_text(ours["seconds"]),
            *of_peer,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    main()
