"""What operators allocate for themselves while they run on a CPU.

Of those whose workspace is as large as their result, and of attention, which works on a block of scores for each
thread; others have little. The sizes are those of PyTorch's kernels, as its profiler shows them
(``tests/test_memory.py``).
"""

from __future__ import annotations

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxckpt import graph as G

aten = torch.ops.aten

_MASK_AS_NUMBERS = {aten.native_dropout, aten.native_dropout_backward}
"""They multiply by a mask of booleans, which is made one of numbers first."""
_PROMOTING = {aten.add, aten.sub, aten.mul, aten.div}
"""Where the types of their operands differ, a copy of one is made in the type of the result."""
_ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_flash_attention_for_cpu_backward,
}
_ROWS = ((768, 256), (192, 64), (0, 32))
"""From so many queries on, so many are the rows of a block of scores."""
_COLUMNS = 512
"""Keys in a block of scores."""


def workspace_nbytes(node: fx.Node) -> int:
    """Bytes that a node needs inside itself while it runs on a CPU, as far as that is known; 0 for others."""
    packet = G.overload_packet(node)
    made = [val for val in pytree.tree_leaves(G.value(node)) if isinstance(val, torch.Tensor)]
    if not made or made[0].device.type != "cpu":
        return 0
    if packet in _MASK_AS_NUMBERS:
        return G.tensor_nbytes(made[0])
    if packet in _ATTENTION:
        return _attention_nbytes(node, is_backward=packet is not aten._scaled_dot_product_flash_attention_for_cpu)
    if packet is aten._safe_softmax:  # which rows are masked as a whole
        return G.hint(made[0].numel())
    if packet in _PROMOTING:
        given = [val for source in node.all_input_nodes if (val := G.tensor(source)) is not None]
        promoted = [val for val in given if val.dtype != made[0].dtype and val.dim()]
        return sum(G.hint(val.numel()) for val in promoted) * made[0].dtype.itemsize
    return 0


def _attention_nbytes(node: fx.Node, is_backward: bool) -> int:
    """Blocks of scores of all threads; in the backward also a copy of a gradient that is laid out otherwise."""
    query, key = (_given(node, name) for name in ("query", "key"))
    if query is None or key is None:
        return 0
    queries, keys, width = G.hint(query.shape[-2]), G.hint(key.shape[-2]), G.hint(query.shape[-1])
    rows = min(queries, next(rows for least, rows in _ROWS if queries >= least))
    scores = rows * min(keys, _COLUMNS)
    wide = max(query.dtype.itemsize, 4)  # narrow types are accumulated in float32, and copied back
    each = scores * (wide + (query.dtype.itemsize if query.dtype.itemsize < wide else 0))
    if is_backward:
        given = _given(node, "grad_out")
        copied = given is not None and not given.transpose(1, 2).is_contiguous()
        return torch.get_num_threads() * 2 * each + copied * G.tensor_nbytes(query) + rows * wide
    return torch.get_num_threads() * (each + rows * (width + 2) * wide)


def _given(node: fx.Node, name: str) -> torch.Tensor | None:
    source = G.argument(node, name)
    return G.tensor(source) if isinstance(source, fx.Node) else None
