"""The graph verifier is trusted because it catches passes that are broken on purpose.

Each test runs the real pipeline with one pass followed, or replaced, by one that breaks an invariant.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.utils.checkpoint import CheckpointPolicy

import fxckpt
from fxckpt import graph as G
from fxckpt import pipeline
from tests.helpers import DEVICE, boundary_layers
from tests.situations.models import Residual, Stack
from tests.zoo import build, get_loss

aten = torch.ops.aten
Change = Callable[[Any], None]


class DropoutBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.drop = nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(torch.tanh(self.a(x)))


class Stemmed(Stack):
    """A stack whose first block reads a computed value, not an input of the graph."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__(blocks)
        self.stem = nn.Linear(8, 8)

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return super().hidden(self.stem(x))


class Masked(nn.Module):
    """Blocks that read a mask made from nothing, and hidden states that are a view of what was computed."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(MaskedBlock() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, mask = self.stem(x).t(), torch.ones(8, 4, device=x.device).tril()
        for block in self.blocks:
            h = block(h, mask)
        return h.square().mean()


class MaskedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.a(x * mask)) * mask


def residuals() -> nn.Module:
    return Stemmed([Residual(8) for _ in range(3)])


def dropouts() -> nn.Module:
    return Stemmed([DropoutBlock() for _ in range(3)])


def step(make: Callable[[], nn.Module], offload: bool = True) -> nn.Module:
    torch.manual_seed(0)
    model = make().to(DEVICE)
    t = fxckpt.transform(model, every_n=2, offload=offload, layers="blocks.*", verify=True)
    t(torch.randn(4, 8, device=DEVICE)).backward()
    return t


def sabotaged(
    monkeypatch: pytest.MonkeyPatch,
    after: str,
    change: Change,
    make: Callable[[], nn.Module] = residuals,
    offload: bool = True,
) -> str:
    """The message of the error that a step raises when `change` follows the pass `after`."""
    passes = list(pipeline.PASSES)
    place = [name for name, _ in passes].index(after)
    passes.insert(place + 1, ("sabotage", change))
    monkeypatch.setattr(pipeline, "PASSES", tuple(passes))
    with pytest.raises(fxckpt.VerifyError) as info:
        step(make, offload)
    message = str(info.value)
    assert message.startswith("after pass 'sabotage': ")
    return message


# ---- finding and changing nodes ----------------------------------------------------------------------------------


def tagged(graph: fx.Graph, kind: G.Kind, op: str = "call_function") -> list[fx.Node]:
    return [n for n in graph.nodes if n.op == op and (t := G.tag(n)) is not None and t.kind is kind]


def by_name(graph: fx.Graph, name: str) -> fx.Node:
    return next(n for n in graph.nodes if n.name == name)


def calls(graph: fx.Graph, op: Any) -> list[fx.Node]:
    return [n for n in graph.nodes if n.op == "call_function" and op in (n.target, G.overload_packet(n))]


def offloads(run: Any) -> list[fx.Node]:
    return [n for n in run.forward.graph.nodes if G.is_offload(n)]


def reloads(run: Any) -> list[fx.Node]:
    return [n for n in run.backward.graph.nodes if G.is_reload(n)]


def add_saved(run: Any, node: fx.Node) -> fx.Node:
    """Save one more value: an output of the forward, an input of the backward, which is given back."""
    outputs = G.output_args(run.forward.graph)
    G.output_node(run.forward.graph).args = ((*outputs, node),)
    graph = run.backward.graph
    for again in [n for n in graph.nodes if n.name == node.name]:
        again._rename(f"{node.name}_again")
    tangent = next(n for n in G.placeholders(graph) if G.is_tangent(n))
    with graph.inserting_before(tangent):
        taken = graph.placeholder(node.name)
    taken.name = node.name
    G.set_value(taken, G.value(node))
    return taken


def saved_interior(run: Any) -> fx.Node:
    """An interior value of the forward graph, now saved."""
    node = calls(run.forward.graph, aten.tanh)[0]
    assert G.tag(node).kind is G.Kind.INTERIOR
    add_saved(run, node)
    return node


def offload_of(run: Any, source: fx.Node) -> None:
    """Move `source` away and back, as the transfer pass would."""
    graph, name, ops = run.forward.graph, "extra", torch.ops.fxckpt
    with graph.inserting_after(source):
        made = graph.call_function(ops.offload.default, (source, name, "", "cpu", False, []))
    G.set_value(made, G.value(source))
    with graph.inserting_before(G.output_node(graph)):
        graph.call_function(ops.wait_offload.default, (made, source, []))
    handle = add_saved(run, made)
    first = next(n for n in run.backward.graph.nodes if n.op != "placeholder")
    with run.backward.graph.inserting_before(first):
        back = run.backward.graph.call_function(
            ops.reload.default, (handle, torch.device(DEVICE), name, None, None, [])
        )
        run.backward.graph.call_function(ops.wait_reload.default, (back, handle, []))


def remove_reload(run: Any) -> fx.Node:
    """Take a reload and its wait out of the backward; the handle it read."""
    reload = reloads(run)[0]
    (wait,) = (n for n in reload.users if G.is_wait_reload(n))
    run.backward.graph.erase_node(wait)
    with run.backward.graph.inserting_before(reload):
        zeros = run.backward.graph.call_function(aten.zeros.default, ([4, 8],))
    reload.replace_all_uses_with(zeros)
    run.backward.graph.erase_node(reload)
    return reload.args[0]


def wait_of(start: fx.Node) -> fx.Node:
    """The wait for an offload or a reload."""
    return next(n for n in start.users if (G.is_wait_offload(n) or G.is_wait_reload(n)) and n.args[0] is start)


# ---- joint graph -------------------------------------------------------------------------------------------------


def test_an_unbroken_run_passes_with_every_kind_of_tag() -> None:
    kinds = set()
    for make in (residuals, dropouts, Masked):
        (record,) = fxckpt.graphs(step(make))
        kinds |= {t.kind for n in record.forward.graph.nodes if (t := G.tag(n)) is not None}
        assert len(record.transfers) == len(offloads(record)) == (1 if make is Masked else 2)
    assert kinds >= {G.Kind.INTERIOR, G.Kind.BOUNDARY, G.Kind.FREE}


@pytest.mark.parametrize(
    ("name", "dynamic"),
    [("plain_kwargs_block", True), ("bert", False), ("plain_conv_tower_bn", True), ("longt5_tglobal", False)],
)
def test_real_models_pass(name: str, dynamic: bool) -> None:
    model, batch = build(name, dropout=True)
    t = fxckpt.transform(model, every_n=2, offload=True, layers=boundary_layers(name, model), verify=True)
    run = torch.compile(t, backend="aot_eager", dynamic=True) if dynamic else t
    get_loss(run(**batch)).backward()


def test_a_tag_on_a_backward_node(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(run: Any) -> None:
        node = calls(run.joint.graph, aten.tanh_backward)[0]
        G.set_tag(node, G.Tag(G.Kind.INTERIOR, (0,)))

    message = sabotaged(monkeypatch, "plan", change)
    assert "tanh_backward" in message and "no forward value" in message and "'sabotage'" in message


def test_a_tag_on_an_input(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(run: Any) -> None:
        G.set_tag(G.placeholders(run.joint.graph)[0], G.Tag(G.Kind.BOUNDARY, (0,)))

    assert "primals_1 carries the tag boundary" in sabotaged(monkeypatch, "plan", change)


def test_a_value_without_a_tag(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(run: Any) -> None:
        G.clear_tag(calls(run.joint.graph, aten.tanh)[0])

    message = sabotaged(monkeypatch, "plan", change)
    assert "tanh, inside recomputed region blocks.0, has no tag" in message


def test_a_tag_that_the_partitioner_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(run: Any) -> None:
        G.clear_policy(calls(run.joint.graph, aten.tanh)[0])

    assert "tanh is interior and yet not marked for recompute" in sabotaged(monkeypatch, "tags", change)


def test_an_interior_value_marked_for_saving(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(run: Any) -> None:
        G.set_policy(calls(run.joint.graph, aten.tanh)[0], CheckpointPolicy.MUST_SAVE)

    assert "tanh is interior and yet not marked for recompute" in sabotaged(monkeypatch, "tags", change)


@pytest.mark.parametrize("policy", [None, CheckpointPolicy.MUST_RECOMPUTE])
def test_a_boundary_not_marked_for_saving(monkeypatch: pytest.MonkeyPatch, policy: CheckpointPolicy | None) -> None:
    def change(run: Any) -> None:
        node = tagged(run.joint.graph, G.Kind.BOUNDARY)[0]
        if policy is None:
            G.clear_policy(node)
        else:
            G.set_policy(node, policy)

    assert "is a boundary and yet not marked for saving" in sabotaged(monkeypatch, "tags", change)


def test_the_partitioner_is_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = tuple((name, (lambda run: None) if name == "tags" else run) for name, run in pipeline.PASSES)
    monkeypatch.setattr(pipeline, "PASSES", passes)
    with pytest.raises(fxckpt.VerifyError, match=r"after pass 'tags': .* not marked for"):
        step(residuals)


def test_a_joint_graph_that_is_malformed(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(run: Any) -> None:
        node = calls(run.joint.graph, aten.tanh)[0]
        next(iter(node.users)).append(node)

    message = sabotaged(monkeypatch, "plan", change)
    assert "not well formed" in message and "tanh" in message


# ---- what is saved -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", ["partition", "release", "transfers"])
def test_an_interior_value_is_saved(monkeypatch: pytest.MonkeyPatch, after: str) -> None:
    message = sabotaged(monkeypatch, after, saved_interior)
    assert "tanh, inside recomputed region (0,), is saved for backward" in message


def test_an_interior_value_is_saved_and_its_policy_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(run: Any) -> None:
        G.clear_policy(saved_interior(run))

    assert "is saved for backward" in sabotaged(monkeypatch, "partition", change)


def test_a_free_value_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(run: Any) -> None:
        node = calls(run.forward.graph, aten.tril)[0]
        assert G.tag(node) == G.Tag(G.Kind.FREE)
        add_saved(run, node)

    message = sabotaged(monkeypatch, "partition", change, make=Masked)
    assert "tril can be recomputed from graph inputs, and yet is saved" in message


def test_the_backward_does_not_take_a_saved_value(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(run: Any) -> None:
        handle = reloads(run)[0].args[0]
        remove_reload(run)
        run.backward.graph.erase_node(handle)

    message = sabotaged(monkeypatch, "transfers", change)
    assert "the forward saves" in message and "offload_blocks_" in message


def test_saved_values_change_places(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(run: Any) -> None:
        outputs = G.output_args(run.forward.graph)
        first, second = (i for i, n in enumerate(outputs) if isinstance(n, fx.Node) and G.is_offload(n))
        outputs[first], outputs[second] = outputs[second], outputs[first]
        G.output_node(run.forward.graph).args = (tuple(outputs),)

    message = sabotaged(monkeypatch, "transfers", change)
    assert "offload_blocks_2_input stands where the backward takes offload_blocks_0_input" in message


def test_a_boundary_that_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's partitioner does not save results of a tuple when told to: without "hold" the regions run in a row."""
    model, batch = build("bert")
    monkeypatch.setattr(pipeline, "PASSES", tuple(p for p in pipeline.PASSES if p[0] not in ("hold", "release")))
    t = fxckpt.transform(model, every_n=1, offload=False, verify=True)
    with pytest.raises(fxckpt.VerifyError, match=r"getitem\w* is a boundary and yet computed again in the backward"):
        t(**batch)


# ---- transfers ---------------------------------------------------------------------------------------------------


def test_a_graph_input_is_offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    message = sabotaged(monkeypatch, "transfers", lambda run: offload_of(run, G.placeholders(run.forward.graph)[0]))
    assert " offloads primals_1, an input of the graph" in message


def test_a_view_of_a_parameter_is_offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(run: Any) -> None:
        offload_of(run, next(n for n in calls(run.forward.graph, aten.t)))

    assert "an input of the graph" in sabotaged(monkeypatch, "transfers", change)


def test_an_output_is_offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(run: Any) -> None:
        offload_of(run, G.output_args(run.forward.graph)[0])

    assert "which an output of the graph keeps alive" in sabotaged(monkeypatch, "transfers", change)


def test_one_storage_is_offloaded_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(run: Any) -> None:
        source = offloads(run)[0].args[0]
        with run.forward.graph.inserting_after(source):
            view = run.forward.graph.call_function(aten.t.default, (source,))
        G.set_value(view, G.value(source))
        offload_of(run, view)

    message = sabotaged(monkeypatch, "transfers", change)
    assert "the storage of" in message and "is offloaded twice" in message


def test_an_offloaded_value_stays_on_the_device_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(run: Any) -> None:
        add_saved(run, offloads(run)[0].args[0])

    assert "is offloaded and saved on the device as well" in sabotaged(monkeypatch, "transfers", change)


def test_a_handle_is_read_in_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(run: Any) -> None:
        offload = offloads(run)[0]
        with run.forward.graph.inserting_after(offload):
            run.forward.graph.call_function(aten.neg.default, (offload,))

    message = sabotaged(monkeypatch, "transfers", change)
    assert "offload_blocks_0_input must go to the backward once, and nowhere else" in message


def test_a_handle_has_a_second_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(run: Any) -> None:
        reload = reloads(run)[0]
        with run.backward.graph.inserting_after(reload):
            run.backward.graph.call_function(aten.neg.default, (reload.args[0],))

    assert "offload_blocks_2_input must be read by reload_blocks_2_input and its wait only" in sabotaged(
        monkeypatch, "transfers", change
    )


def test_a_reload_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(run: Any) -> None:
        remove_reload(run)

    message = sabotaged(monkeypatch, "transfers", change)
    assert "each offload needs one reload of its name; wrong: ['blocks_" in message


def test_a_name_is_used_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(run: Any) -> None:
        for node in offloads(run):
            node.update_arg(1, "blocks_0_input")
        for node in reloads(run):
            node.update_arg(2, "blocks_0_input")

    assert "wrong: ['blocks_0_input']" in sabotaged(monkeypatch, "transfers", change)


def test_a_reload_of_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(run: Any) -> None:
        reloads(run)[0].update_arg(2, "blocks_9_input")

    assert "blocks_9_input" in sabotaged(monkeypatch, "transfers", change)


def test_a_reload_that_nothing_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(run: Any) -> None:
        reload = reloads(run)[0]
        with run.backward.graph.inserting_after(reload):
            zeros = run.backward.graph.call_function(aten.zeros.default, ([4, 8],))
        reload.replace_all_uses_with(zeros, delete_user_cb=lambda user: not G.is_wait_reload(user))

    assert "is read by nothing" in sabotaged(monkeypatch, "transfers", change)


def test_a_reload_of_another_type(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(run: Any) -> None:
        reload = reloads(run)[0]
        G.set_value(reload, G.tensor(reload).double())

    assert "gives back" in sabotaged(monkeypatch, "transfers", change)


def test_a_reload_with_other_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(run: Any) -> None:
        reload = reloads(run)[0]
        G.set_value(reload, G.tensor(reload).t().contiguous().t())

    assert "gives back other strides" in sabotaged(monkeypatch, "transfers", change)


@pytest.mark.parametrize("start", [offloads, reloads])
def test_a_transfer_that_nobody_waits_for(monkeypatch: pytest.MonkeyPatch, start: Callable[[Any], Any]) -> None:
    def change(run: Any) -> None:
        wait = wait_of(start(run)[0])
        wait.graph.erase_node(wait)

    assert "must be waited for once" in sabotaged(monkeypatch, "overlap", change)


@pytest.mark.parametrize("start", [offloads, reloads])
def test_a_transfer_that_is_waited_for_twice(monkeypatch: pytest.MonkeyPatch, start: Callable[[Any], Any]) -> None:
    def change(run: Any) -> None:
        wait = wait_of(start(run)[0])
        with wait.graph.inserting_after(wait):
            wait.graph.node_copy(wait)

    assert "must be waited for once" in sabotaged(monkeypatch, "overlap", change)


def test_a_wait_that_lets_another_activation_go(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(run: Any) -> None:
        first, second = offloads(run)
        wait_of(first).update_arg(1, second.args[0])

    assert "must be waited for once, with addmm, in the forward" in sabotaged(monkeypatch, "overlap", change)


def test_an_activation_is_read_after_it_was_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(run: Any) -> None:
        offloads(run)[0].append(wait_of(offloads(run)[0]))

    message = sabotaged(monkeypatch, "transfers", change)
    assert "reads addmm after wait_offload_blocks_0_input let it go" in message


def test_a_view_of_an_activation_is_read_after_it_was_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(run: Any) -> None:
        graph, source = run.forward.graph, offloads(run)[0].args[0]
        with graph.inserting_after(source):
            view = graph.call_function(aten.t.default, (source,))
        with graph.inserting_before(G.output_node(graph)):
            graph.call_function(aten.neg.default, (view,))

    assert "neg_default reads addmm after" in sabotaged(monkeypatch, "transfers", change)


def test_an_activation_is_read_before_it_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(run: Any) -> None:
        wait = wait_of(reloads(run)[0])
        G.output_node(run.backward.graph).prepend(wait)

    assert "before wait_reload_blocks_2_input" in sabotaged(monkeypatch, "overlap", change)


def test_too_many_offloads_are_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(run: Any) -> None:
        for offload in offloads(run):
            G.output_node(run.forward.graph).prepend(wait_of(offload))

    five = lambda: Stemmed([Residual(8) for _ in range(5)])  # noqa: E731
    message = sabotaged(monkeypatch, "overlap", change, five)
    assert "at offload_blocks_4_input more than 2 offloads are under way" in message


def test_too_many_reloads_are_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(run: Any) -> None:
        first = next(n for n in run.backward.graph.nodes if n.op != "placeholder")
        for reload in reloads(run):
            reload.update_arg(5, [])
            first.prepend(reload)

    five = lambda: Stemmed([Residual(8) for _ in range(5)])  # noqa: E731
    message = sabotaged(monkeypatch, "overlap", change, five)
    assert "reloads for more than 1 regions are under way" in message


# ---- state -------------------------------------------------------------------------------------------------------


def recomputed_node(run: Any) -> fx.Node:
    return calls(run.backward.graph, aten.tanh)[0]


def test_a_recomputed_node_draws_new_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(run: Any) -> None:
        node = recomputed_node(run)
        with run.backward.graph.inserting_after(node):
            drawn = run.backward.graph.call_function(aten.rand_like.default, (node,), name="drawn_again")
        G.copy_provenance(node, drawn)

    message = sabotaged(monkeypatch, "transfers", change)
    assert "drawn_again draws new random numbers in the backward" in message


def test_the_partitioner_forgets_the_random_state(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(run: Any) -> None:
        for node in list(run.backward.graph.nodes):
            if getattr(node.target, "__name__", "") == "run_with_rng_state":
                with run.backward.graph.inserting_before(node):
                    plain = run.backward.graph.call_function(node.args[1], node.args[2:], dict(node.kwargs))
                plain.meta.update(node.meta)
                node.replace_all_uses_with(plain)
                run.backward.graph.erase_node(node)

    assert "draws new random numbers" in sabotaged(monkeypatch, "partition", change, make=dropouts)


@pytest.mark.parametrize("provenance", [True, False])
def test_a_recomputed_node_changes_state(monkeypatch: pytest.MonkeyPatch, provenance: bool) -> None:
    def change(run: Any) -> None:
        node = recomputed_node(run)
        with run.backward.graph.inserting_after(node):
            counted = run.backward.graph.call_function(aten.add_.Tensor, (node, 1), name="counted_again")
        if provenance:
            G.copy_provenance(node, counted)

    message = sabotaged(monkeypatch, "transfers", change)
    assert "counted_again changes state a second time in the backward" in message


@pytest.mark.parametrize("which", ["forward", "backward"])
def test_a_graph_that_is_malformed(monkeypatch: pytest.MonkeyPatch, which: str) -> None:
    def change(run: Any) -> None:
        node = calls(getattr(run, which).graph, aten.tanh)[0]
        next(iter(node.users)).append(node)

    message = sabotaged(monkeypatch, "partition", change)
    assert "not well formed" in message and "tanh" in message


# ---- order nodes ------------------------------------------------------------------------------------------------


def test_a_recompute_that_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(run: Any) -> None:
        node = next(n for n in run.backward.graph.nodes if G.is_order(n))
        value = node.args[0]
        reader = next(u for u in value.users if u is not node)
        reader.append(node)

    assert "before its recompute may start" in sabotaged(monkeypatch, "schedule", change, offload=False)


def test_an_order_node_that_something_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(run: Any) -> None:
        graph = run.backward.graph
        node = next(n for n in graph.nodes if G.is_order(n))
        with graph.inserting_after(node):
            graph.call_function(aten.neg.default, (node,))

    assert "nothing may read it" in sabotaged(monkeypatch, "schedule", change, offload=False)
