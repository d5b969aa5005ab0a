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


def held_bytes(forward: Callable[[], torch.Tensor], device: str) -> int:
    """Bytes of the device's memory that one forward leaves allocated while its result waits for its backward.

    On a CPU the copies that are offloaded to host memory count too: it is the same memory.
    """
    if device.startswith("cuda"):
        before = torch.cuda.memory_allocated(device)
        loss = forward()
        torch.cuda.synchronize(device)
        return torch.cuda.memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        loss = forward()
    del loss
    return sum(event.self_cpu_memory_usage for event in prof.events() or ())


def mib(count: float) -> str:
    return f"{count / 2**20:.1f} MiB"
