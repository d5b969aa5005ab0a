"""``explain``: what a transformed model's graphs save for backward, why, and what they compute again, as data.

    Explanation            the model, its settings, totals
    └── GraphFigures       one captured graph: totals without and with the rewrite
        ├── RegionFigures  one call of a boundary layer
        │   ├── BoundaryFigures   a value it is recomputed from
        │   └── SavedValue        a value held for backward
        └── SavedValue     a value held for backward, made outside every region

Each saved value, each FLOP and each node is counted in one place: in the innermost region, or outside. So the figures
of a graph's regions and of what is outside sum up to the graph's own. For what counts as held see
:mod:`fxckpt.show.count`.
"""

from __future__ import annotations

import dataclasses
import enum
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fxckpt.runtime.stats import TransferStats

if TYPE_CHECKING:
    from rich.console import RenderableType

WIDTH = 120
"""Columns of the text that ``str(explanation)`` gives."""


class Why(enum.Enum):
    """Why a value is held for backward."""

    BOUNDARY = "boundary"
    """A recomputed region starts from it."""
    EXIT = "exit"
    """Made in a recomputed region, and read outside it."""
    KEPT = "kept"
    """Made in a region that is kept."""
    NAMED = "named"
    """In a recomputed region, and saved because ``save=`` names it."""
    STATE = "state"
    """Copy of an input that the step itself changes."""
    RANDOM = "random"
    """State of the random number generator, to draw the same numbers again."""
    POLICY = "policy"
    """The model's own ``torch.utils.checkpoint`` policy saves it."""
    ONCE = "once"
    """In a recomputed region, but may run only once."""
    EARLIER = "earlier"
    """An activation that came in from an earlier graph, after a graph break."""
    OUTSIDE = "outside"
    """Made outside every region."""


@dataclass(frozen=True)
class SavedValue:
    """A value held for backward.

    Attributes:
        name: name of its node in the forward graph.
        why: why it is held.
        shape: its sizes, as traced.
        dtype: its element type, such as ``"float32"``.
        saved_bytes: bytes of its storage, held on the device; 0 where offloaded or counted by `shares`.
        offloaded_bytes: its bytes where it was offloaded to, 0 where it stays on the device.
        shares: name of the saved value whose storage it lies in, or None.
        source: source line that made it (of an input: that reads it first), or an empty string.
    """

    name: str
    why: Why
    shape: tuple[int, ...]
    dtype: str
    saved_bytes: int
    offloaded_bytes: int
    shares: str | None
    source: str


@dataclass(frozen=True)
class BoundaryFigures:
    """A value that a recomputed region starts from.

    Attributes:
        name: name of its transfer, such as ``"layers_3_input"``.
        node: name of its node in the forward graph.
        shape: its sizes, as traced.
        dtype: its element type, such as ``"float32"``.
        nbytes: bytes of its elements.
        offloaded: whether it leaves device memory between forward and backward.
        regions: all regions that start from it. Its bytes are counted in the first.
        source: source line that made it, or an empty string.
    """

    name: str
    node: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    offloaded: bool
    regions: tuple[str, ...]
    source: str


@dataclass(frozen=True)
class RegionFigures:
    """One call of a boundary layer. Figures leave out regions nested in this one, which have their own.

    Attributes:
        name: the layer's name, with ``#k`` for its k-th further call.
        layer: the layer's name.
        call: which call of the layer in this graph.
        treatment: ``"keep"`` or ``"recompute"``, as the policy chose.
        save: what the policy saves of a recomputed region.
        inside: name of the recomputed region around it, which then decides, or None.
        nodes: forward nodes.
        saved_bytes: bytes held on the device for backward.
        offloaded_bytes: bytes held for backward where they were offloaded to.
        flops: floating point operations of its forward, a multiply-add counting as two.
        recomputed_flops: those of them that the backward does again.
        boundaries: the values it is recomputed from.
        saved: the values held for backward.
    """

    name: str
    layer: str
    call: int
    treatment: str
    save: tuple[str, ...]
    inside: str | None
    nodes: int
    saved_bytes: int
    offloaded_bytes: int
    flops: int
    recomputed_flops: int
    boundaries: tuple[BoundaryFigures, ...]
    saved: tuple[SavedValue, ...]


@dataclass(frozen=True)
class GraphFigures:
    """One captured graph.

    Attributes:
        function: the captured Python function: file, first line, name.
        root: name of the module whose method it is; empty for the model itself, or where unknown.
        compile_id: PyTorch's number of the compilation, such as ``"0/1"``, as in its logs.
        call: number of the model's call that it was captured in.
        current: whether it counts in the explanation's totals (see :class:`Explanation`).
        inputs: inputs that are no parameters, such as ``"int64[2, 16]"``.
        baseline_saved_bytes: bytes held on the device for backward without the rewrite.
        saved_bytes: bytes held on the device for backward with it.
        offloaded_bytes: bytes held for backward where they were offloaded to.
        flops: floating point operations of forward and backward without any recompute.
        recomputed_flops: those that the backward adds by recomputing.
        regions: calls of boundary layers, in order.
        outside: values held for backward that were made outside every region.
    """

    function: str
    root: str
    compile_id: str
    call: int
    current: bool
    inputs: tuple[str, ...]
    baseline_saved_bytes: int
    saved_bytes: int
    offloaded_bytes: int
    flops: int
    recomputed_flops: int
    regions: tuple[RegionFigures, ...]
    outside: tuple[SavedValue, ...]


@dataclass(frozen=True, repr=False)
class Explanation:
    """What a transformed model saves for backward and computes again; prints as tables.

    Totals are those of one training step: the sum over the model's *current* graphs. One call leaves several graphs
    where the capture breaks. Captures of the same function in later calls (for other shapes, another mode, another
    backend) are alternatives: of each function, and each module it runs for, those of the last call that captured it
    are current. A graph that one step runs several times (after a graph break, for several layers) counts once.

    Bytes are those held for backward: the storage of every value that the forward hands to the backward, each storage
    once. Parameters, buffers and the batch, alive anyway, do not count; nor does memory in use only while the forward
    or the backward runs. On a CPU model host copies lie in the same memory, and still count as offloaded only.

    FLOPs are counted by PyTorch's formulas for matrix products, convolutions and attention; other operators count 0.

    Attributes:
        model: class name of the model.
        settings: what ``transform`` was asked for.
        graphs: every captured graph, in order of capture.
        transfers: what the last step's transfers took, as ``fxckpt.stats`` gives it.
    """

    model: str
    settings: Mapping[str, Any]
    graphs: tuple[GraphFigures, ...] = field(default=())
    transfers: TransferStats = field(default_factory=TransferStats)

    @property
    def current(self) -> tuple[GraphFigures, ...]:
        """The graphs that the totals sum over."""
        return tuple(g for g in self.graphs if g.current)

    @property
    def saved_bytes(self) -> int:
        """Bytes held on the device for backward, without parameters, buffers, the batch, and offloaded values."""
        return sum(g.saved_bytes for g in self.current)

    @property
    def baseline_saved_bytes(self) -> int:
        """What `saved_bytes` would be without the rewrite: what PyTorch's partitioner saves by itself."""
        return sum(g.baseline_saved_bytes for g in self.current)

    @property
    def offloaded_bytes(self) -> int:
        """Bytes held for backward where they were offloaded to."""
        return sum(g.offloaded_bytes for g in self.current)

    @property
    def flops(self) -> int:
        """Floating point operations of forward and backward without any recompute."""
        return sum(g.flops for g in self.current)

    @property
    def recomputed_flops(self) -> int:
        """Floating point operations that recomputing adds to `flops`."""
        return sum(g.recomputed_flops for g in self.current)

    def to_dict(self) -> dict[str, Any]:
        """All figures as dicts, lists, strings and numbers: totals first, then ``graphs`` as :class:`GraphFigures`."""
        return {
            "model": self.model,
            "settings": dict(self.settings),
            "saved_bytes": self.saved_bytes,
            "baseline_saved_bytes": self.baseline_saved_bytes,
            "offloaded_bytes": self.offloaded_bytes,
            "flops": self.flops,
            "recomputed_flops": self.recomputed_flops,
            "transfers": self.transfers.to_dict(),
            "graphs": _plain(self.graphs),
        }

    def to_json(self, indent: int | None = 2) -> str:
        """:meth:`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=indent)

    def __rich__(self) -> RenderableType:
        from fxckpt.show.tables import render

        return render(self)

    def __str__(self) -> str:
        from rich.console import Console

        text = io.StringIO()
        Console(file=text, width=WIDTH, force_terminal=False, color_system=None).print(self)
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())

    def __repr__(self) -> str:
        return f"<fxckpt.Explanation of {self.model}: {len(self.graphs)} graphs; print it, or use .to_dict()>"


def _plain(item: Any) -> Any:
    if isinstance(item, enum.Enum):
        return item.value
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return {f.name: _plain(getattr(item, f.name)) for f in dataclasses.fields(item)}
    return [_plain(i) for i in item] if isinstance(item, (list, tuple)) else item
