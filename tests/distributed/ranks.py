"""Processes of one gloo group that run what tests ask them to, for as long as the tests do."""

from __future__ import annotations

import datetime
import multiprocessing as mp
import queue
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

WORLD = 2
COLLECTIVE_SECONDS = 60
"""So long a rank waits for the others before it raises."""
ANSWER_SECONDS = 240
"""So long a test waits for the ranks before it takes them to hang."""


class RankError(AssertionError):
    """What ranks raised, with their tracebacks."""


class Ranks:
    """So many processes, each a rank of one group. They are started when first asked, and anew after a failure."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.started = folder, 0
        self.processes: list[Any] = []

    def run(self, function: Callable[..., Any], *given: Any) -> list[Any]:
        """What ``function(rank, *given)`` gives on each rank; a function of a module, and values that can be pickled.

        Raises:
            RankError: a rank raised, or did not answer.
        """
        if not self.processes:
            self._start()
        for tasks in self.tasks:
            tasks.put((function, given))
        found: dict[int, tuple[bool, Any]] = {}
        try:
            while len(found) < WORLD:
                rank, ok, value = self.answers.get(timeout=ANSWER_SECONDS)
                found[rank] = ok, value
        except queue.Empty:
            self.stop()
            silent = sorted({*range(WORLD)} - found.keys())
            raise RankError(f"ranks {silent} do not answer; the others: {found}") from None
        wrong = [f"rank {rank}:\n{value}" for rank, (ok, value) in sorted(found.items()) if not ok]
        if wrong:
            self.stop()
            raise RankError("\n".join(wrong))
        return [value for _, (_, value) in sorted(found.items())]

    def _start(self) -> None:
        context = mp.get_context("spawn")
        self.started += 1
        store = self.folder / f"store{self.started}"
        self.tasks = [context.Queue() for _ in range(WORLD)]
        self.answers = context.Queue()
        self.processes = [
            context.Process(target=_work, args=(rank, str(store), self.tasks[rank], self.answers), daemon=True)
            for rank in range(WORLD)
        ]
        for process in self.processes:
            process.start()

    def stop(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()
            process.join()
        self.processes = []


def _work(rank: int, store: str, tasks: Any, answers: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=WORLD,
        timeout=datetime.timedelta(seconds=COLLECTIVE_SECONDS),
    )
    while True:
        function, given = tasks.get()
        torch._dynamo.reset()
        try:
            answers.put((rank, True, function(rank, *given)))
        except Exception:
            answers.put((rank, False, traceback.format_exc()))
