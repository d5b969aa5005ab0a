"""Survey: each architecture of transformers with a ``GradientCheckpointingLayer`` trained with and without fxckpt.

    python -m tests.benchmarks.models_table                    # all; resumes where it stopped
    python -m tests.benchmarks.models_table --part 1/2         # every second architecture, from the first on
    python -m tests.benchmarks.models_table --again llama t5   # these anew
    python -m tests.benchmarks.models_table --write-docs       # docs/models.md

Hours of work. Models are those of ``tests.zoo.architectures``: tiny, dropout off. Each has a process of its own, and is
built anew for each column, with every layer recomputed:

    eager       the model's own step
    compiles    ``torch.compile(model)``
    plain       ``fxckpt.transform(model, every_n=1, verify=True)``, against eager
    offload     the same with ``offload=True``
    compiled    ``torch.compile(fxckpt.transform(model, every_n=1, offload=True))``, against ``torch.compile(model)``

Results are lines of JSON in ``tests/benchmarks/models-results.jsonl``, or another file with --out.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path

import torch

import fxckpt
from tests.benchmarks.models_page import (
    AS_AOT,
    BITWISE,
    CLOSE,
    COLUMNS,
    DIFFERS,
    FAILS,
    REFUSED,
    RUNS,
    Row,
    fell_short,
    page,
)
from tests.helpers import Step, assert_close, differences, train_step
from tests.zoo.architectures import Architecture, Program, architectures

RESULTS = Path("tests/benchmarks/models-results.jsonl")
"""Where results are kept, from the repository's root."""
DOCS = Path(__file__).resolve().parent.parent.parent / "docs" / "models.md"
LIMIT = 1200.0
"""Seconds that a model may take; tiny ones take one minute."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, help="file of JSON lines")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="every N-th architecture only, from the I-th on")
    parser.add_argument("--again", action="store_true", help="the named ones, or all that fell short, anew")
    parser.add_argument("--write-docs", action="store_true", help="measure nothing; write docs/models.md")
    parser.add_argument("names", nargs="*", help="architectures; all by default")
    options = parser.parse_args()
    if options.write_docs:
        DOCS.write_text(page(list(read(options.out).values())), encoding="utf-8")
        return
    torch.set_num_threads(1)
    part, parts = map(int, options.part.split("/"))
    known = read(options.out)
    for architecture in architectures()[part - 1 :: parts]:
        row = known.get(architecture.name)
        anew = options.again and row is not None and (options.names or fell_short(row))
        if architecture.name in (options.names or [architecture.name]) and (row is None or anew):
            write(options.out, measure(architecture))


def read(file: Path) -> dict[str, Row]:
    """The last result of each architecture, by name."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return dict(sorted((row["name"], row) for row in map(json.loads, lines)))


def write(file: Path, row: Row) -> None:
    with file.open("a", encoding="utf-8") as out:
        out.write(json.dumps(row) + "\n")
    for program in row["programs"]:
        cells = ", ".join(f"{column} {program[column]}" for column in COLUMNS)
        print(f"{row['name']} {program['name']}: {cells} ({program['seconds']} s)", flush=True)
    if row["missing"]:
        print(f"{row['name']}: no model holds {', '.join(row['missing'])}", flush=True)


# ---- one architecture -------------------------------------------------------------------------------------------


def measure(architecture: Architecture) -> Row:
    """All columns for each model of an architecture."""
    programs = architecture.programs()
    held = frozenset[str]().union(*(p.layers for p in programs))
    return {
        "name": architecture.name,
        "layers": len(architecture.layers),
        "missing": [name for name in architecture.layers if name not in held],
        "failed": {} if held == {*architecture.layers} else architecture.failed,
        "programs": [in_own_process(survey, program) for program in programs],
        "torch": torch.__version__,
    }


def in_own_process(function: Callable[[Program], Row], program: Program) -> Row:
    """``function(program)`` in a forked process: what it leaves behind, or its death, is no other model's."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    start = time.perf_counter()
    process = context.Process(target=lambda: theirs.send(function(program)))
    process.start()
    theirs.close()
    row: Row = dict.fromkeys(COLUMNS, "")
    try:
        if ours.poll(LIMIT):
            row |= ours.recv()
        else:
            row |= {"eager": FAILS, "why": {"eager": f"took more than {LIMIT:.0f} seconds"}}
    except EOFError:
        row |= {"eager": FAILS, "why": {"eager": "the process died"}}
    process.kill()
    process.join()
    return row | {"name": program.name, "seconds": round(time.perf_counter() - start)}


def survey(program: Program) -> Row:
    """All columns for one model."""
    row: Row = {"why": {}}

    def cell(column: str, run: Callable[[], Step], wanted: Step | None, other: Step | None = None) -> Step | None:
        torch._dynamo.reset()
        try:
            step = run()
        except Exception as error:
            row[column] = REFUSED if isinstance(error, fxckpt.FxckptError) else FAILS
            row["why"][column] = f"{type(error).__name__}: {str(error)[:300]}"
            return None
        row[column], why = verdict(step, wanted, other)
        if why:
            row["why"][column] = why
        return step

    eager = cell("eager", lambda: plain_step(program), None)
    aot = None
    compiled = cell("compiles", lambda: plain_step(program, "inductor"), None)
    for column, offload in (("plain", False), ("offload", True)):
        step = cell(column, lambda offload=offload: transformed_step(program, offload), eager)
        if step is not None and row[column] != BITWISE:
            aot = aot or cell("aot_eager", lambda: plain_step(program, "aot_eager"), eager)
            if aot is not None:
                cell(column, lambda step=step: step, eager, aot)
    cell("compiled", lambda: transformed_step(program, True, compiled=True), compiled or eager)
    return row


def plain_step(program: Program, backend: str | None = None) -> Step:
    model, batch = program.build()
    return train_step(model if backend is None else torch.compile(model, backend=backend), model, batch)


def transformed_step(program: Program, offload: bool, compiled: bool = False) -> Step:
    model, batch = program.build()
    t = fxckpt.transform(model, every_n=1, offload=offload, verify=True)
    step = train_step(torch.compile(t) if compiled else t, model, batch)
    if not any(graph.regions for graph in fxckpt.graphs(t)):
        raise AssertionError("nothing was rewritten: equal numbers would prove nothing")
    return step


def verdict(step: Step, wanted: Step | None, other: Step | None) -> tuple[str, str]:
    """How a step compares with the one wanted, and what differs; `other` is aot_eager's, where that is no eager's."""
    if wanted is None:
        return RUNS, ""
    lines = differences(step.values(), wanted.values())
    if not lines:
        return BITWISE, ""
    if other is not None and not differences(step.values(), other.values()):
        return AS_AOT, ""
    try:
        assert_close(step, wanted)
    except AssertionError:
        return DIFFERS, "; ".join(lines[:2])
    return CLOSE, ""


if __name__ == "__main__":
    main()
