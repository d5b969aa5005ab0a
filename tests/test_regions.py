"""Regions are calls of boundary layers, found in whatever graphs Dynamo makes of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import fx, nn

import fxckpt
from fxckpt import graph as G
from fxckpt.capture.regions import BoundaryLayer, find_regions
from fxckpt.decide.policy import Treatment
from fxckpt.record import GraphRecord
from tests.helpers import DEVICE, assert_same, boundary_layers, grads
from tests.situations.models import Residual
from tests.zoo import build, get_loss

pytestmark = [pytest.mark.filterwarnings(f"ignore::UserWarning:{package}") for package in ("torch", "transformers")]


class Model(nn.Module):
    """A stem, blocks one after the other, and a scalar; subclasses say how the blocks are called."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(blocks)

    def run(self, h: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            h = block(h)
        return h

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self.stem(x)).square().mean()


def blocks(n: int = 3) -> list[nn.Module]:
    return [Residual(8) for _ in range(n)]


def records(
    model: nn.Module,
    compiler: Callable[[nn.Module], Any] = lambda t: t,
    batch: dict[str, Any] | None = None,
    **settings: Any,
) -> list[GraphRecord]:
    """The graphs of one training step, whose loss and gradients are those of the model itself, bit for bit."""
    model.to(DEVICE)
    torch.manual_seed(0)
    batch = batch or {"x": torch.randn(4, 8, device=DEVICE)}
    settings = {"layers": [Residual], "every_n": 2, "offload": True, "verify": True, **settings}
    t = fxckpt.transform(model, **settings)

    def step(run: Callable[..., Any]) -> dict[str, torch.Tensor | None]:
        model.zero_grad(set_to_none=True)
        loss = get_loss(run(**batch))
        loss.backward()
        return {"loss": loss.detach(), **grads(model)}

    want = step(model)
    assert_same(step(compiler(t)), want)
    return fxckpt.graphs(t)


def named(found: list[GraphRecord]) -> list[list[str]]:
    return [[region.name for region in record.regions] for record in found]


def with_regions(found: list[GraphRecord]) -> list[GraphRecord]:
    return [record for record in found if record.regions]


def treatments(record: GraphRecord) -> dict[str, str]:
    return {plan.name: plan.treatment.kind for plan in record.plan.regions}


# ---- one graph ---------------------------------------------------------------------------------------------------


def test_a_whole_graph() -> None:
    (record,) = records(Model(*blocks()))
    assert named([record]) == [["blocks.0", "blocks.1", "blocks.2"]]
    assert treatments(record) == {"blocks.0": "recompute", "blocks.1": "keep", "blocks.2": "recompute"}
    assert [b.name for b in record.plan.boundaries] == ["blocks_0_input", "blocks_2_input"]
    assert list(record.transfers) == ["blocks_0_input", "blocks_2_input"]
    assert record.plan.recomputes


def test_regions_are_numbered_in_order_and_share_no_node() -> None:
    (record,) = records(Model(*blocks()))
    assert [r.index for r in record.regions] == [0, 1, 2] == [r.layer.index for r in record.regions]
    nodes = [n for r in record.regions for n in r.nodes]
    assert len(nodes) == len(set(nodes)) and all(n.op == "call_function" for n in nodes)
    assert len({len(r.nodes) for r in record.regions}) == 1, "equal layers, equal regions"
    assert [r.nodes[-1].target for r in record.regions] == [torch.ops.aten.add.Tensor] * 3


def test_dynamic_shapes() -> None:
    model = Model(*blocks())
    (record,) = records(model, lambda t: torch.compile(t, backend="aot_eager", dynamic=True))
    assert named([record]) == [["blocks.0", "blocks.1", "blocks.2"]]
    sizes = [s for n in record.forward.graph.nodes if (v := G.tensor(n)) is not None for s in v.shape]
    assert any(isinstance(s, torch.SymInt) for s in sizes)
    assert record.plan.boundaries[0].shape == (4, 8) and record.plan.boundaries[0].nbytes == 4 * 8 * 4
    assert len(record.transfers) == 2


def test_nested_modules_belong_to_the_layer_around_them() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(Residual(8), nn.Sequential(nn.Tanh(), Residual(8)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(x)

    (record,) = records(Model(Deep(), Deep()), layers=[Deep])
    assert named([record]) == [["blocks.0", "blocks.1"]]
    tanhs = [n for n in record.regions[0].nodes if n.target is torch.ops.aten.tanh.default]
    assert len(tanhs) == 3


def test_layers_outside_a_list() -> None:
    class Loose(Model):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Residual(8), Residual(8)

        def run(self, h: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(h))

    assert named(records(Loose())) == [["first", "second"]]


def test_layers_run_by_their_forward_alone() -> None:
    """``block.forward(h)`` runs no ``__call__``, and no module stack shows the block."""

    class Direct(Model):
        def run(self, h: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                h = block.forward(h)
            return h

    (record,) = records(Direct(*blocks()))
    assert named([record]) == [["blocks.0", "blocks.1", "blocks.2"]]
    assert treatments(record) == {"blocks.0": "recompute", "blocks.1": "keep", "blocks.2": "recompute"}


def test_layers_skipped_by_a_flag() -> None:
    class Skips(Model):
        def run(self, h: torch.Tensor) -> torch.Tensor:
            for i, block in enumerate(self.blocks):
                h = h if i in (0, 3) else block(h)
            return h

    (record,) = records(Skips(*blocks(5)))
    assert named([record]) == [["blocks.1", "blocks.2", "blocks.4"]]
    assert [r.layer.index for r in record.regions] == [1, 2, 4], "counted as modules, called or not"
    assert [n for n, t in treatments(record).items() if t == "recompute"] == ["blocks.2", "blocks.4"]


def test_layers_called_in_another_order_than_that_of_modules() -> None:
    class Backwards(Model):
        def run(self, h: torch.Tensor) -> torch.Tensor:
            for block in reversed(self.blocks):
                h = block(h)
            return h

    (record,) = records(Backwards(*blocks(4)))
    assert named([record]) == [["blocks.3", "blocks.2", "blocks.1", "blocks.0"]]
    assert [n for n, t in treatments(record).items() if t == "recompute"] == ["blocks.2", "blocks.0"]


# ---- what goes in and comes out ----------------------------------------------------------------------------------


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(
        self, *, hidden: torch.Tensor, bias: torch.Tensor, mask: torch.Tensor | None, scale: float, mode: str
    ) -> torch.Tensor:
        h = torch.tanh(self.a(hidden)) * scale + bias
        return hidden + (h if mask is None else h * mask)


@pytest.mark.parametrize("mask", [None, "tensor"])
def test_keywords_none_and_what_is_no_tensor(mask: str | None) -> None:
    class Calls(Model):
        def run(self, h: torch.Tensor) -> torch.Tensor:
            bias = self.stem(h)
            given = torch.ones(4, 8, device=h.device).tril() if mask else None
            for block in self.blocks:
                h = block(hidden=h, bias=bias, mask=given, scale=0.5, mode="fast")
            return h

    (record,) = records(Calls(Keywords(), Keywords(), Keywords()), layers=[Keywords])
    assert named([record]) == [["blocks.0", "blocks.1", "blocks.2"]]
    (shared,) = (b for b in record.plan.boundaries if len(b.regions) == 2)
    assert shared.regions == ("blocks.0", "blocks.2"), "the bias goes into both, and is saved once"
    assert len(record.plan.boundaries) == 3


@dataclass
class Output:
    hidden: torch.Tensor
    extra: torch.Tensor
    nothing: None = None


class Several(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.kind = nn.Linear(8, 8), kind

    def forward(self, x: torch.Tensor) -> Any:
        h = torch.tanh(self.a(x))
        extra = h.mean(-1, keepdim=True)
        return {"tuple": (x + h, extra, None), "dataclass": Output(x + h, extra), "dict": {"h": x + h, "e": extra}}[
            self.kind
        ]


@pytest.mark.parametrize("kind", ["tuple", "dataclass", "dict"])
def test_several_outputs(kind: str) -> None:
    class Unpacks(Model):
        def run(self, h: torch.Tensor) -> torch.Tensor:
            total = 0.0
            for block in self.blocks:
                out = block(h)
                if kind == "tuple":
                    h, extra, _ = out
                else:
                    h, extra = (out.hidden, out.extra) if kind == "dataclass" else (out["h"], out["e"])
                total = total + extra
            return h * total

    (record,) = records(Unpacks(*(Several(kind) for _ in range(3))), layers=[Several])
    assert named([record]) == [["blocks.0", "blocks.1", "blocks.2"]]


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("plain_nn_transformer", [f"t.{side}.layers.{i}" for side in ("encoder", "decoder") for i in range(4)]),
        ("t5", [f"{side}.block.{i}" for side in ("encoder", "decoder") for i in range(4)]),
        ("plain_kwargs_block", [f"blocks.{i}" for i in range(4)]),
        ("plain_tuple_block", [f"blocks.{i}" for i in range(4)]),
    ],
)
def test_stacks_of_real_models(name: str, layers: list[str]) -> None:
    model, batch = build(name)
    (record,) = records(model, batch=batch, layers=boundary_layers(name, model))
    found = [r.layer.name.removeprefix("model.") for r in record.regions]
    assert found == layers and [r.layer.index for r in record.regions] == list(range(len(layers)))
    assert [t for t in treatments(record).values()] == ["recompute", "keep"] * (len(layers) // 2)


# ---- several calls -----------------------------------------------------------------------------------------------


class Loop(Model):
    def run(self, h: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            h = self.blocks[0](h)
        return h


def test_one_block_called_four_times_is_one_layer_and_four_regions() -> None:
    (record,) = records(Loop(*blocks(1)))
    assert named([record]) == [["blocks.0", "blocks.0#1", "blocks.0#2", "blocks.0#3"]]
    assert {r.layer.index for r in record.regions} == {0} and [r.call for r in record.regions] == [0, 1, 2, 3]
    assert set(treatments(record).values()) == {"recompute"}, "every_n counts layers"
    names = ["blocks_0_input", "blocks_0_call1_input", "blocks_0_call2_input", "blocks_0_call3_input"]
    assert [b.name for b in record.plan.boundaries] == list(record.transfers) == names


def test_calls_of_two_blocks_in_turn() -> None:
    class Turns(Model):
        def run(self, h: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                h = self.blocks[1](self.blocks[0](h))
            return h

    (record,) = records(Turns(*blocks(2)))
    assert named([record]) == [["blocks.0", "blocks.1", "blocks.0#1", "blocks.1#1"]]
    assert list(treatments(record).values()) == ["recompute", "keep", "recompute", "keep"]


# ---- graph breaks ------------------------------------------------------------------------------------------------


class Breaks(nn.Module):
    """A residual block with a graph break in its middle."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.a(x))
        torch._dynamo.graph_break()
        return x + torch.tanh(self.b(h))


class TwoHalves(Model):
    """A graph break between layers, outside any loop: one graph before it, one after it."""

    def run(self, h: torch.Tensor) -> torch.Tensor:
        h = self.blocks[1](self.blocks[0](h))
        torch._dynamo.graph_break()
        return self.blocks[3](self.blocks[2](h))


def test_a_graph_break_between_layers() -> None:
    found = with_regions(records(TwoHalves(*blocks(4))))
    assert sorted(name for record in found for name in named([record])[0]) == [f"blocks.{i}" for i in range(4)]
    assert len(found) == 2
    chosen = {name: t for record in found for name, t in treatments(record).items()}
    assert [n for n, t in sorted(chosen.items()) if t == "recompute"] == ["blocks.0", "blocks.2"]


def test_a_layer_that_is_the_root_of_its_own_graph() -> None:
    """A graph break inside the loop makes Dynamo run the model's frame as Python and capture each layer by itself."""

    class Between(Model):
        def run(self, h: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                h = block(h)
                torch._dynamo.graph_break()
            return h

    found = with_regions(records(Between(*blocks(4))))
    assert named(found) == [["blocks.0"], ["blocks.1"]], "layers treated alike share a graph"
    assert [r.frame.root for r in found] == ["blocks.0", "blocks.1"]
    assert [list(treatments(r).values()) for r in found] == [["recompute"], ["keep"]]
    for record in found:
        joint = {n.name for n in record.joint.graph.nodes if n.op == "call_function" and G.is_forward(n)}
        assert {n.name for n in record.regions[0].nodes} == joint, "the whole graph is the region"
    (boundary,) = found[0].plan.boundaries
    assert boundary.node in found[0].activations, "what it starts from is an input of the graph"
    assert [list(record.transfers) for record in found] == [[boundary.name], []] and boundary.name == "blocks_0_input"


def test_a_graph_break_inside_a_layer() -> None:
    found = with_regions(records(Model(*(Breaks() for _ in range(3))), layers=[Breaks]))
    halves = [(record.frame.root, list(treatments(record).items())) for record in found]
    first = ("blocks.0", [("blocks.0", "recompute")])
    second = ("blocks.1", [("blocks.1", "keep")])
    assert sorted(halves) == [first, first, second, second], "both halves of a layer, for each treatment"


def test_a_module_below_a_layer_that_is_the_root_of_a_graph() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Residual(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(1):  # a break in a loop: this frame runs as Python
                torch._dynamo.graph_break()
                x = self.inner(x)
            return x

    found = with_regions(records(Model(Holder(), Holder()), layers=[Holder]))
    assert named(found) == [["blocks.0"], ["blocks.1"]]
    assert [r.frame.root for r in found] == ["blocks.0.inner", "blocks.1.inner"]


# ---- nested boundary layers --------------------------------------------------------------------------------------


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.mix = nn.ModuleList(blocks(2)), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return torch.tanh(self.mix(x))


OUTER = ["blocks.0", "blocks.1"]
INNER = [f"blocks.{i}.layers.{j}" for i in range(2) for j in range(2)]


@pytest.mark.parametrize(
    ("chosen", "deciders", "inside"),
    [
        (OUTER, OUTER, {n: n[: len("blocks.0")] for n in INNER}),
        (INNER, INNER, {}),
        ([*OUTER, *INNER], OUTER, {n: n[: len("blocks.0")] for n in INNER}),
        (["blocks.0", "blocks.1.layers.1"], ["blocks.0", "blocks.1.layers.1"], {n: "blocks.0" for n in INNER[:2]}),
    ],
    ids=["outer", "inner", "both", "mixed"],
)
def test_nested_layers(chosen: list[str], deciders: list[str], inside: dict[str, str]) -> None:
    (record,) = records(Model(Stage(), Stage()), layers=[Stage, Residual], policy=chosen)
    assert named([record]) == [["blocks.0", *INNER[:2], "blocks.1", *INNER[2:]]]
    parents = {r.name: r.parent.name if r.parent else None for r in record.regions}
    assert parents == {**dict.fromkeys(OUTER), **{n: n[: len("blocks.0")] for n in INNER}}
    assert {p.name: p.inside for p in record.plan.regions if p.inside} == inside
    assert sorted({r for b in record.plan.boundaries for r in b.regions}) == deciders, "the outermost decides"
    assert {n for n, t in treatments(record).items() if t == "recompute"} == set(chosen)
    for region in record.regions:
        assert region.parent is None or set(region.nodes) < set(region.parent.nodes)


# ---- nodes without a module --------------------------------------------------------------------------------------


def call(graph: fx.Graph, target: Any, args: tuple[Any, ...], module: nn.Module | None, name: str) -> fx.Node:
    node = graph.create_node("call_function", target, args, name=name)
    node.meta["partitioner_tag"] = "is_forward"
    if module is not None:
        node.meta["nn_module_stack"] = {str(id(module)): ("m", type(module))}
    return node


def test_stray_nodes_belong_to_the_region_they_are_used_in() -> None:
    """Joint-graph passes make nodes without a module stack; what a region feeds and only it reads is part of it."""
    aten, layer, graph = torch.ops.aten, nn.Linear(2, 2), fx.Graph()
    x = graph.placeholder("primals_1")
    inside = call(graph, aten.neg.default, (x,), layer, "inside")
    between = call(graph, aten.exp.default, (inside,), None, "between")
    chained = call(graph, aten.sin.default, (between,), None, "chained")
    leaving = call(graph, aten.cos.default, (inside,), None, "leaving")
    unfed = call(graph, aten.abs.default, (x,), None, "unfed")
    last = call(graph, aten.add.Tensor, (chained, unfed), layer, "last")
    outside = call(graph, aten.mul.Tensor, (leaving, last), None, "outside")
    graph.output((outside,))
    (region,) = find_regions(graph, {id(layer): BoundaryLayer("m", 0, layer)})
    assert region.nodes == [inside, between, chained, last]
    assert leaving not in region.nodes and unfed not in region.nodes


def test_no_layer_in_the_graph_no_region() -> None:
    graph = fx.Graph()
    graph.output((call(graph, torch.ops.aten.neg.default, (graph.placeholder("primals_1"),), None, "a"),))
    assert find_regions(graph, {}) == []


def test_functions_called_by_a_layer_belong_to_it() -> None:
    def helper(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x) * torch.cos(x)

    class Uses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + helper(self.a(x))

    (record,) = records(Model(Uses(), Uses()), layers=[Uses])
    targets = [{G.overload_packet(n) for n in region.nodes} for region in record.regions]
    assert all({torch.ops.aten.sin, torch.ops.aten.cos} <= t for t in targets)


def test_kept_layers_only() -> None:
    (record,) = records(Model(*blocks()), policy=lambda layer: Treatment.KEEP)
    assert named([record]) == [["blocks.0", "blocks.1", "blocks.2"]]
    assert not record.plan.recomputes and not record.plan.boundaries and not record.transfers
    assert not [n for n in record.forward.graph.nodes if G.tag(n) is not None]
