"""docs/models.md, from what ``tests/benchmarks/models_table.py`` measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Row = dict[str, Any]

RUNS, BITWISE, AS_AOT, CLOSE, DIFFERS = "runs", "bit for bit", "as aot_eager", "close", "differs"
REFUSED, FAILS = "refused", "fails"
COLUMNS = ("eager", "compiles", "plain", "offload", "compiled")
OURS = ("plain", "offload", "compiled")
EQUAL = {RUNS, BITWISE, AS_AOT, CLOSE}
"""What counts as equal numbers."""

LOOPS = (
    "Its layers loop over what a tensor tells, and Dynamo leaves such a loop to Python: a layer in parts cannot be "
    "recomputed as a whole."
)
INFERENCE = "The file's only model runs without gradients."
SHAPES = "Dynamo finds shapes that do not fit, without fxckpt, too."
EXPLAINED: dict[str, str] = {
    "autoformer": LOOPS,
    "longcat_flash": LOOPS,
    "openai_privacy_filter": LOOPS,
    "step3p7": LOOPS,
    "nystromformer": SHAPES,
    "udop": SHAPES,
    "edgetam_video": INFERENCE,
    "sam2_video": INFERENCE,
    "sam3_tracker_video": INFERENCE,
    "esmfold2": "Diffusion layers run in the sampler alone, without gradients.",
    "exaone4_5": "The file has a decoder layer that its models do not use.",
    "layoutlmv2": "It needs detectron2.",
}
"""Why an architecture is an exception, by its name."""

HEAD = """\
# Models

One training step of every architecture of transformers whose modelling file defines a `GradientCheckpointingLayer`,
as a tiny model with random weights, without fxckpt and with it. A model holds some of the file's layer classes; where
no single one holds all, there are several. This page is written by the second command from what the first one measured
(hours; it resumes where it stopped):

    python -m tests.benchmarks.models_table
    python -m tests.benchmarks.models_table --write-docs

| column | what ran | compared with |
|---|---|---|
| eager | `model` | |
| compiles | `torch.compile(model)` | |
| plain | `fxckpt.transform(model, every_n=1, verify=True)` | eager |
| offload | the same with `offload=True` | eager |
| compiled | `torch.compile(fxckpt.transform(model, every_n=1, offload=True, verify=True))` | `torch.compile(model)` |

Loss, all gradients and all buffers are compared: *bit for bit*; *as aot_eager*: bit for bit those of
`torch.compile(model, backend="aot_eager")`, which differ from eager's; *close*: within float32 rounding (relative 1e-4,
absolute 1e-5).
"""


def fell_short(row: Row) -> bool:
    """Whether an architecture lacks a layer class, or a column of ours."""
    return bool(row["missing"]) or not all(equal(program) for program in row["programs"])


def equal(program: Row) -> bool:
    return all(program[column] in EQUAL for column in OURS)


def page(rows: Sequence[Row]) -> str:
    """docs/models.md."""
    programs = [program for row in rows for program in row["programs"]]
    lines = [HEAD, *_counts(rows, programs), ""]
    lines += ["## Architectures", "", f"| architecture | model | {' | '.join(COLUMNS)} |", "|---" * 7 + "|"]
    for row in rows:
        for program in row["programs"]:
            lines.append(f"| {row['name']} | {program['name']} | {' | '.join(program[c] for c in COLUMNS)} |")
    lines += ["", "## Exceptions", "", *_exceptions(rows)]
    return "\n".join(lines) + "\n"


def _counts(rows: Sequence[Row], programs: Sequence[Row]) -> Iterable[str]:
    compiling = [p for p in programs if p["compiles"] == RUNS]
    classes, missing = sum(row["layers"] for row in rows), sum(len(row["missing"]) for row in rows)
    yield f"{len(rows)} architectures, {classes} layer classes, {classes - missing} of them in {len(programs)} models."
    yield "With " + " and ".join(sorted({f"PyTorch {row['torch']}" for row in rows})) + ":"
    yield ""
    yield "| | models | of |"
    yield "|---|---|---|"
    for column in OURS:
        good = sum(program[column] in EQUAL for program in programs)
        yield f"| {column}: equal numbers | {good} | {len(programs)} |"
    good = sum(equal(program) for program in compiling)
    share = f" ({good / len(compiling):.1%})" if compiling else ""
    yield f"| all three, of those that train under `torch.compile` without fxckpt | {good}{share} | {len(compiling)} |"


def _exceptions(rows: Sequence[Row]) -> Iterable[str]:
    """Every cell that is not as it should be, and why."""
    for row in rows:
        lines = [
            f"  - {program['name']}, {column}: {program[column]}. {_text(program['why'].get(column, ''))}"
            for program in row["programs"]
            for column in COLUMNS
            if program[column] not in EQUAL
        ]
        if row["missing"]:
            why = "; ".join(f"{name}: {_text(reason)}" for name, reason in row["failed"].items())
            lines.append(f"  - in no model: {', '.join(row['missing'])}. {why}")
        if lines:
            yield f"- **{row['name']}** {EXPLAINED.get(row['name'], '')}".rstrip()
            yield from lines


def _text(reason: str) -> str:
    return " ".join(reason.split()).replace("|", "/").replace("<", "&lt;")[:200]
