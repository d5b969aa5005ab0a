"""Every example runs as a user runs it, with fewer steps; each exits non-zero when its loss did not fall."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
HELPERS = {"common.py"}

RUNS = {
    "llama_plain": ("train_llama.py", "--steps 3 --batch 2 --seq 64 --mode plain"),
    "llama_compile": ("train_llama.py", "--steps 3 --batch 2 --seq 64 --mode compile --every-n 1 --no-offload"),
    "minilm": ("finetune_minilm.py", "--steps 4 --batch 8 --held-out 32"),
    "plain_pytorch": ("plain_pytorch.py", "--steps 3"),
    "trainer": ("trainer.py", "--steps 5"),
    "fsdp2": ("fsdp2.py", "--steps 4 --seq 64"),
}
LAUNCHED = {"fsdp2.py": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]}
"""Examples that a launcher starts, on so many ranks."""


@pytest.mark.parametrize("name", RUNS)
def test_example_runs(name: str, tmp_path: Path) -> None:
    script, options = RUNS[name]
    done = subprocess.run(
        [sys.executable, *LAUNCHED.get(script, []), EXAMPLES / script, *options.split()],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "160"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert not any(tmp_path.iterdir()), "an example leaves files behind"


def test_every_example_is_run_and_listed() -> None:
    scripts = {path.name for path in EXAMPLES.glob("*.py")}
    assert {script for script, _ in RUNS.values()} == scripts - HELPERS
    readme = (EXAMPLES / "README.md").read_text()
    assert all(name in readme for name in scripts)
