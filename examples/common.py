"""What the examples share: real English text that comes with every Python, and a measurement of saved bytes."""

import os
from collections.abc import Callable
from pydoc_data.topics import topics

import torch
from torch.profiler import ProfilerActivity, profile

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else the profiler writes its starts and stops to stderr


def byte_text() -> tuple[torch.Tensor, torch.Tensor]:
    """Python's own help texts as bytes, for training and, every tenth topic, for validation.

    Topics repeat one another's paragraphs; each is taken once, so that the validation text is new.
    """
    seen: set[str] = set()
    documents = []
    for _, text in sorted(topics.items()):
        fresh = [p for p in dict.fromkeys(text.split("\n\n")) if p not in seen]
        seen.update(fresh)
        documents.append("\n\n".join(fresh).encode())
    train = b"\n\n".join(d for i, d in enumerate(documents) if i % 10)
    valid = b"\n\n".join(documents[::10])
    return torch.tensor(list(train)), torch.tensor(list(valid))


def blocks(data: torch.Tensor, batch: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """A batch of random pieces of `data`."""
    starts = torch.randint(len(data) - length, (batch,), generator=generator)
    return torch.stack([data[s : s + length] for s in starts.tolist()])


def held_bytes(forward: Callable[[], torch.Tensor]) -> int:
    """Bytes of memory that one forward leaves allocated, while its result waits for its backward.

    Memory on all devices counts, so a copy offloaded from a CPU model to host memory does too.
    """
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    with profile(activities=activities, profile_memory=True) as prof:
        loss = forward()
    del loss
    return sum(e.self_cpu_memory_usage + e.self_device_memory_usage for e in prof.events() or ())


def mib(count: float) -> str:
    return f"{count / 2**20:.1f} MiB"
