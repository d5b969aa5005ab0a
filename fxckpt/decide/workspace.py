"""What operators allocate for themselves while they run on a CPU.

Of those whose workspace is as large as their result; others have little, or the size is that of caches. The sizes are
those of PyTorch's kernels, as its profiler shows them (``tests/test_memory.py``).
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


def workspace_nbytes(node: fx.Node) -> int:
    """Bytes that a node needs inside itself while it runs on a CPU, as far as that is known; 0 for others."""
    packet = G.overload_packet(node)
    made = [val for val in pytree.tree_leaves(G.value(node)) if isinstance(val, torch.Tensor)]
    if not made or made[0].device.type != "cpu":
        return 0
    if packet in _MASK_AS_NUMBERS:
        return G.tensor_nbytes(made[0])
    if packet is aten._safe_softmax:  # which rows are masked as a whole
        return G.hint(made[0].numel())
    if packet in _PROMOTING:
        given = [val for source in node.all_input_nodes if (val := G.tensor(source)) is not None]
        promoted = [val for val in given if val.dtype != made[0].dtype and val.dim()]
        return sum(G.hint(val.numel()) for val in promoted) * made[0].dtype.itemsize
    return 0
