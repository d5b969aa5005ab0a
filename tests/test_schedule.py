"""The backward recomputes a region when its gradient is there, also after Inductor has ordered the graph anew."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn

import fxckpt
from fxckpt import graph as G
from fxckpt.rewrite.schedule import start_recomputes, weights_first
from tests.helpers import DEVICE, assert_close, measured, train_step
from tests.situations.models import Residual, stack

aten = torch.ops.aten


class Branches(nn.Module):
    """Three readers of the input, so that its gradient comes in four parts, then a wide layer."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.branches = nn.ModuleList(nn.Linear(d, d, bias=False) for _ in range(3))
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b, c = (branch(x) for branch in self.branches)
        x = self.norm(x + torch.tanh(a) * torch.sigmoid(b) * torch.sin(c))
        return x + self.down(nn.functional.gelu(self.up(x)))


class TiedModel(nn.Module):
    """An embedding that is the head's weight too: its gradient comes at the backward's beginning and at its end."""

    def __init__(self, d: int = 32, vocabulary: int = 256, depth: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, d)
        self.blocks = nn.ModuleList(Branches(d) for _ in range(depth))
        self.eager_checkpoint = False

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.embedding(ids)
        for block in self.blocks:
            h = torch.utils.checkpoint.checkpoint(block, h, use_reentrant=False) if self.eager_checkpoint else block(h)
        logits = h @ self.embedding.weight.t()
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def tied() -> tuple[TiedModel, dict[str, Any]]:
    torch.manual_seed(0)
    return TiedModel().to(DEVICE), {"ids": torch.randint(0, 256, (4, 128), device=DEVICE)}


def starts(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if G.is_order(n)]


@pytest.mark.parametrize("offload", [False, True])
def test_each_region_waits_for_the_gradient_alone(offload: bool) -> None:
    model, batch = stack(lambda: Residual(8))
    t = fxckpt.transform(model, layers=Residual, offload=offload, verify=True)
    t(**batch).backward()
    (record,) = fxckpt.graphs(t)
    found = (
        [n for n in record.backward.graph.nodes if G.is_wait_reload(n)] if offload else starts(record.backward.graph)
    )
    stem = "wait_reload" if offload else "start"
    assert [n.name for n in found] == [f"{stem}_blocks_{i}_input" for i in (3, 2, 1, 0)][: len(found)]
    assert len(found) >= 3  # the first block may start from an input of the graph
    order = {n: i for i, n in enumerate(record.backward.graph.nodes)}
    for node in found:
        value, gradients = node.args[0], G.waits_for(node)
        readers = [u for u in value.users if u is not node and value not in G.waits_for(u)]
        assert min(order[u] for u in readers) > order[node]
        assert [G.tensor(g).shape for g in gradients] == [G.tensor(value).shape]


class Wide(nn.Module):
    """A layer whose second half reads eight times what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


def test_the_gradient_of_a_weight_comes_before_that_of_its_wide_input() -> None:
    model, batch = stack(Wide)
    t = fxckpt.transform(model, layers=Wide, verify=True)
    t(**batch).backward()
    (record,) = fxckpt.graphs(t)
    order = {n: i for i, n in enumerate(record.backward.graph.nodes)}
    waits = [n for n in order if n.name.startswith("wait_")]
    assert len(waits) == 4
    for node in waits:
        incoming, (weight,) = node.args
        product = next(n for n in order if n.name == node.name.removeprefix("wait_"))
        assert order[weight] < order[node] < order[product]
        assert {G.tensor(weight).shape, G.tensor(product).shape} == {(8, 64), (5, 64)}
        assert all(G.view_base(n) is incoming or n.op == "placeholder" or G.is_view(n) for n in product.all_input_nodes)


def backward_of_a_linear_layer(viewed_first: bool) -> fx.Graph:
    """The gradient of the input, perhaps a view of it, the gradient of the weight, and a reader of the former."""

    def value(node: fx.Node, *shape: int) -> fx.Node:
        G.set_value(node, torch.empty(shape, device="meta"))
        return node

    graph = fx.Graph()
    saved, weight = value(graph.placeholder("saved"), 5, 64), value(graph.placeholder("primals_1"), 8, 64)
    incoming = value(graph.placeholder("tangents_1"), 5, 8)
    wide = value(graph.call_function(aten.exp.default, (saved,)), 5, 64)
    G.set_tag(wide, G.Tag(G.Kind.INTERIOR, (0,)))
    of_input = value(graph.call_function(aten.mm.default, (incoming, weight)), 5, 64)
    seen = value(graph.call_function(aten.view.default, (of_input, [5, 64])), 5, 64) if viewed_first else of_input
    turned = value(graph.call_function(aten.t.default, (incoming,)), 8, 5)
    of_weight = value(graph.call_function(aten.mm.default, (turned, wide)), 8, 64)
    graph.output((of_weight, value(graph.call_function(aten.neg.default, (seen,)), 5, 64)))
    return graph


@pytest.mark.parametrize("viewed_first", [False, True])
def test_a_product_moves_only_where_nothing_reads_it_before(viewed_first: bool) -> None:
    graph = backward_of_a_linear_layer(viewed_first)
    assert weights_first(graph) == (0 if viewed_first else 1)
    graph.lint()


def test_narrow_inputs_wait_for_nothing() -> None:
    model, batch = stack(Square)
    t = fxckpt.transform(model, layers=Square)
    t(**batch).backward()
    (record,) = fxckpt.graphs(t)
    assert not any(n.name.startswith("wait_") for n in record.backward.graph.nodes)


class Square(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(torch.tanh(self.a(x)))


def test_inserted_again_each_value_has_a_second_node_that_says_the_same() -> None:
    model, batch = stack(lambda: Residual(8))
    t = fxckpt.transform(model, layers=Residual)
    t(**batch).backward()
    (record,) = fxckpt.graphs(t)
    before = [n.args for n in starts(record.backward.graph)]
    assert start_recomputes(record.backward.graph) == len(before)
    after = [n.args for n in starts(record.backward.graph)]
    assert [a for a in after if after.count(a) == 2] == after


def test_kept_layers_have_none() -> None:
    model, batch = stack(lambda: Residual(8))
    t = fxckpt.transform(model, layers=Residual, policy=lambda layer: False)
    t(**batch).backward()
    assert not any(starts(r.backward.graph) for r in fxckpt.graphs(t))


def peak(run: Any, model: nn.Module, batch: dict[str, Any]) -> int:
    def step() -> None:
        model.zero_grad(set_to_none=True)
        run(**batch).backward()

    step()
    step()
    model.zero_grad(set_to_none=True)
    return measured(step)[1].peak


def test_compiled_it_needs_no_more_than_eager_checkpointing() -> None:
    eager, batch = tied()
    eager.eager_checkpoint = True
    model, _ = tied()
    t = fxckpt.transform(model, layers=Branches)
    run = torch.compile(t)
    want = train_step(eager, eager, batch)
    assert_close(train_step(run, model, batch), want)
    ours, theirs = peak(run, model, batch), peak(eager, eager, batch)
    assert ours <= theirs, (ours, theirs)


@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
def test_a_second_backward_through_it(backend: str | None) -> None:
    """The start node claims to change what is saved, and does not."""
    model, batch = stack(lambda: Residual(8))
    t = fxckpt.transform(model, layers=Residual)
    run = torch.compile(t, backend=backend) if backend else t
    loss = run(**batch)
    loss.backward(retain_graph=True)
    once = {n: p.grad.clone() for n, p in model.named_parameters()}
    loss.backward()
    twice = {n: p.grad for n, p in model.named_parameters()}
    torch.testing.assert_close(twice, {n: 2 * g for n, g in once.items()}, rtol=0, atol=0)
