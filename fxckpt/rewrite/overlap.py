"""Pass on the forward and backward graph: when transfers start and when they are waited for.

In the forward a window slides over the transfers: before one starts, the one `max_in_flight` before it is waited for.
So an activation's memory goes while later regions run, after a copy has had as long as they take. An activation that is
read late (by a whole decoder, by a skip connection) starts after its last reader, as its memory stays until then. Parts
of one storage start together and count as one.

In the backward the copy for a region starts while the region `prefetch` before it has its gradients taken: where enough
of that region's values are gone, so that the peak does not rise. Where it is known how fast the device computes and its
place gives back, a copy that would come too late starts as much earlier as the peak of the step allows.

Graph order alone says this to whoever runs the graph node by node. For a compiler that orders anew, each node also
reads what is to come before it, and is read by what is to come after it (``runtime/ops.py``):

forward:   wait i    reads the activation of i + M; M is `max_in_flight`    | not before it is made
           offload   of i + M reads the handle of i                         | not before wait i
           after     changes the next product, reads the handle of i + M    | not much later than its activation
backward:  reload    reads the gradient behind which it stands             | not before it
           after     changes the next product, reads the reload            | not much later
           wait      reads the gradients that its region gets              | not before these
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from fxckpt import graph as G
from fxckpt.decide.clock import Clock
from fxckpt.rewrite.phases import (
    feeds_product,
    find_gradients,
    find_readers,
    is_added,
    is_product,
    region_of_reload,
)


def order_offloads(forward: fx.Graph, max_in_flight: int) -> None:
    """Place the starts and the waits of the forward.

    Needs: offloads, and a wait for each. Leaves: of at most `max_in_flight` storages an offload between start and wait.
    """
    units = _by_start(forward, max_in_flight)
    if not units:
        return
    waits = {n.args[0]: n for n in forward.nodes if G.is_wait_offload(n)}
    for i, unit in enumerate(units):
        next_unit = units[i + max_in_flight] if i + max_in_flight < len(units) else None
        for offload in unit:
            if next_unit is not None:
                next_unit[0].prepend(waits[offload])
                G.wait_for(waits[offload], [_activation(next_unit[0])])
                G.wait_for(next_unit[0], [offload])
    _place_last_waits(forward, [waits[o] for unit in units[-max_in_flight:] for o in unit], units[-1][-1])
    _hold_starts(forward)


def _place_last_waits(forward: fx.Graph, waits: Sequence[fx.Node], last_start: fx.Node) -> None:
    """Wait for what is under way at the end where the last product is there, which for a language model are the logits.

    What is left to do then, a loss, is short, and what it needs in memory is wide.
    """
    nodes = list(forward.nodes)
    order = {node: i for i, node in enumerate(nodes)}
    readers = find_readers(nodes)
    product = next((n for n in reversed(nodes[order[last_start] :]) if _is_landmark(n)), None)
    output = max((n for n in G.output_args(forward) if _is_made(n)), default=None)
    for wait in reversed(waits):
        if product is None:
            G.wait_for(wait, [] if output is None else [output])
            continue
        reader = _last_reader(readers[G.view_base(wait.all_input_nodes[1])])
        after = product if reader is None else max(product, reader, key=order.__getitem__)
        after.append(wait)
        G.wait_for(wait, [product])


def _activation(offload: fx.Node) -> fx.Node:
    found = offload.args[0]
    assert isinstance(found, fx.Node)
    return found


def _is_landmark(node: fx.Node) -> bool:
    """Whether the readers of `node` can be held behind something without costing a fusion."""
    return is_product(node) and not is_added(node)


def _is_in_memory(node: fx.Node) -> bool:
    """Whether something can be held behind `node` without costing a fusion."""
    if is_product(node):
        return not is_added(node)
    return node.op == "call_function" and not G.is_view(node) and G.tensor(node) is not None and feeds_product(node)


def _is_made(node: object) -> bool:
    """Whether `node` is a tensor that the graph computes."""
    made = isinstance(node, fx.Node) and node.op == "call_function" and not G.is_transfer(node)
    return made and G.tensor(node) is not None  # type: ignore[arg-type]


def _by_start(forward: fx.Graph, max_in_flight: int) -> list[list[fx.Node]]:
    """The offloads of each storage, in the order they start in, after moving those of what is read late.

    Late is behind the place of the wait: a wait lets memory go, and nothing may read it afterwards.
    """
    nodes = list(forward.nodes)
    readers = find_readers(nodes)
    order: dict[fx.Node, float] = {node: float(i) for i, node in enumerate(nodes)}
    storages: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        if G.is_offload(node):
            storages.setdefault(G.view_base(_activation(node)), []).append(node)
    for parts in storages.values():
        for part in parts[:-1]:
            parts[-1].prepend(part)
    last = {parts[-1]: _last_reader(readers[base]) for base, parts in storages.items()}
    units = list(storages.values())
    while True:
        units.sort(key=lambda parts: order[parts[-1]])
        late = [
            (parts, reader)
            for parts, after in zip(units, units[max_in_flight:], strict=False)
            if (reader := last[parts[-1]]) is not None and order[reader] > order[after[-1]]
        ]
        if not late:
            return units
        for parts, reader in reversed(late):
            for part in reversed(parts):
                reader.append(part)
            order[parts[-1]] = order[reader] + 0.5


def _last_reader(readers: Sequence[fx.Node]) -> fx.Node | None:
    computing = [n for n in readers if not G.is_transfer(n)]
    return computing[-1] if computing else None


def _hold_starts(forward: fx.Graph) -> None:
    """Let the readers of the next product after each start come after it."""
    started: list[fx.Node] = []
    for node in list(forward.nodes):
        if G.is_offload(node):
            started.append(node)
        elif started and _is_landmark(node):
            with forward.inserting_after(node):
                op = torch.ops.fxckpt.after.default
                forward.create_node("call_function", op, (node, started), name=f"started_{started[-1].name}")
            started = []


def order_reloads(
    backward: fx.Graph, prefetch: int, inputs: Container[str], clock: Clock | None = None, ceiling: int = 0
) -> None:
    """Place the starts of the backward.

    Needs: waits right before the first reader of what was reloaded; their ``first`` are the gradients that are there.
    Leaves: each reload in the stretch of the backward `prefetch` groups of waits earlier, a group being the waits for
    what one region starts from; there where its bytes do not lift the stretch's peak. With a clock, earlier where that
    is too late, as far as the step's peak allows.

    Args:
        backward: the backward graph.
        prefetch: how many groups earlier; 0 leaves reloads before their waits, whatever the clock says.
        inputs: names of the graph's placeholders that stay in memory anyway, as what is returned does: neither counts.
        clock: how long computing and copying takes, or None where that is not known.
        ceiling: bytes of the step's peak outside the backward, counted alike.
    """
    groups = _groups(backward)
    _gather_kept(groups)
    _wait_for_gradients(groups)
    if not prefetch:
        return
    nodes = list(backward.nodes)
    order = {node: i for i, node in enumerate(nodes)}
    gradients = find_gradients(nodes)
    alive = bytes_alive(backward, inputs)
    starts = [order[group[0]] for group in groups]
    first = next(i for i, n in enumerate(nodes) if n.op != "placeholder")
    ends = [order[group[-1]] for group in groups]  # some of a region's parts may be read late
    stretches = [range(a, b) for a, b in zip([first, *ends], starts, strict=False)]
    places = [i for i, n in enumerate(nodes) if i >= first and n in gradients and _is_in_memory(n)]
    coming = [
        _Coming([w.all_input_nodes[0] for w in group], stretches[max(i + 1 - prefetch, 0)], wait=starts[i])
        for i, group in enumerate(groups)
    ]
    for one in coming:
        one.place = _place([p for p in places if p in one.stretch], one.stretch, alive, one.nbytes)
    if clock is not None:
        _start_in_time(coming, nodes, places, alive, clock, ceiling)
    for one in coming:
        begin = nodes[one.stretch.start if one.stretch else first]
        if one.place is not None:
            _start_behind(backward, one.reloads, nodes[one.place])
        elif G.is_wait_reload(begin):
            for reload in reversed(one.reloads):
                begin.append(reload)
                G.wait_for(reload, G.waits_for(begin))
        else:
            for reload in one.reloads:
                begin.prepend(reload)


def bytes_alive(backward: fx.Graph, inputs: Container[str]) -> list[int]:
    """Bytes alive at each node of the backward, beside what is returned and the placeholders of the names `inputs`."""
    nodes = list(backward.nodes)
    staying = {n for n in nodes if n.op == "placeholder" and n.name in inputs}
    staying |= {G.view_base(n) for n in G.output_args(backward) if isinstance(n, fx.Node)}
    return G.bytes_alive(nodes, staying)


@dataclass
class _Coming:
    """What one region starts from, on its way back.

    Attributes:
        reloads: its parts.
        stretch: the part of the backward, by positions, in which it is to start.
        wait: position of the first wait for it.
        place: position of the node behind which it starts; None for the begin of the stretch.
    """

    reloads: list[fx.Node]
    stretch: range
    wait: int
    place: int | None = None

    @property
    def nbytes(self) -> int:
        return sum(map(G.nbytes, self.reloads))


def _start_in_time(
    coming: Sequence[_Coming],
    nodes: Sequence[fx.Node],
    places: Sequence[int],
    alive: Sequence[int],
    clock: Clock,
    ceiling: int,
) -> None:
    """Move starts to earlier `places`, so that copies, one at a time, are done when they are waited for.

    As far as the bytes alive stay at or below the peak that the step has without that, or `ceiling`. What is waited for
    first is served first.
    """
    begins = [0.0]  # what each node begins at, in seconds
    for node in nodes:
        begins.append(begins[-1] + clock.least_compute(node))
    latest, asked = math.inf, []
    for one in reversed(coming):
        latest = min(latest, begins[one.wait]) - clock.reload(one.nbytes)
        asked.append(latest)
    level = list(alive)
    for one in coming:
        for i in range(one.stretch.start if one.place is None else one.place + 1, one.wait):
            level[i] += one.nbytes
    highest = max([*level, ceiling])
    least = -1
    for one, wanted in zip(coming, reversed(asked), strict=True):
        for place in reversed(places):
            if one.place is None or begins[one.place + 1] <= wanted or place < least:
                break
            if place >= one.place:
                continue
            if max(level[place + 1 : one.place + 1]) + one.nbytes > highest:
                break
            for i in range(place + 1, one.place + 1):
                level[i] += one.nbytes
            one.place = place
        least = least if one.place is None else max(least, one.place)


def _place(places: Sequence[int], stretch: range, alive: Sequence[int], nbytes: int) -> int | None:
    """The first of `places` behind which `nbytes` more do not lift the stretch's peak; the last where none is."""
    peak = max((alive[i] for i in stretch), default=0)
    highest, behind = 0, {}
    for i in reversed(stretch):
        behind[i] = highest
        highest = max(highest, alive[i])
    return next((p for p in places if behind[p] + nbytes <= peak), places[-1] if places else None)


def _start_behind(backward: fx.Graph, reloads: Sequence[fx.Node], place: fx.Node) -> None:
    """Move `reloads` behind `place`, and let the readers of the next product come after them."""
    for reload in reversed(reloads):
        place.append(reload)
        G.wait_for(reload, [place])
    node = reloads[-1].next
    while node.op != "output" and not _is_landmark(node):
        if G.is_wait_reload(node) and node.args[0] in reloads:
            return
        node = node.next
    if node.op != "output":
        with backward.inserting_after(node):
            op = torch.ops.fxckpt.after.default
            backward.create_node("call_function", op, (node, list(reloads)), name=f"started_{reloads[-1].name}")


def _wait_for_gradients(groups: Sequence[Sequence[fx.Node]]) -> None:
    """Let groups for which no gradients are known wait for those of the group before."""
    known: list[fx.Node] = []
    for group in groups:
        gradients = list(dict.fromkeys(n for wait in group for n in G.waits_for(wait)))
        for wait in group if not gradients else ():
            G.wait_for(wait, known)
        known = gradients or known


def _groups(backward: fx.Graph) -> list[list[fx.Node]]:
    """The waits for reloads, in order; together those of what one region starts from, or saved."""
    groups: list[list[fx.Node]] = []
    before: object = None
    for node in backward.nodes:
        if not G.is_wait_reload(node):
            continue
        region = region_of_reload(node.all_input_nodes[0])
        if region is None or region != before:
            groups.append([])
        groups[-1].append(node)
        before = region
    return groups


def _gather_kept(groups: Sequence[Sequence[fx.Node]]) -> None:
    """Wait for all that a kept region saved before its gradients begin, so that reloads have the region before."""
    for group in groups:
        for wait in reversed(group[1:]):
            reload = wait.all_input_nodes[0]
            tag = G.tag(reload.all_input_nodes[0])
            if tag is not None and tag.kind is G.Kind.KEPT:
                group[0].append(wait)
                group[0].prepend(reload)
