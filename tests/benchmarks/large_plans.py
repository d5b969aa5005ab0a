"""Plans of models that are too large for the machine they are planned on: how long they take, and how much memory.

A part of ``tests/benchmarks/plan_accuracy.py``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fxckpt.show.tables import bytes_text, seconds_text

QWEN3 = {"model_type": "qwen3", "head_dim": 128, "num_key_value_heads": 8}
SMALL = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 8, "num_attention_heads": 16}
SHAPES: dict[str, tuple[dict[str, Any], int]] = {
    "Qwen3, 8 layers, hidden size 1024": ({**QWEN3, **SMALL}, 8192),
    "Qwen3-8B": (
        {
            **QWEN3,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "vocab_size": 151936,
            "max_position_embeddings": 131072,
        },
        131072,
    ),
    "Llama of 70B": (
        {
            "model_type": "llama",
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "max_position_embeddings": 131072,
        },
        8192,
    ),
}
"""Configurations, as their makers publish them, and the tokens of a sequence."""
OPTIONS = {"": [], "compiled": ["--compiled"]}


def measure_large() -> list[dict[str, Any]]:
    """Plan each of the shapes in bfloat16 with every layer recomputed and offloaded, by the command line."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for name, (config, tokens) in SHAPES.items():
            file, plan = Path(folder) / "config.json", Path(folder) / "plan.json"
            file.write_text(json.dumps(config), encoding="utf-8")
            for way, options in OPTIONS.items():
                command = f"plan --config {file} --batch 1 --seq {tokens} --dtype bfloat16 --every-n 1 --offload"
                run = [sys.executable, "-m", "fxckpt", *command.split(), "--json", str(plan), *options]
                start = time.perf_counter()
                nbytes = _most_bytes(run)
                seconds = time.perf_counter() - start
                made = json.loads(plan.read_text(encoding="utf-8"))
                said = {key: made[key] for key in ("parameter_bytes", "offloaded_bytes", "peak_bytes")}
                found.append({"name": name, "tokens": tokens, "way": way, "seconds": seconds, "bytes": nbytes, **said})
                print(f"{name} {way}: {seconds:.1f} s, {bytes_text(nbytes)}", flush=True)
    return found


def _most_bytes(command: Sequence[str]) -> int:
    """Run a command; the most bytes of memory that it held."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return usage.ru_maxrss * 1024


def large_section(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the page says of them."""
    lines = [
        "## Large models",
        "",
        "Planned by `fxckpt plan --config FILE --batch 1 --seq TOKENS --dtype bfloat16 --every-n 1 --offload`: how "
        "long the whole command took, and the most memory that it held.",
        "",
        "| model | tokens | graphs | parameters | offloaded | peak | planned in | with |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in found:
        sizes = [bytes_text(one[key]) for key in ("parameter_bytes", "offloaded_bytes", "peak_bytes")]
        way = one["way"] or "as captured"
        cells = [one["name"], f"{one['tokens']:,}", way, *sizes, seconds_text(one["seconds"]), bytes_text(one["bytes"])]
        lines.append(f"| {' | '.join(cells)} |")
    return lines
