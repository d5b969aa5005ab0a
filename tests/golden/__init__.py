"""Texts that tests compare with, and how they are accepted anew: `FXCKPT_ACCEPT=1 pytest tests/test_show.py`."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).parent
ACCEPT = "FXCKPT_ACCEPT"


def assert_golden(name: str, text: str) -> None:
    """`text` is what stands in `name` of this folder; with the variable set, it is written there."""
    path = FOLDER / name
    if os.environ.get(ACCEPT):
        path.write_text(text + "\n", encoding="utf-8")
    assert path.is_file(), f"no golden text {name}: accept it with {ACCEPT}=1"
    want = path.read_text(encoding="utf-8").removesuffix("\n")
    assert text == want, f"{name} differs; accept the new text with {ACCEPT}=1\n{text}"
