"""Bytes of what nodes stand for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from fxckpt.graph.meta import value


def nbytes(node: fx.Node) -> int:
    """Bytes of the tensors that `node` stands for; symbolic sizes count with the value they were traced with."""
    return sum(tensor_nbytes(v) for v in _tensors(value(node)))


def tensor_nbytes(val: torch.Tensor) -> int:
    """Bytes of a tensor's own elements (an expanded tensor counts once per element shown)."""
    return hint(val.numel()) * val.dtype.itemsize


def storage_nbytes(val: torch.Tensor) -> int:
    """Bytes of the storage that keeps a tensor alive: dimensions of stride 0 count once."""
    count = 1
    for size, stride in zip(val.shape, val.stride(), strict=True):
        count *= 1 if hint(stride) == 0 else hint(size)
    return count * val.dtype.itemsize


def hint(number: Any) -> int:
    """An int from an int or a symbolic int (the value it was traced with; 0 where that is unknown)."""
    if isinstance(number, int):
        return number
    node = getattr(number, "node", None)
    known = node.hint if node is not None and node.has_hint() else None
    return int(known) if known is not None else 0


def _tensors(val: Any) -> Iterator[torch.Tensor]:
    if isinstance(val, torch.Tensor):
        yield val
    elif isinstance(val, (list, tuple)):
        for item in val:
            yield from _tensors(item)
