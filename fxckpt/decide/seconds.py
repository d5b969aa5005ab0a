"""How long the nodes of a graph, or the kernels that a compiler makes of them, take on a known device.

A roofline: the longer of computing and of moving bytes. Rates of products and of attention depend on their sizes; where
they were measured (``fxckpt calibrate``) they are interpolated between the sizes that were, and elsewhere they are the
device's best.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxckpt import graph as G
from fxckpt.config import Offload
from fxckpt.decide.cost import flops, unwrapped
from fxckpt.decide.device import DeviceSpec
from fxckpt.torch_private import Kernel

aten = torch.ops.aten

_GATHERS = {aten.embedding, aten.gather, aten.index, aten.index_select}
"""They read of their first input as much as they give."""
_SCATTERS = {aten.index_put, aten.index_add, aten.scatter_add, aten.embedding_dense_backward}
"""They add values where indices say, one after the other."""
_ALLOCATES = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
"""They write nothing."""
_FUNCTIONS = {  # by operator: the functions that it evaluates for each value
    aten.exp: ("exp",),
    aten.sigmoid: ("exp",),
    aten.silu: ("exp",),
    aten.silu_backward: ("exp",),
    aten._softmax: ("exp",),
    aten._safe_softmax: ("exp",),
    aten._log_softmax: ("exp",),
    aten._log_softmax_backward_data: ("exp",),
    aten.tanh: ("tanh",),
    aten.erf: ("erf",),
    aten.gelu: ("erf",),
    aten.gelu_backward: ("erf", "exp"),
}
_PASSES = {aten._safe_softmax: 2}
"""Operators that PyTorch runs as several, and how many values of the result's size these make."""
_TANH_GELU = {aten.gelu: ("tanh",), aten.gelu_backward: ("tanh",)}


NEW_EACH_TIME = 32 << 20
"""Bytes from which a CPU's allocations get new memory of the system each time, which is slow to write at first.

It is glibc's largest ``M_MMAP_THRESHOLD``; what is smaller it takes from memory that was freed before.
"""


@dataclass(frozen=True)
class Product:
    """A matrix product, or several of one size.

    Attributes:
        batch: how many.
        m: rows of the result.
        k: summands.
        n: columns of the result.
    """

    batch: int
    m: int
    k: int
    n: int


class Pace:
    """Seconds on one device.

    Args:
        device: how fast it is.
    """

    def __init__(self, device: DeviceSpec) -> None:
        self.device = device
        rates: dict[tuple[str, bool], dict[tuple[int, ...], float]] = {}
        for one in device.products or ():
            rates.setdefault((one.dtype, one.batched), {})[one.m, one.k, one.n] = one.rate
        self._products = rates
        attention: dict[tuple[str, bool, bool], dict[tuple[int, ...], float]] = {}
        for each in device.attention or ():
            for backward in (False, True):
                points = attention.setdefault((each.dtype, each.is_causal, backward), {})
                points[each.tokens, each.head] = each.backward if backward else each.forward
        self._attention = attention

    def of_node(self, node: fx.Node) -> float | None:
        """Seconds of one node of a graph that runs node by node, without transfers; None where a rate is not known."""
        if node.op != "call_function" or G.is_view(node) or G.is_getitem(node):
            return 0.0
        if G.is_transfer(node) or G.is_order(node):
            return 0.0
        seconds = self._longer(self._computing([node]), self._moving(moved_bytes(node)))
        return None if seconds is None else seconds + self.new(_made_bytes(node))

    def of_kernel(self, kernel: Kernel) -> float | None:
        """Seconds of one kernel of a compiled graph, without transfers; None where a rate is not known."""
        if any(G.is_transfer(n) or G.is_order(n) for n in kernel.nodes):
            return 0.0
        moved = kernel.nbytes
        if not kernel.called:  # what it has of products is spelled out, and moves what a product would
            nodes = [n for n in kernel.nodes if not work(n)]
        else:
            nodes = [n for n in kernel.nodes if work(n) or G.overload_packet(n) in _SCATTERS][-1:]
            moved = max(moved, sum(map(moved_bytes, nodes)))
        return self._longer(self._computing(nodes), self._moving(moved)) if moved or nodes else 0.0

    def new(self, allocated: Iterable[int]) -> float:
        """Seconds that the first writes to values of these bytes take beside what is written anyway."""
        nbytes = sum(n for n in allocated if n >= NEW_EACH_TIME)
        return nbytes / self.device.fresh if self.device.fresh is not None else 0.0

    def transfers(self, offload: Offload, nbytes: int, forward: float, backward: float) -> float | None:
        """Seconds of a step that offloads `nbytes`, of whose graphs the seconds are known; None where a rate is not.

        A CPU copies to its own memory before it goes on. Other copies run beside the computation.
        """
        on_cpu, host = self.device.to_host is None, (self.device.to_host, self.device.from_host)
        if offload.to == "cpu" and on_cpu:
            copy = self._moving(2 * nbytes)
            return None if copy is None else forward + backward + 2 * copy
        disk = self.device.disk(offload.folder) if offload.to == "disk" else None
        ways = [host] if not on_cpu else []
        ways += [(disk.write, disk.read) if disk is not None else (None, None)] if offload.to == "disk" else []
        out, back = (min((way[i] or 0.0 for way in ways), default=0.0) for i in (0, 1))
        return max(forward, nbytes / out) + max(backward, nbytes / back) if out and back else None

    def _longer(self, computing: float | None, moving: float | None) -> float | None:
        if computing is None or moving is None:
            return None
        return (max(computing, moving) + (self.device.call or 0.0)) * (self.device.overhead or 1.0)

    def _moving(self, nbytes: int) -> float | None:
        return None if self.device.bandwidth is None else nbytes / self.device.bandwidth

    def _computing(self, nodes: Iterable[fx.Node]) -> float | None:
        total = 0.0
        for node in nodes:
            count = work(node)
            rate = self._rate(node) if count else None
            if count and rate is None:
                return None
            total += count / rate if rate else self._evaluating(node)
            if _is_grouped(node):  # what comes of no row stays the zero that is written first
                total += self._moving(_bytes(G.value(node))) or 0.0
        return total

    def _evaluating(self, node: fx.Node) -> float:
        rates, val = self.device.functions or {}, _first(node)
        if val is None:
            return 0.0
        packet = G.overload_packet(node)
        if packet in _SCATTERS:
            given = [val for source in node.all_input_nodes if (val := G.tensor(source)) is not None]
            values = max((G.hint(v.numel()) for v in given if v.is_floating_point()), default=0)
            return values / rates["scatter"] if "scatter" in rates else 0.0
        names: Sequence[str] = _FUNCTIONS.get(packet, ())
        if packet in _TANH_GELU and G.argument(node, "approximate") == "tanh":
            names = _TANH_GELU[packet]
        return sum(G.hint(val.numel()) / rates[name] for name in names if name in rates)

    def _rate(self, node: fx.Node) -> float | None:
        """FLOPs per second of a node, as PyTorch counts them."""
        val = _first(node)
        dtype = "" if val is None else str(val.dtype).removeprefix("torch.")
        best = self.device.flops.get(dtype)
        product = product_of(node)
        if product is not None:
            points = self._products.get((dtype, product.batch > 1 and not _is_grouped(node)))
            return interpolate(points, (product.m, product.k, product.n)) if points else best
        if "attention" in str(node.target) and isinstance(node.target, torch._ops.OpOverload):
            causal, query = G.argument(node, "is_causal") is True, _tensor(G.argument(node, "query"))
            points = self._attention.get((dtype, causal, "backward" in str(node.target)))
            if points and query is not None:
                return interpolate(points, [G.hint(size) for size in query.shape[-2:]])
            return best * (2 if causal else 1) if best is not None else None
        return best


def work(node: fx.Node) -> int:
    """FLOPs of a node, those of grouped products included, for which PyTorch has no formula."""
    grouped = product_of(node) if _is_grouped(node) else None
    if grouped is None:
        return flops(node)
    times = 2 if "backward" in str(unwrapped(node)[0]) else 1
    return times * 2 * grouped.batch * grouped.m * grouped.k * grouped.n


def product_of(node: fx.Node) -> Product | None:
    """The matrix product that a node is, or the products of a mixture's experts; None for other nodes."""
    packet = G.overload_packet(node)
    if _is_grouped(node):
        given = [val for source in node.all_input_nodes if (val := G.tensor(source)) is not None]
        rows = next((G.hint(val.shape[0]) for val in given if val.dim() == 2), 0)
        experts = next((list(map(G.hint, val.shape)) for val in given if val.dim() == 3), None)
        return None if experts is None else Product(experts[0], max(rows // max(experts[0], 1), 1), *experts[1:])
    first = 1 if packet in (aten.addmm, aten.baddbmm) else 0
    if packet not in (aten.mm, aten.addmm, aten.bmm, aten.baddbmm):
        return None
    a, b = (_tensor(node.args[i]) for i in (first, first + 1))
    if a is None or b is None:
        return None
    *batch, m, k = map(G.hint, a.shape)
    return Product(math.prod(batch), m, k, G.hint(b.shape[-1]))


def _is_grouped(node: fx.Node) -> bool:
    """Whether a node is products of groups of rows, each with a matrix of its own, by the operator's name."""
    return "grouped_mm" in str(unwrapped(node)[0])


def moved_bytes(node: fx.Node) -> int:
    """Bytes that a node reads and writes in memory. An expanded tensor's count once."""
    packet = G.overload_packet(node)
    given = _bytes(G.value(node))
    if packet in _ALLOCATES:
        return 0
    read = 0
    for i, source in enumerate(node.all_input_nodes):
        nbytes = _bytes(G.value(source))
        read += min(nbytes, given) if i == 0 and packet in _GATHERS else nbytes
    return (read + given) * _PASSES.get(packet, 1)


def _made_bytes(node: fx.Node) -> list[int]:
    """Bytes of each value that a node makes."""
    packet = G.overload_packet(node)
    values = [val for val in pytree.tree_leaves(G.value(node)) if isinstance(val, torch.Tensor)]
    return [_bytes(val) for val in values] * _PASSES.get(packet, 1)


def interpolate(points: Mapping[tuple[int, ...], float], at: Sequence[int]) -> float:
    """A rate between those measured on a grid of sizes, linear in the logarithms of both; outside, that at its edge.

    Args:
        points: the rates, by their sizes; a whole grid.
        at: the sizes wanted.
    """
    if len(next(iter(points))) == 0:
        return points[()]
    below = max((p[0] for p in points if p[0] <= at[0]), default=min(p[0] for p in points))
    above = min((p[0] for p in points if p[0] >= at[0]), default=below)
    low, high = (interpolate({p[1:]: r for p, r in points.items() if p[0] == x}, at[1:]) for x in (below, above))
    share = math.log(at[0] / below) / math.log(above / below) if above > below else 0.0
    return math.exp((1 - share) * math.log(low) + share * math.log(high))


def _bytes(val: Any) -> int:
    if isinstance(val, torch.Tensor):
        return min(G.tensor_nbytes(val), G.storage_nbytes(val))
    return sum(map(_bytes, val)) if isinstance(val, list | tuple) else 0


def _tensor(item: Any) -> torch.Tensor | None:
    return G.tensor(item) if isinstance(item, fx.Node) else None


def _first(node: fx.Node) -> torch.Tensor | None:
    """The tensor that a node gives, or of several the first of numbers; an operator may give its random state, too.

    Of what the partitioner puts around a random operator it is not recorded: then one that goes in.
    """
    values = [G.value(node), *map(G.value, node.all_input_nodes)]
    given = [val for val in pytree.tree_leaves(values) if isinstance(val, torch.Tensor)]
    return next((val for val in given if val.is_floating_point()), given[0] if given else None)
