"""What is saved at the edges of recomputed regions, what is not, and what leaves the device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fxckpt
from fxckpt import graph as G
from fxckpt.record import GraphRecord
from tests.helpers import DEVICE, Step, assert_same, boundary_layers, differences, train_step
from tests.situations.models import Residual
from tests.zoo import build, get_loss
from tests.zoo.registry import BATCH, HID, LAYERS, SEQ

pytestmark = [pytest.mark.filterwarnings(f"ignore::UserWarning:{package}") for package in ("torch", "transformers")]
aten = torch.ops.aten


class Model(nn.Module):
    """A stem, blocks one after the other, and a scalar; `run` may be given."""

    def __init__(self, *blocks: nn.Module, run: Callable[[Model, torch.Tensor], Any] | None = None) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(blocks)
        self.how = run

    def run(self, h: torch.Tensor) -> Any:
        for block in self.blocks:
            h = block(h)
        return h

    def forward(self, x: torch.Tensor) -> Any:
        h = self.stem(x)
        out = self.how(self, h) if self.how is not None else self.run(h)
        return out if isinstance(out, tuple) else out.square().mean()


def planned(model: nn.Module, **settings: Any) -> GraphRecord:
    """The one graph of a training step, whose loss, gradients and buffers are those of eager, bit for bit."""
    model.to(DEVICE)
    torch.manual_seed(0)
    batch = {"x": torch.randn(4, 8, device=DEVICE)}
    start = {k: v.clone() for k, v in model.state_dict().items()}
    want = train_step(model, model, batch)
    model.load_state_dict(start)
    t = fxckpt.transform(model, **{"layers": "blocks.*", "every_n": 1, "offload": True, "verify": True, **settings})
    assert_same(train_step(t, model, batch), want)
    (record,) = fxckpt.graphs(t)
    return record


def of_zoo(name: str, dropout: bool = False, **settings: Any) -> GraphRecord:
    model, batch = build(name, dropout)
    t = fxckpt.transform(model, layers=boundary_layers(name, model), verify=True, **settings)
    get_loss(t(**batch)).backward()
    (record,) = fxckpt.graphs(t)
    return record


def saved_values(record: GraphRecord) -> list[fx.Node]:
    """Saved values that are no parameters or inputs, and what was offloaded in place of its host copy."""
    made = [n for n in record.saved if n.op != "placeholder" and G.tensor(n) is not None]
    return [n.args[0] if G.is_offload(n) else n for n in made]  # type: ignore[misc]


def targets(nodes: list[fx.Node]) -> set[Any]:
    return {G.overload_packet(n) for n in nodes}


def boundaries(record: GraphRecord) -> dict[str, tuple[str, ...]]:
    return {b.name: b.regions for b in record.plan.boundaries}


# ---- interior ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dropout", "every_n"),
    [("llama", False, 1), ("gpt2_8layers", True, 3), ("bert", True, 2), ("plain_tuple_block", True, 1)],
)
def test_interior_values_are_never_saved(name: str, dropout: bool, every_n: int) -> None:
    record = of_zoo(name, dropout, every_n=every_n, offload=True)
    inside = {n.name for r in record.regions if treatment(record, r.name) == "recompute" for n in r.nodes}
    allowed = {b.node for b in record.plan.boundaries}
    exits = {n.name for n in record.forward.graph.nodes if (t := G.tag(n)) and t.kind is G.Kind.BOUNDARY}
    saved = {n.name for n in saved_values(record)}
    assert inside and saved & allowed
    assert not (saved & inside) - allowed - exits
    large = [n for n in saved_values(record) if n.name in inside and G.nbytes(n) > BATCH * SEQ * HID * 4]
    assert not large, "what leaves a layer is no larger than its hidden states"


def treatment(record: GraphRecord, region: str) -> str:
    return next(r.treatment.kind for r in record.plan.regions if r.name == region)


def test_interior_values_of_kept_layers_are_saved_as_without_fxckpt() -> None:
    record = planned(Model(Residual(8), Residual(8)), every_n=2)
    inside = {n.name for n in record.regions[1].nodes}
    assert aten.tanh in targets([n for n in saved_values(record) if n.name in inside])


# ---- bytes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("every_n", "dtype"), [(1, torch.bfloat16), (2, torch.float32), (3, torch.float32)])
def test_offloaded_bytes_of_a_llama(every_n: int, dtype: torch.dtype) -> None:
    """Selected layers x batch x sequence x hidden x itemsize."""
    model, batch = build("llama")
    t = fxckpt.transform(model.to(dtype), every_n=every_n, offload=True, verify=True)
    get_loss(t(**batch)).backward()
    (record,) = fxckpt.graphs(t)
    selected = len(range(0, LAYERS, every_n))
    assert selected == len(fxckpt.selected_layers(t)) == len(record.transfers)
    offloaded = [n for n in record.saved if G.is_offload(n)]
    assert sum(G.nbytes(n) for n in offloaded) == selected * BATCH * SEQ * HID * dtype.itemsize
    assert [b.nbytes for b in record.plan.boundaries if b.offload] == [BATCH * SEQ * HID * dtype.itemsize] * selected
    assert list(record.transfers) == [f"layers_{i}_input" for i in range(0, LAYERS, every_n)]


def test_without_offload_nothing_moves() -> None:
    record = planned(Model(Residual(8), Residual(8)), offload=False)
    assert not record.transfers and not any(b.offload for b in record.plan.boundaries)
    assert not any(G.is_transfer(n) for gm in (record.forward, record.backward) for n in gm.graph.nodes)


# ---- values that depend on no parameter --------------------------------------------------------------------------


def test_masks_and_rotary_tables_are_neither_offloaded_nor_saved() -> None:
    record = of_zoo("llama", every_n=1, offload=True)
    free = [n for n in record.forward.graph.nodes if (t := G.tag(n)) and t.kind is G.Kind.FREE]
    assert {aten.cos, aten.sin} <= targets(free)
    assert not {aten.cos, aten.sin, aten.where, aten.cat} & targets(saved_values(record))
    assert len(record.plan.boundaries) == LAYERS, "hidden states only"


class Scaled(nn.Module):
    """Reads, besides hidden states, a value that somebody else made."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.a(x) * given)


def with_given(make: Callable[[Model, torch.Tensor], torch.Tensor]) -> Model:
    def run(model: Model, h: torch.Tensor) -> torch.Tensor:
        given = make(model, h)
        for block in model.blocks:
            h = block(h, given)
        return h

    return Model(Scaled(), Scaled(), run=run)


def test_a_mask_made_from_nothing_is_made_again() -> None:
    record = planned(with_given(lambda model, h: torch.ones(8, 8, device=h.device).tril()[:4]))
    assert aten.tril in targets([n for n in record.backward.graph.nodes if n.op == "call_function"])
    assert len(record.plan.boundaries) == 2 and aten.tril not in targets(saved_values(record))


def test_what_is_dear_to_compute_is_saved_though_it_depends_on_no_parameter() -> None:
    def dear(model: Model, h: torch.Tensor) -> torch.Tensor:
        table = torch.ones(4, 200, device=h.device).tril() @ torch.ones(200, 8, device=h.device)
        return torch.tanh(table)

    record = planned(with_given(dear))
    (extra,) = (b for b in record.plan.boundaries if len(b.regions) == 2)
    assert not extra.offload, "no activation: it stays"
    assert aten.mm not in {G.overload_packet(n) for n in _recomputed(record)}


def test_random_values_are_saved_not_drawn_again() -> None:
    record = planned(with_given(lambda model, h: torch.rand(4, 8, device=h.device)))
    (extra,) = (b for b in record.plan.boundaries if len(b.regions) == 2)
    assert not extra.offload
    assert not any(G.draws_random(n) for n in record.backward.graph.nodes)


def _recomputed(record: GraphRecord) -> list[fx.Node]:
    return [n for n in record.backward.graph.nodes if n.op == "call_function" and (t := G.tag(n)) and t.kind]


# ---- views and storages ------------------------------------------------------------------------------------------


def test_of_views_the_storage_is_offloaded_once() -> None:
    def run(model: Model, h: torch.Tensor) -> torch.Tensor:
        a = model.blocks[0](h.t().t())
        return a + model.blocks[1](h.reshape(2, 2, 8)).reshape(4, 8)

    record = planned(Model(Residual(8), Residual(8), run=run))
    assert boundaries(record) == {"blocks_0_input": ("blocks.0", "blocks.1")}
    (source,) = (n.args[0] for n in record.saved if G.is_offload(n))
    assert G.overload_packet(source) is aten.addmm


def test_one_value_read_by_several_regions_is_saved_once() -> None:
    run = lambda model, h: model.blocks[0](h) + model.blocks[1](h) + model.blocks[2](h)  # noqa: E731
    record = planned(Model(*(Residual(8) for _ in range(3)), run=run))
    assert boundaries(record) == {"blocks_0_input": ("blocks.0", "blocks.1", "blocks.2")}
    assert list(record.transfers) == ["blocks_0_input"]


def test_a_part_of_a_value_is_saved_as_the_part() -> None:
    record = planned(Model(Residual(8), run=lambda model, h: model.blocks[0](model.stem(h)[:1])))
    (boundary,) = record.plan.boundaries
    assert boundary.shape == (1, 8) and boundary.nbytes == 32
    assert record.offloaded_bytes == 32, "the part only"


def test_parts_of_one_storage_are_offloaded_each() -> None:
    """As Gemma 4's inputs of each layer, which are computed at once: the parts together are the storage, once."""

    def run(model: Model, h: torch.Tensor) -> torch.Tensor:
        whole = torch.stack([h, h + 1], 1) * 2
        return model.blocks[0](whole[:, 0]) + model.blocks[1](whole[:, 1])

    record = planned(Model(Residual(8), Residual(8), run=run))
    assert [b.shape for b in record.plan.boundaries] == [(4, 8), (4, 8)]
    assert list(record.transfers) == ["blocks_0_input", "blocks_1_input"]


def test_a_part_of_a_storage_that_stays_is_not_offloaded() -> None:
    """The result of ``exp`` is saved for its own gradient: to copy a part of it away frees nothing."""

    def run(model: Model, h: torch.Tensor) -> torch.Tensor:
        return model.blocks[0](torch.exp(torch.stack([h, h + 1], 1))[:, 0])

    record = planned(Model(Residual(8), run=run))
    assert len(record.plan.boundaries) == 1 and not record.transfers


def test_a_part_of_what_is_saved_anyway_is_not_saved_once_more() -> None:
    def run(model: Model, h: torch.Tensor) -> torch.Tensor:
        return model.blocks[0](h) + model.blocks[1](h[:2]).repeat(2, 1)

    record = planned(Model(Residual(8), Residual(8), run=run))
    assert boundaries(record) == {"blocks_0_input": ("blocks.0", "blocks.1")}
    assert [b.shape for b in record.plan.boundaries] == [(4, 8)]


def test_a_transposed_value_comes_back_with_its_strides() -> None:
    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.tanh(self.a(x))

    record = planned(Model(Transposed(), run=lambda model, h: model.blocks[0](torch.exp(h.t()))))
    (reload,) = (n for n in record.backward.graph.nodes if G.is_reload(n))
    (offload,) = (n for n in record.saved if G.is_offload(n))
    assert G.tensor(reload).stride() == G.tensor(offload.args[0]).stride() == (1, 8)


# ---- inputs, parameters, outputs ---------------------------------------------------------------------------------


class First(nn.Module):
    """Its first block reads the input of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual(8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[1](self.blocks[0](x.t().t())).square().mean()


def test_inputs_of_the_graph_stay() -> None:
    record = planned(First())
    assert boundaries(record) == {"blocks_1_input": ("blocks.1",)} and list(record.transfers) == ["blocks_1_input"]


def test_parameters_of_others_stay() -> None:
    record = planned(with_given(lambda model, h: model.stem.weight[:4].t().t()))
    offloaded = [n.args[0] for n in record.saved if G.is_offload(n)]
    assert len(offloaded) == 2 and all(G.view_base(n).op == "call_function" for n in offloaded)


def test_outputs_stay() -> None:
    """TupleModel returns the hidden states of every layer: they are kept alive, so that moving them saves nothing."""
    record = of_zoo("plain_returns_tuple", every_n=1, offload=True)
    assert list(record.transfers) == ["blocks_0_input"], "the only input of a layer that is no output"
    moved = {b.name: b.offload for b in record.plan.boundaries}
    assert moved == {"blocks_0_input": True, "blocks_1_input": False, "blocks_2_input": False, "blocks_3_input": False}


def test_an_output_seen_through_a_view_stays() -> None:
    class Shows(Model):
        def forward(self, x: torch.Tensor) -> Any:
            h = self.stem(x)
            return self.blocks[0](h).square().mean(), h.view(2, 16)

    assert not planned(Shows(Residual(8))).transfers


def test_a_region_whose_output_is_the_loss() -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.a(x)).square().mean()

    record = planned(Model(Residual(8), Head(), run=lambda model, h: (model.blocks[1](model.blocks[0](h)),)))
    assert list(record.transfers) == ["blocks_0_input", "blocks_1_input"]


# ---- results picked out of a tuple -------------------------------------------------------------------------------


@pytest.mark.parametrize("offload", [False, True])
def test_outputs_of_layer_norms_are_saved_each(offload: bool) -> None:
    """PyTorch's partitioner recomputes results of a tuple whatever their tag: all layers would run in a row."""
    record = of_zoo("bert", every_n=1, offload=offload)
    assert len(record.plan.boundaries) == LAYERS
    nodes = {b.node for b in record.plan.boundaries}
    saved = [n for n in saved_values(record) if n.name in nodes]
    assert {n.name for n in saved} == nodes
    assert sum(G.is_getitem(n) for n in saved) == LAYERS - 1, "the first layer reads what a dropout left"
    assert len(record.transfers) == (LAYERS if offload else 0)
    again = [n.name for n in _recomputed(record) if n.name in nodes]
    assert not again, "a boundary is read, not computed"


class PostNorm(nn.Module):
    """A layer whose output is a layer norm's, as BERT's."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(x + torch.tanh(self.a(x)))
        return out


@pytest.mark.parametrize("offload", [False, True])
def test_after_a_kept_layer_norm_its_input_is_saved_alone(offload: bool) -> None:
    """Its backward needs the input; the output is made of it again, unless it leaves the device anyway."""
    record = planned(Model(*(PostNorm() for _ in range(4))), every_n=2, offload=offload)
    (boundary,) = [b for b in record.plan.boundaries if b.name == "blocks_2_input"]
    assert boundary.node.startswith("getitem" if offload else "add")
    saved = {n.name for n in saved_values(record)}
    assert boundary.node in saved
    (output,) = [
        n for r in record.regions if r.name == "blocks.1" for n in r.nodes if G.is_getitem(n) and n.args[1] == 0
    ]
    assert (output.name in saved) is offload


def test_parts_of_a_chunk_are_saved_as_parts() -> None:
    def run(model: Model, h: torch.Tensor) -> torch.Tensor:
        left, right = torch.tanh(torch.cat([h, h], 1)).chunk(2, 1)
        return model.blocks[0](left) + right

    record = planned(Model(Residual(8), run=run))
    assert [b.shape for b in record.plan.boundaries] == [(4, 8)]


# ---- a model's own checkpointing ---------------------------------------------------------------------------------


class Own(nn.Module):
    """Checkpoints its middle by itself, with or without a selective policy."""

    def __init__(self, saves: Any = None) -> None:
        super().__init__()
        self.a, self.b, self.saves = nn.Linear(8, 16), nn.Linear(16, 8), saves

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.b(torch.tanh(self.a(x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.saves is None:
            return x + checkpoint(self.middle, x, use_reentrant=False)
        contexts = partial(create_selective_checkpoint_contexts, self.saves)
        return x + checkpoint(self.middle, x, use_reentrant=False, context_fn=contexts)


def saves_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op is aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE


def inside(record: GraphRecord, layer: str) -> list[fx.Node]:
    region = next(r for r in record.regions if r.name == layer)
    names = {n.name for n in region.nodes}
    return [n for n in saved_values(record) if n.name in names]


def test_a_kept_layer_recomputes_what_it_checkpoints_itself() -> None:
    record = planned(Model(Own(), Own(), Residual(8)), policy=["blocks.2"])
    assert treatment(record, "blocks.0") == "keep"
    for layer in ("blocks.0", "blocks.1"):
        assert not {aten.tanh, aten.sin, aten.addmm} & targets(inside(record, layer))
    assert {n.name for n in saved_values(record)} >= {b.node for b in record.plan.boundaries}


@pytest.mark.parametrize("policy", [["blocks.1"], ["blocks.0", "blocks.1", "blocks.2"]], ids=["kept", "recomputed"])
def test_what_a_selective_policy_must_save_is_saved(policy: list[str]) -> None:
    record = planned(Model(Own(saves_products), Residual(8), Residual(8)), policy=policy)
    saved = inside(record, "blocks.0")
    assert sum(G.overload_packet(n) is aten.addmm for n in saved) == 2
    assert not {aten.tanh, aten.sin} & targets(saved)
    assert not any(G.is_offload(u) for n in saved if G.overload_packet(n) is aten.addmm for u in n.users)


class OwnMask(nn.Module):
    """Makes a mask in a checkpointed function whose policy saves masks."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def both(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mask = torch.ones(8, 8, device=x.device).tril()[:4]
        return torch.tanh(self.a(x)) * mask, mask

    def forward(self, x: torch.Tensor) -> Any:
        contexts = partial(create_selective_checkpoint_contexts, [aten.tril.default])
        return checkpoint(self.both, x, use_reentrant=False, context_fn=contexts)


def test_a_mask_that_a_selective_policy_saves_is_saved() -> None:
    run = lambda model, h: model.blocks[1](*model.blocks[0](h))  # noqa: E731
    record = planned(Model(OwnMask(), Scaled(), run=run), policy=["blocks.1"])
    assert aten.tril in targets([G.view_base(n) for n in saved_values(record)])


def test_a_recomputed_layer_that_checkpoints_itself_saves_nothing_inside() -> None:
    record = planned(Model(Own(), Own()))
    assert [b.name for b in record.plan.boundaries] == ["blocks_0_input", "blocks_1_input"]
    assert {n.name for n in saved_values(record)} >= {b.node for b in record.plan.boundaries}
    assert not {aten.tanh, aten.sin, aten.addmm} & targets(inside(record, "blocks.1"))


def test_an_own_checkpoint_around_a_recomputed_layer() -> None:
    def run(model: Model, h: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda x: model.blocks[1](model.blocks[0](torch.exp(x))), h, use_reentrant=False)

    record = planned(Model(Residual(8), Residual(8), run=run))
    assert [b.name for b in record.plan.boundaries] == ["blocks_0_input", "blocks_1_input"]


# ---- state -------------------------------------------------------------------------------------------------------


class Counting(nn.Module):
    """Changes two buffers in its forward and reads them, before and after the change."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.register_buffer("ema", torch.ones(8))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = torch.tanh(self.a(x) * self.ema.clone())
        with torch.no_grad():
            self.ema.mul_(0.9).add_(0.1 * x.mean(0))
            self.steps.add_(1)
        return x + torch.sin(before * self.ema) * self.steps


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.norm(self.a(x)))


def three_steps(block: type[nn.Module], wrap: Callable[[nn.Module], Any]) -> list[Step]:
    torch.manual_seed(0)
    model = Model(*(block() for _ in range(3))).to(DEVICE)
    x = torch.randn(4, 8, device=DEVICE)
    run = wrap(model)
    return [train_step(run, model, {"x": x + i}) for i in range(3)]


@pytest.mark.parametrize(("block", "every_n"), [(Counting, 1), (Normed, 1), (Normed, 2), (Counting, 2)])
def test_changed_buffers_are_read_as_they_were(block: type[nn.Module], every_n: int) -> None:
    """Over three steps loss, gradients and buffers are eager's: each state change happens once a step."""
    transformed = partial(fxckpt.transform, layers=[block], every_n=every_n, offload=True, verify=True)
    want = three_steps(block, lambda model: model)
    for got, plain in zip(three_steps(block, transformed), want, strict=True):
        assert not differences(got.values(), plain.values())


class Counts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, calls: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, calls)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, calls = ctx.saved_tensors
        calls.add_(1)
        return grad * x.cos(), None


class CountsBackwards(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + Counts.apply(self.a(x), self.calls)


def test_a_buffer_that_the_backward_changes() -> None:
    """What the backward writes is no value of the region, and is written once."""
    record = planned(Model(CountsBackwards(), CountsBackwards()))
    copies = [n for n in record.backward.graph.nodes if n.target is aten.copy_.default]
    assert len(copies) == 2
    assert len(record.plan.boundaries) == 2
    assert {n.name for n in saved_values(record)} >= {b.node for b in record.plan.boundaries}


def test_the_old_value_is_a_copy_that_is_saved() -> None:
    record = planned(Model(Counting(), Counting()))
    copies = [n for n in record.forward.graph.nodes if (t := G.tag(n)) and t.kind is G.Kind.STATE]
    assert copies and all(G.overload_packet(n) is aten.clone and n.args[0].op == "placeholder" for n in copies)
    assert not any(G.is_offload(u) for n in copies for u in n.users), "a buffer is no activation"
    assert {n.name for n in copies} & {n.name for n in record.saved}


# ---- frozen bases ------------------------------------------------------------------------------------------------


def test_a_frozen_base_below_the_first_adapter() -> None:
    """Layers without a gradient save nothing, recomputed or not."""
    record = of_zoo("plain_lora_upper_half", every_n=1, offload=True)
    assert len(record.regions) == 6
    saved = {n.name for n in saved_values(record)}
    used = {b.name: b.node in saved for b in record.plan.boundaries}
    assert used == {f"blocks_{i}_input": i >= 3 for i in range(6)}
    assert list(record.transfers) == ["blocks_3_input", "blocks_4_input", "blocks_5_input"]


def test_a_frozen_model_whose_input_needs_a_gradient() -> None:
    model = First().requires_grad_(False).to(DEVICE)
    x = torch.randn(4, 8, device=DEVICE, requires_grad=True)
    model(x).backward()
    want, x.grad = x.grad, None
    t = fxckpt.transform(model, layers=[Residual], offload=True, verify=True)
    t(x).backward()
    assert torch.equal(x.grad, want)
    (record,) = fxckpt.graphs(t)
    assert list(record.transfers) == ["blocks_0_input", "blocks_1_input"], "an input that gets a gradient, too"
