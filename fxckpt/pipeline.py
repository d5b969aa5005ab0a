"""The one ordered list of passes.

    names          capture   values that the model's author named
    regions        capture   find the calls of boundary layers
    take_over      rewrite   layers whose own checkpointing is on lose the tags it left
    masks          rewrite   attention whose mask is known to be the causal one, or none, is told so
    plan           decide    tag values: interior, boundary, free
    copy_inputs    rewrite   recomputed values read inputs as they were before the step changed them
    hold           rewrite   let the partitioner save boundary values it would not save when told to
    tags           rewrite   turn our tags into the partitioner's
    partition      rewrite   PyTorch's min-cut partitioner: joint graph -> forward graph, backward graph
    release        rewrite   undo "hold"; what is saved is read, and in the order that AOTAutograd expects
    transfers      rewrite   offload in the forward, reload in the backward
    rematerialize  rewrite   where a compiler fuses, gradients make cheap values anew that would be held for them
    schedule       rewrite   the backward recomputes a region when it is the region's turn
    overlap        rewrite   transfers start early enough, and no more of them than allowed are under way

Each pass works on the graphs in place, states what it needs and leaves in its docstring, and is followed by the
verifier when ``verify=True`` and by a numbered dump when ``debug_dir`` is set.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import fx

from fxckpt import graph as G
from fxckpt.capture.names import take_names
from fxckpt.capture.regions import BoundaryLayer, Region, find_regions
from fxckpt.config import Settings
from fxckpt.decide.clock import Clock, find_clock
from fxckpt.decide.graph_plan import GraphPlan, make_plan
from fxckpt.decide.policy import Treatment
from fxckpt.record import Frame, GraphRecord
from fxckpt.rewrite.bases import save_bases
from fxckpt.rewrite.masks import drop_known_masks
from fxckpt.rewrite.obey import (
    copy_changed_inputs,
    describe_random,
    drop_foreign_tags,
    drop_unread,
    hold_boundaries,
    order_saved,
    random_operators,
    release_boundaries,
    tell_partitioner,
)
from fxckpt.rewrite.offload import insert_transfers
from fxckpt.rewrite.overlap import bytes_alive, order_offloads, order_reloads
from fxckpt.rewrite.rematerialize import for_each_region, for_gradients
from fxckpt.rewrite.schedule import start_recomputes, weights_first
from fxckpt.rewrite.verify import verify_joint, verify_partition
from fxckpt.rewrite.verify_transfers import Limits
from fxckpt.torch_private import code_on_demand, saving_least, snapshot, taken_as_random

Partition = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]
Dump = Callable[[str, str, "fx.GraphModule | None"], None]
"""``dump(pass name, which graph, graph module)``."""


@dataclass(frozen=True)
class Request:
    """What a captured graph is to become.

    Attributes:
        settings: what the user asked for.
        layers: boundary layers by the ``id()`` of their module.
        treatments: what becomes of each, by name.
        parameters: for each of the graph's inputs, whether it is a parameter.
        mutated: for each of the graph's inputs, whether the step changes it.
        given: for each of the graph's inputs, whether it is an activation that was made before the graph.
        fuses: whether a compiler that fuses pointwise operators takes the graphs.
        around: the boundary layers whose call the whole graph is part of, outermost first.
        frame: the Python frame it was captured from.
        dump: writes a graph for debugging, or None.
    """

    settings: Settings
    layers: Mapping[int, BoundaryLayer]
    treatments: Mapping[str, Treatment]
    parameters: tuple[bool, ...] = ()
    mutated: tuple[bool, ...] = ()
    given: tuple[bool, ...] = ()
    fuses: bool = False
    around: tuple[BoundaryLayer, ...] = ()
    frame: Frame = field(default_factory=Frame)
    dump: Dump | None = None


@dataclass
class _Run:
    """The values passed from pass to pass."""

    request: Request
    joint: fx.GraphModule
    inputs: Any
    kwargs: dict[str, Any]
    partition: Partition
    regions: list[Region] = field(default_factory=list)
    plan: GraphPlan = field(default_factory=GraphPlan)
    forward: fx.GraphModule | None = None
    backward: fx.GraphModule | None = None
    transfers: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    ceiling: int | None = None

    @property
    def num_forward_outputs(self) -> int:
        return int(self.kwargs["num_fwd_outputs"])

    @property
    def spares(self) -> bool:
        """Whether pointwise values may be computed once more: something is recomputed, and a compiler fuses them."""
        return self.request.fuses and self.plan.recomputes

    def differentiated(self) -> set[fx.Node]:
        """Inputs that get a gradient: parameters, and activations of an earlier graph."""
        inputs = [n for n in G.placeholders(self.joint.graph) if not G.is_tangent(n)]
        gradients = G.output_args(self.joint.graph)[self.num_forward_outputs :]
        return {n for n, gradient in zip(inputs, gradients, strict=False) if gradient is not None}

    def inputs_where(self, flags: tuple[bool, ...]) -> list[fx.Node]:
        nodes = [n for n in G.placeholders(self.joint.graph) if not G.is_tangent(n)]
        return [n for n, flag in zip(nodes, flags, strict=False) if flag]


def _names(run: _Run) -> None:
    take_names(run.joint.graph)


def _regions(run: _Run) -> None:
    run.regions = find_regions(run.joint.graph, run.request.layers, run.request.around)


def _take_over(run: _Run) -> None:
    drop_foreign_tags(run.regions)


def _masks(run: _Run) -> None:
    if run.regions:  # a graph without layers stays what it is
        drop_known_masks(run.joint.graph)


def _plan(run: _Run) -> None:
    run.plan = make_plan(
        run.joint.graph,
        run.regions,
        run.request.treatments,
        learned=set(run.inputs_where(run.request.parameters)) | run.differentiated(),
        given=set(run.inputs_where(run.request.given)),
        num_forward_outputs=run.num_forward_outputs,
    )


def _copy_inputs(run: _Run) -> None:
    copy_changed_inputs(run.joint.graph, run.inputs_where(run.request.mutated))


def _hold(run: _Run) -> None:
    hold_boundaries(run.joint.graph)


def _release(run: _Run) -> None:
    assert run.forward is not None and run.backward is not None
    release_boundaries(run.forward.graph, run.backward.graph)
    describe_random(run.forward.graph, run.backward.graph)
    drop_unread(run.forward.graph, run.backward.graph, run.num_forward_outputs)
    order_saved(run.forward.graph, run.backward.graph, run.num_forward_outputs)


def _tags(run: _Run) -> None:
    tell_partitioner(run.joint.graph)


def _partition(run: _Run) -> None:
    random = random_operators(run.joint.graph)
    with taken_as_random(random), saving_least(run.spares), code_on_demand():
        run.forward, run.backward = run.partition(run.joint, run.inputs, **run.kwargs)


def _transfers(run: _Run) -> None:
    assert run.forward is not None and run.backward is not None
    offload = run.request.settings.offload
    if offload is not None:
        save_bases(run.forward, run.backward, run.num_forward_outputs)
        names = [r.name for r in run.regions]
        given = {n.name for n in run.inputs_where(run.request.given)}
        run.transfers = insert_transfers(
            run.forward, run.backward, run.num_forward_outputs, names, offload.place, given
        )


def _rematerialize(run: _Run) -> None:
    assert run.backward is not None
    if run.spares:
        for_each_region(run.backward.graph)
        for_gradients(run.backward.graph)


def _schedule(run: _Run) -> None:
    assert run.backward is not None
    weights_first(run.backward.graph)
    start_recomputes(run.backward.graph)


def _overlap(run: _Run) -> None:
    assert run.forward is not None and run.backward is not None
    offload = run.request.settings.offload
    if offload is not None and run.transfers:
        order_offloads(run.forward.graph, offload.max_in_flight)
        inputs, clock = G.placeholders(run.forward.graph), _clock(run)
        names = {n.name for n in inputs}
        if clock is None:
            order_reloads(run.backward.graph, offload.prefetch, names)
            return
        peak = max(G.bytes_alive(list(run.forward.graph.nodes), set(inputs)))
        if run.request.settings.verify:
            in_turn = G.copy_graph(run.backward.graph)
            order_reloads(in_turn, offload.prefetch, names)
            run.ceiling = max(peak, *bytes_alive(in_turn, names))
        order_reloads(run.backward.graph, offload.prefetch, names, clock, peak)


def _clock(run: _Run) -> Clock | None:
    """How fast transfers are, where that is known."""
    assert run.backward is not None
    offload = run.request.settings.offload
    reload = next((n for n in run.backward.graph.nodes if G.is_reload(n)), None)
    val = None if reload is None else G.tensor(reload)
    return None if offload is None or val is None else find_clock(val.device, offload.place)


PASSES: tuple[tuple[str, Callable[[_Run], None]], ...] = (
    ("names", _names),
    ("regions", _regions),
    ("take_over", _take_over),
    ("masks", _masks),
    ("plan", _plan),
    ("copy_inputs", _copy_inputs),
    ("hold", _hold),
    ("tags", _tags),
    ("partition", _partition),
    ("release", _release),
    ("transfers", _transfers),
    ("rematerialize", _rematerialize),
    ("schedule", _schedule),
    ("overlap", _overlap),
)


def rewrite(
    partition: Partition,
    joint: fx.GraphModule,
    inputs: Any,
    kwargs: dict[str, Any],
    request: Request,
    captured: fx.GraphModule | None = None,
) -> tuple[fx.GraphModule, fx.GraphModule, GraphRecord]:
    """Run all passes on a joint graph.

    Args:
        partition: PyTorch's partitioner, ``(joint, inputs, **kwargs) -> (forward, backward)``.
        joint: the joint graph; changed in place.
        inputs: its inputs, for the partitioner.
        kwargs: the partitioner's options; ``num_fwd_outputs`` is among them.
        request: what is to be done.
        captured: a copy of `joint` as it is, for the record, where there is one; else one is made.

    Returns:
        Forward graph, backward graph, and the record of what was done (with copies of both).

    Raises:
        VerifyError: with ``verify=True``, a pass broke an invariant.
    """
    run = _Run(request, joint, inputs, dict(kwargs), partition)
    captured = captured or snapshot(joint)
    dump = partial(_dump, run)
    dump("captured")
    for name, step in PASSES:
        start = time.perf_counter()
        step(run)
        run.seconds[name] = time.perf_counter() - start
        if request.settings.verify:
            _verify(run, name)
        dump(name)
    assert run.forward is not None and run.backward is not None
    run.forward.recompile()
    run.backward.recompile()
    record = GraphRecord(
        snapshot(run.forward),
        snapshot(run.backward),
        captured,
        tuple(run.regions),
        run.plan,
        run.num_forward_outputs,
        tuple(run.transfers),
        run.seconds,
        request.parameters,
        request.frame,
        run.kwargs,
    )
    return run.forward, run.backward, record


def _verify(run: _Run, after: str) -> None:
    where = f"after pass {after!r}"
    if run.forward is None or run.backward is None:
        given = run.inputs_where(run.request.given)
        verify_joint(run.joint.graph, where, _recomputed(run), given, told="tags" in run.seconds)
    else:
        offload = run.request.settings.offload if "overlap" in run.seconds else None
        limits = None
        if offload is not None:
            prefetch = offload.prefetch if not offload.prefetch or run.ceiling is None else None
            inputs = [n.name for n in G.placeholders(run.forward.graph)]
            limits = Limits(offload.max_in_flight, prefetch, run.ceiling, inputs)
        verify_partition(run.forward, run.backward, run.num_forward_outputs, where, limits)


def _recomputed(run: _Run) -> dict[fx.Node, str]:
    """The nodes of recomputed regions, each with its region's name; none before they are planned."""
    if "plan" not in run.seconds:
        return {}
    chosen = run.request.treatments
    regions = [r for r in run.regions if chosen.get(r.layer.name, Treatment.KEEP).recompute]
    return {node: region.name for region in regions for node in region.nodes}


def _dump(run: _Run, after: str) -> None:
    if run.request.dump is None:
        return
    if run.forward is None:
        run.request.dump(after, "joint", run.joint)
    else:
        run.request.dump(after, "forward", run.forward)
        run.request.dump(after, "backward", run.backward)
