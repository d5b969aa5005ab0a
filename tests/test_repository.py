"""What the repository's files may say, and that README's program runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"

# Written as patterns, so that this file does not contain what it forbids.
MACHINE_PATH = re.compile(r"(?<![\w.~-])/(?:work|root|home)/")
REGISTRY_HOST = re.compile(r"\b(?:pypi|pythonhosted|npmjs|debian)\.(?:org|com|io)\b|\bdownload\.pytorch\b")


@cache
def text_files() -> tuple[Path, ...]:
    """Files of the repository, committed or not, that git does not ignore and that hold text."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listing = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    files = (ROOT / name for name in sorted(set(listing.split("\0"))) if name)
    return tuple(f for f in files if f.is_file() and b"\0" not in f.read_bytes()[:8192])


def hits(pattern: re.Pattern[str]) -> list[str]:
    return [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()[:120]}"
        for file in text_files()
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1)
        if pattern.search(line)
    ]


def readme_programs() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def test_no_paths_of_one_machine() -> None:
    assert not hits(MACHINE_PATH)


def test_no_hosts_of_package_registries() -> None:
    assert not hits(REGISTRY_HOST)


@pytest.mark.parametrize(
    ("pattern", "bad", "good"),
    [
        (MACHINE_PATH, "see /" + "home/me/x", "see docs/home/me"),
        (REGISTRY_HOST, "https://py" + "pi.org/simple", "the registry's page"),
    ],
)
def test_the_patterns_catch_what_they_are_for(pattern: re.Pattern[str], bad: str, good: str) -> None:
    assert pattern.search(bad)
    assert not pattern.search(good)


def test_readme_shows_both_commands_first() -> None:
    before_first_section = README.read_text(encoding="utf-8").split("\n## ")[0]
    for command in ("make demo", "make test"):
        assert command in before_first_section
        assert re.search(rf"^{command.split()[1]}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


def test_continuous_integration_runs_what_people_run() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111, ".ci/run is not executable"
    assert script.read_text(encoding="utf-8").splitlines()[-1] == "make test"


def test_constraints_lie_within_the_ranges_users_get() -> None:
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    wanted = [Requirement(line) for lines in lists for line in lines]
    lines = (ROOT / "constraints-dev.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    assert {"torch", "transformers"} <= pins.keys()
    outside = [str(r) for r in wanted if r.name in pins and pins[r.name] not in r.specifier]
    assert not outside


def test_reference_documents_every_public_name() -> None:
    import fxckpt

    page = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^::: fxckpt\.(?:\w+\.)*(\w+)$", page, re.MULTILINE))
    assert {name for name in fxckpt.__all__ if not name.startswith("_")} <= documented


def test_readme_programs_run(tmp_path: Path) -> None:
    """README's Python blocks are one script, each going on from those before."""
    script = tmp_path / "readme.py"
    script.write_text("\n".join(readme_programs()), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, script.name]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
