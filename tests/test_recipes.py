"""The programs of docs/recipes.md, each run as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parent.parent / "docs" / "recipes.md").read_text(encoding="utf-8")
SECTIONS = {part.partition("\n")[0]: part for part in PAGE.split("\n## ")[1:]}
LAUNCHED = {"DistributedDataParallel", "FSDP2"}
"""What a launcher starts, on two ranks."""


LONG = {"A loop of your own", "DistributedDataParallel", "diffusers"}
"""What Inductor takes long for; the Trainer, FSDP2 and Lightning stay."""


def program(text: str) -> str:
    return "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))


BEGIN = program(PAGE.split("\n## ")[0])
RECIPES = {name: program(text) for name, text in SECTIONS.items() if program(text)}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in LONG)) for n in RECIPES])
def test_recipe(name: str, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(f"{BEGIN}\n{RECIPES[name]}\n", encoding="utf-8")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if name in LAUNCHED else []
    done = subprocess.run(
        [sys.executable, *launcher, str(script)],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def test_every_framework_has_one() -> None:
    assert len(RECIPES) == 9 and "From other switches" in SECTIONS
