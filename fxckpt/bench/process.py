"""The benchmark's side of a variant's process (:mod:`fxckpt.bench.worker`)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import fxckpt

TAIL_LINES = 5
"""Lines of a dead process's standard error that its reason gives."""


class WorkerError(Exception):
    """A variant failed; the text is the reason.

    Attributes:
        told: whether the reason is an error of fxckpt's, which says what to do.
    """

    def __init__(self, reason: str, told: bool = False) -> None:
        super().__init__(reason)
        self.told = told


class WorkerProcess:
    """A process that runs one variant, and does nothing unless asked.

    Args:
        folder: for its standard error and its compile cache; they start empty.
        threads: of PyTorch's kernels; None for PyTorch's own choice.
    """

    def __init__(self, folder: Path, threads: int | None) -> None:
        folder.mkdir(parents=True)
        self.log = folder / "stderr.txt"
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")}
        root = str(Path(fxckpt.__file__).resolve().parent.parent)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        if threads is not None:
            environment |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        with self.log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "fxckpt.bench.worker"],  # -P: this fxckpt, whatever the folder holds
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=environment,
                text=True,
            )

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """The answer to a request.

        Raises:
            WorkerError: the request failed, or the process died.
        """
        assert self.process.stdin is not None and self.process.stdout is not None
        line = ""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        if not line:
            raise WorkerError(self._how_it_died())
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerError(answer["error"], answer["told"])
        found: dict[str, Any] = answer["ok"]
        return found

    def _how_it_died(self) -> str:
        self.close()
        code = self.process.returncode
        tail = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-TAIL_LINES:]
        what = f"exit status {code}"
        if code < 0:
            what = signal.Signals(-code).name
            what += ", probably out of memory" if code == -signal.SIGKILL else ""
        return f"the process died ({what})" + (f": {' | '.join(t.strip() for t in tail)}" if tail else "")

    def close(self) -> None:
        """End the process."""
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()  # it ends by itself at the end of its input
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
