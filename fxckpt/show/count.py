"""Counting on captured graphs: what is held for backward, what is moved, what is computed again.

What counts as held: the storage of every value that the forward graph hands to the backward, once for each storage,
however many views of it are saved. A symbolic size counts with the value it was traced with. Not counted:

- parameters, buffers and the caller's batch, which are alive anyway;
- host copies made by an offload (``offloaded_bytes``), also on a CPU model, where they lie in the same memory;
- memory in use only while the forward or the backward runs.

An input of the graph that needs a gradient and is no parameter does count: it is an activation of an earlier graph
(after a graph break), and this graph keeps it alive.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from functorch.compile import min_cut_rematerialization_partition
from torch import fx

import fxckpt.runtime.ops  # noqa: F401  (registers the transfer operators)
from fxckpt import graph as G
from fxckpt.capture.regions import Region
from fxckpt.record import GraphRecord
from fxckpt.torch_private import snapshot


@dataclass(frozen=True)
class Held:
    """A value that a forward graph hands to the backward.

    Attributes:
        node: the value; where it is offloaded, the value on the device, not its host copy.
        held_bytes: bytes of its storage on the device; 0 where offloaded or where `shares` counts them.
        offloaded_bytes: bytes of its host copy, 0 where it is not offloaded.
        shares: the earlier value that lies in the same storage, or None.
    """

    node: fx.Node
    held_bytes: int
    offloaded_bytes: int = 0
    shares: fx.Node | None = None


def held(saved: Iterable[fx.Node], activations: frozenset[str] = frozenset()) -> list[Held]:
    """The values among `saved` that count as held for backward, in order.

    Args:
        saved: nodes of a forward graph that it returns for the backward.
        activations: names of the graph's inputs that count (see the module's head).
    """
    found: list[Held] = []
    first: dict[fx.Node, fx.Node] = {}
    for node in saved:
        if G.is_offload(node):
            source = node.args[0]
            assert isinstance(source, fx.Node)
            found.append(Held(source, 0, G.nbytes(node)))
            continue
        base, shown = G.view_base(node), G.tensor(node)
        if shown is None or (base.op != "call_function" and base.name not in activations):
            continue
        if base in first:
            found.append(Held(node, 0, shares=first[base]))
            continue
        first[base] = node
        whole = G.tensor(base)
        found.append(Held(node, G.storage_nbytes(shown if whole is None else whole)))
    return found


# --- without the rewrite ----------------------------------------------------------------------------------------------

_baselines: WeakKeyDictionary[fx.GraphModule, int] = WeakKeyDictionary()


def baseline_saved_bytes(record: GraphRecord) -> int:
    """Bytes held for backward without the rewrite: of a copy of the joint graph, partitioned by PyTorch alone.

    Counted as in :func:`held`. Takes as long as PyTorch's partitioner, at the first call for a record.
    """
    if record.joint not in _baselines:
        copied = snapshot(record.joint)
        options = {**record.partition_options, "num_fwd_outputs": record.num_forward_outputs}
        with _fake_mode(copied.graph):
            forward, _ = min_cut_rematerialization_partition(copied, (), **options)
        outputs = G.output_args(forward.graph)[record.num_forward_outputs :]
        saved = [n for n in outputs if isinstance(n, fx.Node)]
        _baselines[record.joint] = sum(h.held_bytes for h in held(saved, record.activations))
    return _baselines[record.joint]


@contextlib.contextmanager
def _fake_mode(graph: fx.Graph) -> Iterator[None]:
    """The fake tensor mode a graph was traced in: the partitioner looks for it when it finds random operators."""
    modes = (getattr(G.tensor(n), "fake_mode", None) for n in graph.nodes)
    with next((m for m in modes if m is not None), contextlib.nullcontext()):
        yield


# --- regions and recompute --------------------------------------------------------------------------------------------


def innermost_regions(record: GraphRecord) -> dict[str, Region]:
    """For the name of each forward node in a region, the innermost region it lies in."""
    found: dict[str, Region] = {}
    for region in sorted(record.regions, key=_depth):
        for node in region.nodes:
            found[node.name] = region
    return found


def _depth(region: Region) -> int:
    return 0 if region.parent is None else 1 + _depth(region.parent)


def recomputed_nodes(record: GraphRecord) -> list[fx.Node]:
    """Nodes of the backward graph that the forward graph computes too.

    The partitioner keeps the joint graph's names in both halves. Random operators that it wrapped to draw the same
    numbers again have new names.
    """
    backward = {n.name for n in G.backward_nodes(record.joint.graph)}
    computed = {n.name for n in record.forward.graph.nodes if n.op == "call_function"} - backward
    again = [n for n in record.backward.graph.nodes if n.op == "call_function"]
    return [n for n in again if n.name in computed or G.target_name(n) in _RANDOM_AGAIN]


_RANDOM_AGAIN = ("run_with_rng_state", "graphsafe_run_with_rng_state")


def region_of(node: fx.Node, regions: Mapping[str, Region]) -> Region | None:
    """The innermost region of a node of the forward or backward graph, by `regions` of :func:`innermost_regions`.

    What lies in none by itself belongs where its neighbours do: an input of the graph where it is first read; a view
    where its storage is; a piece of the backward that is computed in the forward where its inputs are; and what the
    partitioner made around a random operator where the operator's inputs or users are.
    """
    if node.name in regions:
        return regions[node.name]
    base = G.view_base(node)
    around: list[fx.Node] = []
    if G.is_rng_state(node) or G.target_name(node) in _RANDOM_AGAIN:
        wrapper = node.all_input_nodes[0] if G.is_rng_state(node) else node
        around = [*wrapper.all_input_nodes, *(again for user in wrapper.users for again in (user, *user.users))]
    elif base.op == "placeholder":
        around = list(base.users)
    elif base is not node:
        around = [base]
    elif not G.is_forward(node):
        around = node.all_input_nodes
    return next((regions[n.name] for n in around if n.name in regions), None)
