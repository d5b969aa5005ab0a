"""Under a compiler that fuses, gradients read values made anew rather than values held since the recompute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch import fx, nn
from torch.nn.functional import scaled_dot_product_attention, silu

import fxckpt
from fxckpt import graph as G
from fxckpt import pipeline
from fxckpt.record import GraphRecord
from fxckpt.rewrite.phases import find_gradients
from fxckpt.rewrite.rematerialize import for_each_region, for_gradients
from tests.helpers import DEVICE, assert_close, measured, train_step

aten = torch.ops.aten


class Gated(nn.Module):
    """A layer norm and a gated product of eight times its width."""

    def __init__(self, d: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.gate, self.up, self.down = nn.Linear(d, 8 * d), nn.Linear(d, 8 * d), nn.Linear(8 * d, d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.down(silu(self.gate(y)) * self.up(y))


class Stack(nn.Module):
    def __init__(self, layer: type[nn.Module], depth: int = 3, d: int = 32) -> None:
        super().__init__()
        self.first = nn.Linear(d, d)
        self.layers = nn.ModuleList(layer() for _ in range(depth))

    def forward(self, x: torch.Tensor, **extra: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, **extra)
        return x.square().mean()


def model_of(layer: type[nn.Module]) -> tuple[Stack, dict[str, Any]]:
    torch.manual_seed(0)
    return Stack(layer).to(DEVICE), {"x": torch.randn(2, 16, 32, device=DEVICE)}


def plain_record(layer: type[nn.Module], **extra: torch.Tensor) -> GraphRecord:
    """Graphs that no pass of this file has changed."""
    model, batch = model_of(layer)
    t = fxckpt.transform(model, layers=layer)
    t(**batch, **extra).backward()
    (record,) = fxckpt.graphs(t)
    return record


def copies(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if "_again" in n.name]


def test_plain_graphs_have_no_copies() -> None:
    assert not copies(plain_record(Gated).backward.graph)


def test_gradients_read_copies_of_pointwise_values() -> None:
    graph = plain_record(Gated).backward.graph
    recomputed = [n for n in graph.nodes if G.tag(n) and G.tag(n).kind is G.Kind.INTERIOR and n.op == "call_function"]
    activations = [n for n in recomputed if n.target is aten.silu.default]
    assert len(activations) == 3
    assert for_gradients(graph) > 0
    graph.lint()
    gradients = find_gradients(list(graph.nodes))
    for node in activations:
        assert not any(u in gradients for u in node.users)
    made = {n.target for n in copies(graph)}
    assert aten.silu.default in made and aten.mul.Tensor not in made  # the product is a weight's gradient's input early


def chain(held: bool) -> fx.Graph:
    """exp(product) is read by a recomputed node, and later by a gradient; `held`: the product is read then, too."""

    def value(node: fx.Node) -> fx.Node:
        G.set_value(node, torch.empty(8, 8, device="meta"))
        return node

    graph = fx.Graph()
    saved, tangent = value(graph.placeholder("saved")), value(graph.placeholder("tangents_1"))
    product = value(graph.call_function(aten.mm.default, (saved, saved)))
    wide = value(graph.call_function(aten.exp.default, (product,)))
    end = value(graph.call_function(aten.mm.default, (wide, saved)))
    for node in (product, wide, end):
        G.set_tag(node, G.Tag(G.Kind.INTERIOR, (0,)))
    first = value(graph.call_function(aten.mul.Tensor, (tangent, end)))
    second = value(graph.call_function(aten.mul.Tensor, (first, wide)))
    third = value(graph.call_function(aten.mul.Tensor, (second, product if held else saved)))
    graph.output((third,))
    return graph


@pytest.mark.parametrize("held", [True, False])
def test_a_copy_holds_nothing_longer(held: bool) -> None:
    graph = chain(held)
    assert for_gradients(graph) == (1 if held else 0)
    graph.lint()
    assert [n.name for n in copies(graph)] == (["exp_default_again"] if held else [])


class Masked(nn.Module):
    """Attention with a mask that depends on the batch."""

    def __init__(self, d: int = 32) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(d, d) for _ in range(3))

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        q, k, v = (m(x).unflatten(-1, (4, 8)).transpose(1, 2) for m in (self.q, self.k, self.v))
        i = torch.arange(x.shape[1], device=x.device)
        mask = (i[None] <= i[:, None]) & (i < lengths[:, None, None, None])
        return x + scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


def masks_of(graph: fx.Graph) -> list[fx.Node]:
    """The mask of each attention operator, in order."""
    return [
        n for a in graph.nodes if "scaled_dot_product" in str(a.target) for n in a.all_input_nodes if _is_mask(n, a)
    ]


def _is_mask(node: fx.Node, operator: fx.Node) -> bool:
    return node in (G.argument(operator, "attn_mask"), G.argument(operator, "attn_bias"))


def test_each_region_makes_its_own_mask() -> None:
    lengths = torch.tensor([9, 16], device=DEVICE)
    graph = plain_record(Masked, lengths=lengths).backward.graph
    before = masks_of(graph)
    assert len(before) == 6 and len({G.view_base(n) for n in before}) == 1
    assert for_each_region(graph) >= 3
    graph.lint()
    after = masks_of(graph)
    bases = [G.view_base(n) for n in after]
    assert len(set(bases)) == 4
    assert bases[1] is bases[2] and bases[3] is bases[4]  # a region's gradient and the next region's recompute adjoin


@pytest.mark.parametrize("layer", [Gated, Masked])
def test_compiled_numbers(layer: type[nn.Module]) -> None:
    extra = {"lengths": torch.tensor([9, 16], device=DEVICE)} if layer is Masked else {}
    model, batch = model_of(layer)
    want = train_step(model, model, {**batch, **extra})
    model, _ = model_of(layer)
    t = fxckpt.transform(model, layers=layer, verify=True)
    assert_close(train_step(torch.compile(t), model, {**batch, **extra}), want)
    (record,) = fxckpt.graphs(t)
    assert copies(record.backward.graph)


def peak(every_n: int) -> int:
    torch._dynamo.reset()
    model, _ = model_of(Gated)
    batch = {"x": torch.randn(8, 256, 32, device=DEVICE)}
    run = torch.compile(fxckpt.transform(model, layers=Gated, every_n=every_n))

    def step() -> None:
        model.zero_grad(set_to_none=True)
        run(**batch).backward()

    step()
    return measured(step)[1].peak


def without(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    passes = tuple((n, (lambda run: None) if n == name else p) for n, p in pipeline.PASSES)
    monkeypatch.setattr(pipeline, "PASSES", passes)


def test_a_recomputed_layer_holds_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gate, up and their product's gradient, but not the activation: of 2 MiB each."""
    ours = peak(1)
    without(monkeypatch, "rematerialize")
    uncached = inductor_config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False)
    with uncached[0], uncached[1]:  # one key for both: fxckpt's files are the same
        assert ours <= peak(1) - 1.5 * 2**20


def test_a_kept_layer_saves_only_what_nothing_saved_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a gated layer: its input, gate and up; neither the activation's product nor the norm's result."""
    model, batch = model_of(Gated)
    t = fxckpt.transform(model, layers=Gated, policy=lambda layer: layer.index == 0)
    torch.compile(t)(**batch).backward()
    (record,) = fxckpt.graphs(t)
    wide = [n for n in record.saved if n.op != "placeholder" and G.nbytes(n) == 2 * 16 * 256 * 4]
    assert len(wide) == 4, wide  # two for each of the two kept layers


def test_where_nothing_is_recomputed_nothing_changes() -> None:
    model, batch = model_of(Gated)
    t = fxckpt.transform(model, layers=Gated, policy=lambda layer: False)
    torch.compile(t)(**batch).backward()
    (record,) = fxckpt.graphs(t)
    assert not copies(record.backward.graph)
    wide = [n for n in record.saved if n.op != "placeholder" and G.nbytes(n) == 2 * 16 * 256 * 4]
    assert len(wide) == 9  # gate, up and their product, as torch.compile(model) saves them
