"""Checks of the transfers in a forward and a backward graph (rules: ``runtime/ops.py``), parts of ``verify.py``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import fx

from fxckpt import graph as G
from fxckpt.errors import VerifyError
from fxckpt.rewrite.overlap import bytes_alive
from fxckpt.rewrite.phases import first_reader, region_of_reload


@dataclass(frozen=True)
class Limits:
    """How many transfers may be under way.

    Attributes:
        max_in_flight: storages that are being offloaded.
        prefetch: regions for which reloads have started; with 0, the one that comes next; None where `ceiling` is the
            limit.
        ceiling: the most bytes alive in the backward, or None where `prefetch` is the limit.
        inputs: names of the backward's inputs that these bytes are beside.
    """

    max_in_flight: int
    prefetch: int | None
    ceiling: int | None = None
    inputs: Collection[str] = ()


def check_transfers(
    forward: fx.Graph, backward: fx.Graph, user: Sequence[object], saved: Sequence[object], where: str
) -> None:
    """Check that each transfer has its four nodes, and that each is read by those alone that may read it.

    Args:
        forward: the forward graph.
        backward: the backward graph.
        user: its outputs that are the model's.
        saved: its outputs for the backward.
        where: opens the message of an error.

    Raises:
        VerifyError: a rule does not hold.
    """
    offloads = [n for n in forward.nodes if G.is_offload(n)]
    reloads = [n for n in backward.nodes if G.is_reload(n)]
    kept = {G.view_base(n) for n in [*user, *saved] if isinstance(n, fx.Node) and not G.is_offload(n)}
    _check_offloads(offloads, kept, saved, where)
    _check_releases(forward, where)
    sent = Counter(str(n.args[1]) for n in offloads)
    back = Counter(str(n.args[2]) for n in reloads)
    if sent != back or any(count != 1 for count in sent.values()):
        wrong = sorted((sent - back) + (back - sent)) or sorted(n for n, c in sent.items() if c > 1)
        raise VerifyError(f"{where}: each offload needs one reload of its name; wrong: {wrong}.")
    sources = {str(n.args[1]): n for n in offloads}
    for node in reloads:
        _check_reload(node, sources[str(node.args[2])], where)


def _check_offloads(offloads: list[fx.Node], kept: set[fx.Node], saved: Sequence[object], where: str) -> None:
    moved: Counter[fx.Node] = Counter()
    for node in offloads:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        base = G.view_base(source)
        others = [u for u in node.users if u.op != "output" and node not in G.waits_for(u)]
        if saved.count(node) != 1 or not all(G.is_wait_offload(u) for u in others):
            raise VerifyError(f"{where}: {node.name} must go to the backward once, and nowhere else.")
        if [u.args[:2] for u in others] != [(node, source)]:
            raise VerifyError(f"{where}: {node.name} must be waited for once, with {source.name}, in the forward.")
        if source in saved:
            raise VerifyError(f"{where}: {source.name} is offloaded and saved on the device as well.")
        if base.op == "placeholder" and not (base is source and G.argument(node, "given")):
            raise VerifyError(f"{where}: {node.name} offloads {base.name}, an input of the graph.")
        if base in kept:
            raise VerifyError(f"{where}: {node.name} offloads {source.name}, which an output of the graph keeps alive.")
        moved[base] += G.nbytes(source)
        whole = G.tensor(base)
        if whole is not None and moved[base] > max(G.storage_nbytes(whole), G.nbytes(source)):
            raise VerifyError(f"{where}: the storage of {base.name} is offloaded twice.")


def _check_releases(forward: fx.Graph, where: str) -> None:
    """Nothing reads the memory of an activation after the wait for its offload."""
    released: dict[fx.Node, str] = {}
    for node in forward.nodes:
        if node.op == "output":
            continue
        read = [base for base in map(G.view_base, node.all_input_nodes) if base in released]
        if read and not (G.is_wait_offload(node) and G.view_base(node.args[1]) in read):
            raise VerifyError(f"{where}: {node.name} reads {read[0].name} after {released[read[0]]} let it go.")
        if G.is_wait_offload(node):
            released[G.view_base(node.args[1])] = node.name


def _check_reload(node: fx.Node, offload: fx.Node, where: str) -> None:
    handle, source = node.args[0], offload.args[0]
    assert isinstance(handle, fx.Node) and isinstance(source, fx.Node)
    if handle.op != "placeholder" or handle.name != offload.name:
        raise VerifyError(f"{where}: {node.name} reads {handle.name}, which is not what {offload.name} saved.")
    waits = [u for u in node.users if G.is_wait_reload(u) and u.args[0] is node]
    if len(waits) != 1:
        raise VerifyError(f"{where}: {node.name} must be waited for once.")
    if set(handle.users) != {node, waits[0]}:
        raise VerifyError(f"{where}: the handle {handle.name} must be read by {node.name} and its wait only.")
    readers = [u for u in node.users if u is not waits[0] and node not in G.waits_for(u)]
    if not readers:
        raise VerifyError(f"{where}: {node.name} is read by nothing.")
    early = [u.name for u in readers if u < waits[0]]
    if early:
        raise VerifyError(f"{where}: {early[0]} reads {node.name} before {waits[0].name}.")
    given, taken = G.tensor(node), G.tensor(source)
    if given is None or taken is None or (given.dtype, given.device) != (taken.dtype, taken.device):
        raise VerifyError(f"{where}: {node.name} gives back another type or device than {source.name} had.")
    strides, had = ([G.hint(n) for n in t.stride()] for t in (given, taken))
    if not all(isinstance(n, int) for n in taken.stride()):  # gaps that vary do not come back
        dims = [dim for dim, size in enumerate(taken.size()) if G.hint(size) != 1]
        strides, had = sorted(dims, key=strides.__getitem__), sorted(dims, key=had.__getitem__)
    if strides != had:
        raise VerifyError(f"{where}: {node.name} gives back other strides than {source.name} had.")


def check_limits(forward: fx.Graph, backward: fx.Graph, limits: Limits, where: str) -> None:
    """Check that no more transfers are under way than allowed, at any place of either graph.

    Raises:
        VerifyError: there are more.
    """
    under_way: Counter[object] = Counter()
    for node in forward.nodes:
        if G.is_offload(node):
            under_way[G.view_base(node.args[0])] += 1
            if len(+under_way) > limits.max_in_flight:
                raise VerifyError(f"{where}: at {node.name} more than {limits.max_in_flight} offloads are under way.")
        elif G.is_wait_offload(node):
            under_way[G.view_base(node.args[1])] -= 1
    if limits.ceiling is not None and (most := max(bytes_alive(backward, limits.inputs))) > limits.ceiling:
        raise VerifyError(f"{where}: reloads that start early lift the peak to {most} bytes, above {limits.ceiling}.")
    if limits.prefetch is None:
        return
    regions: Counter[object] = Counter()
    for node in backward.nodes:
        if G.is_reload(node):
            regions[_region(node)] += 1
            if len(+regions) > max(limits.prefetch, 1):
                raise VerifyError(
                    f"{where}: at {node.name} reloads for more than {max(limits.prefetch, 1)} regions are under way."
                )
        elif G.is_wait_reload(node):
            regions[_region(node.args[0])] -= 1


def _region(reload: fx.Node) -> object:
    """What a reload is for: a region, or the node of none that reads it first."""
    region = region_of_reload(reload)
    return first_reader(reload) if region is None else region
