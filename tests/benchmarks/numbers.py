"""Survey: one training step of every model of the zoo, transformed, against the model itself.

    python -m tests.benchmarks.numbers --out survey.jsonl            # two settings a model, rotating
    python -m tests.benchmarks.numbers --out survey.jsonl --all      # every setting
    python -m tests.benchmarks.numbers --out survey.jsonl --summary  # the table only
    python -m tests.benchmarks.numbers --out compiled.jsonl --compiled  # torch.compile(t) against torch.compile(model)

Hours of work: it goes on where it stopped, and several processes can each take a part (`--part 1/2`, a file for each).

Each line of the file is one model at one setting: whether loss, gradients and buffers equal eager's bit for bit,
whether those of the plain model under ``torch.compile(backend="aot_eager")`` do, the largest differences, and which
of the layers that were to be recomputed were found in a captured graph.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import fxckpt
from tests.helpers import Step, boundary_layers, differences, train_step
from tests.test_compiled_numbers import compiled
from tests.test_numbers import SETTINGS, Setting, aot_eager, eager, settings_of
from tests.zoo import CI_SPREAD, REGISTRY, build


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--summary", action="store_true")
    parser.add_argument("--compiled", action="store_true", help="one setting a model, under Inductor")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="every N-th model only, from the I-th on")
    parser.add_argument("names", nargs="*", help="models; all of the zoo by default, those of the CI first")
    options = parser.parse_args()
    torch.set_num_threads(1)
    part, parts = map(int, options.part.split("/"))
    names = (options.names or [*CI_SPREAD, *(n for n in REGISTRY if n not in CI_SPREAD)])[part - 1 :: parts]
    if options.compiled and not options.summary:
        survey(options.out, names, one=one_compiled, settings=1)
    elif not options.summary:
        survey(options.out, names, one=one, settings=len(SETTINGS) if options.all else 2)
    print(summary([json.loads(line) for line in options.out.read_text().splitlines()]))


def survey(out: Path, names: list[str], *, one: Callable[[str, Setting], dict[str, Any]], settings: int) -> None:
    """Append a line to `out` for each model and setting that it does not hold yet, `settings` for each model."""
    done = {key(json.loads(line)) for line in out.read_text().splitlines()} if out.exists() else set()
    for name in names:
        for setting in SETTINGS if settings > 2 else settings_of(name)[:settings]:
            if (name, *setting) in done:
                continue
            start = time.perf_counter()
            every_n, offload, dropout = setting
            row = {"name": name, "every_n": every_n, "offload": offload, "dropout": dropout, **one(name, setting)}
            row["seconds"] = round(time.perf_counter() - start, 1)
            with out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(name, setting, row["plain"], row.get("error", ""), flush=True)


def key(row: dict[str, Any]) -> tuple[str, int, bool, bool]:
    return row["name"], row["every_n"], row["offload"], row["dropout"]


def one(name: str, setting: Setting) -> dict[str, Any]:
    every_n, offload, dropout = setting
    want, aot = eager(name, dropout), aot_eager(name, dropout)
    row: dict[str, Any] = {"aot_eager": "fails" if aot is None else verdict(aot, want)}
    torch._dynamo.reset()
    try:
        model, batch = build(name, dropout)
        layers = boundary_layers(name, model)
        t = fxckpt.transform(model, every_n=every_n, offload=offload, layers=layers, verify=True)
        row["plain"] = verdict(train_step(t, model, batch), want)
        wanted = set(fxckpt.selected_layers(t))
        found = {r.layer.name for record in fxckpt.graphs(t) for r in record.regions}
        row |= {"selected": len(wanted), "found": len(wanted & found), "graphs": len(fxckpt.graphs(t))}
    except Exception as error:
        row |= {"plain": "fails", "error": f"{type(error).__name__}: {str(error)[:200]}"}
    return row


def one_compiled(name: str, setting: Setting) -> dict[str, Any]:
    """``torch.compile(t)`` against ``torch.compile(model)``, both through Inductor; dropout and its seed included."""
    every_n, offload, dropout = setting
    row: dict[str, Any] = {"aot_eager": "-"}
    try:
        want = compiled(name, dropout, None)
        row["plain"] = verdict(compiled(name, dropout, (every_n, offload)), want)
    except Exception as error:
        row |= {"plain": "fails", "error": f"{type(error).__name__}: {str(error)[:200]}"}
    return row


def verdict(got: Step, want: Step) -> str:
    """``equal`` (bit for bit), ``close`` with the largest difference, or what is missing."""
    if not differences(got.values(), want.values()):
        return "equal"
    missing = [n for n, w in want.values().items() if (w is None) != (got.values()[n] is None)]
    if missing:
        return f"None differs: {missing[:3]}"
    pairs = [(w, got.values()[n]) for n, w in want.values().items() if w is not None and w.is_floating_point()]
    return f"close ({max(float((w - g).abs().max()) for w, g in pairs if g is not None and w.numel()):.1e})"


def summary(rows: list[dict[str, Any]]) -> str:
    """The figures for docs/correctness.md."""
    count = Counter((r["aot_eager"].partition(" ")[0], r["plain"].partition(" ")[0]) for r in rows)
    lines = [
        f"{len(rows)} runs of {len({r['name'] for r in rows})} models",
        "aot_eager (against eager) | fxckpt (against eager, or against torch.compile) | runs",
    ]
    lines += [f"{aot:>12} | {plain:>9} | {number}" for (aot, plain), number in sorted(count.items())]
    for r in rows:
        if r["plain"] != "equal":
            setting = f"every_n={r['every_n']} offload={r['offload']} dropout={r['dropout']}"
            lines.append(f"{r['name']} {setting}: {r['plain']} (aot_eager: {r['aot_eager']}) {r.get('error', '')}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
