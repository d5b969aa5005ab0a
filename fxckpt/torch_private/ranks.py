"""What PyTorch's distributed package knows of this process's group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as _c10d
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True)
class RankStore:
    """The store by which the ranks of the default group found each other."""

    store: Any
    rank: int

    def first(self, key: str, value: str) -> str:
        """What the first rank to ask for `key` gave; `value` where this is it. Nobody waits for another."""
        found: bytes = self.store.compare_set(key, "", value)
        return found.decode()


def rank_store() -> RankStore | None:
    """The store of the default group; None where this process is in no group, or alone in it."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    store: Any = _c10d._get_default_store()  # MPI has none
    return None if store is None else RankStore(store, dist.get_rank())


def buckets_too_small() -> bool:
    """Whether buckets of the DDP under way are smaller than Dynamo, which splits graphs at them, takes any to be."""
    if not dist.is_available():
        return False
    running: Any = DistributedDataParallel._get_active_ddp_module()
    least: int = dist._DEFAULT_FIRST_BUCKET_BYTES  # type: ignore[attr-defined]
    return running is not None and running.bucket_bytes_cap < least
