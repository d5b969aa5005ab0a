"""What a benchmark reads from PyTorch, and the one switch of PyTorch's own that it sets."""

from __future__ import annotations

import torch
import torch._functorch.config
from torch._dynamo.utils import counters


def set_activation_memory_budget(fraction: float) -> None:
    """Let PyTorch's partitioner save at most this fraction of what it saves by itself; of the whole process."""
    torch._functorch.config.activation_memory_budget = fraction


def captured_graphs() -> int:
    """Graphs that Dynamo has handed to a backend in this process."""
    return int(counters["stats"]["unique_graphs"])


def memory_after(profile: torch.profiler.profile, name: str) -> tuple[int, int]:
    """From a finished CPU profile with ``profile_memory=True``, bytes relative to its start.

    Args:
        profile: the profile.
        name: of a ``record_function`` range in it.

    Returns:
        What was held at the end of the range, and the peak of the whole profile.
    """
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    events = profile.profiler.kineto_results.events()
    end = next(e.start_ns() + e.duration_ns() for e in events if e.name() == name)
    total = held = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        total += event.nbytes()  # type: ignore[attr-defined]
        peak = max(peak, total)
        if event.start_ns() <= end:
            held = total
    return held, peak
