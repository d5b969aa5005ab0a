"""`graphs`, `explain` and `to_networkx`: the figures are those of the real step, and they print and export.

Golden texts of tests/golden are accepted anew with FXCKPT_ACCEPT=1.
"""

from __future__ import annotations

import gc
import io
import json
import re
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import networkx
import pytest
import torch
from rich.console import Console
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import fxckpt
from fxckpt.show.data import Explanation, GraphFigures
from fxckpt.show.fold import fold_names
from fxckpt.show.tables import bytes_text, flops_text, short_type
from tests.golden import assert_golden
from tests.golden.model import Block, Stack
from tests.helpers import DEVICE, boundary_layers, measured, seed_all
from tests.zoo import build, get_loss
from tests.zoo.registry import BATCH, HID, LAYERS, SEQ

on_cpu = pytest.mark.skipif(DEVICE != "cpu", reason="CUDA's allocator rounds up")
pytestmark = [pytest.mark.filterwarnings(f"ignore::UserWarning:{package}") for package in ("torch", "transformers")]


def stepped(name: str, dropout: bool = False, **settings: Any) -> tuple[nn.Module, nn.Module, dict[str, Any]]:
    """The transform of an entry after one training step, the model, the batch."""
    model, batch = build(name, dropout)
    t = fxckpt.transform(model, layers=boundary_layers(name, model), **settings)
    get_loss(t(**batch)).backward()
    return t, model, batch


def stack(**settings: Any) -> nn.Module:
    """The transform of the golden model after one training step."""
    torch.manual_seed(0)
    t = fxckpt.transform(Stack(), layers=[Block], **settings)
    t(torch.randn(4, 8)).backward()
    return t


def held_for_backward(loss: Callable[[], torch.Tensor]) -> int:
    """Bytes that a forward leaves allocated while its loss waits for the backward, without the loss itself."""
    loss().backward()  # compiles
    gc.collect()
    seed_all()
    result, memory = measured(loss)
    return memory.held - result.nbytes


def only(report: Explanation) -> GraphFigures:
    assert len(report.graphs) == 1
    return report.graphs[0]


# ---- bytes --------------------------------------------------------------------------------------------------------

HELD = [
    ("llama", False, 2, True),
    ("llama", True, 1, False),
    ("gpt2_8layers", True, 3, True),
    ("albert", False, 1, True),
    ("swin", False, 2, True),
    ("t5", False, 2, False),
    ("plain_token_model", True, 2, True),
    ("plain_conv_tower_bn", False, 2, True),
    ("plain_buffer_block", False, 1, False),
    ("plain_lora_upper_half", False, 2, True),
]


@on_cpu
@pytest.mark.parametrize(("name", "dropout", "every_n", "offload"), HELD, ids=str)
def test_bytes_are_what_the_step_holds(name: str, dropout: bool, every_n: int, offload: bool) -> None:
    t, _, batch = stepped(name, dropout, every_n=every_n, offload=offload)
    report = fxckpt.explain(t)
    # host copies lie in the same memory
    assert report.saved_bytes + report.offloaded_bytes == held_for_backward(lambda: get_loss(t(**batch)))
    assert (report.offloaded_bytes > 0) is offload
    assert report.saved_bytes < report.baseline_saved_bytes


@on_cpu
@pytest.mark.parametrize("name", ["llama", "plain_token_model", "plain_conv_tower_bn"])
def test_baseline_is_what_the_plain_compiled_model_holds(name: str) -> None:
    t, model, batch = stepped(name)
    baseline = fxckpt.explain(t).baseline_saved_bytes
    plain = torch.compile(model, backend="aot_eager")
    assert baseline == held_for_backward(lambda: get_loss(plain(**batch)))


@pytest.mark.parametrize("every_n", [1, 2, 3])
def test_offloaded_bytes_of_a_llama(every_n: int) -> None:
    t, model, _ = stepped("llama", every_n=every_n, offload=True)
    report = fxckpt.explain(t)
    selected = fxckpt.selected_layers(t)
    itemsize = next(model.parameters()).element_size()
    assert len(selected) == -(-LAYERS // every_n)
    assert report.offloaded_bytes == len(selected) * BATCH * SEQ * HID * itemsize
    recomputed = [r for r in only(report).regions if r.treatment == "recompute"]
    assert [r.name for r in recomputed] == selected
    for region in recomputed:
        (boundary,) = region.boundaries
        assert boundary.shape == (BATCH, SEQ, HID) and boundary.dtype == "float32" and boundary.offloaded
        assert boundary.nbytes == region.offloaded_bytes == BATCH * SEQ * HID * itemsize
        assert "modeling_llama.py:" in boundary.source


def test_without_offload_the_boundary_stays_on_the_device() -> None:
    report = fxckpt.explain(stack(every_n=2))
    first = only(report).regions[0]
    (boundary,) = first.boundaries
    assert not boundary.offloaded and report.offloaded_bytes == 0
    (saved,) = (v for v in first.saved if v.why.value == "boundary")
    assert saved.saved_bytes == boundary.nbytes == 4 * 8 * 4 and saved.name == boundary.node


@pytest.mark.parametrize("name", ["llama", "swin", "plain_shared_loop", "plain_conv_tower_bn"])
def test_parts_sum_up_to_the_totals(name: str) -> None:
    t, *_ = stepped(name, every_n=2, offload=True)
    graph = only(fxckpt.explain(t))
    parts = [*graph.regions, *graph.outside]
    assert sum(p.saved_bytes for p in parts) == graph.saved_bytes
    assert sum(p.offloaded_bytes for p in parts) == graph.offloaded_bytes
    assert sum(r.recomputed_flops for r in graph.regions) == graph.recomputed_flops
    for region in graph.regions:
        assert sum(v.saved_bytes for v in region.saved) == region.saved_bytes
        for value in region.saved:
            assert value.offloaded_bytes == 0 or value.saved_bytes == 0


def test_a_storage_counts_once() -> None:
    t, *_ = stepped("plain_token_model", every_n=2)  # q, k and v are three views of one storage
    (kept, *_) = (r for r in only(fxckpt.explain(t)).regions if r.treatment == "keep")
    qkv = next(v for v in kept.saved if v.saved_bytes == BATCH * SEQ * 3 * HID * 4)
    sharing = [v for v in kept.saved if v.shares == qkv.name]
    assert len(sharing) == 2 and all(v.shape == qkv.shape == (BATCH, 4, SEQ, HID // 4) for v in sharing)
    assert all(v.saved_bytes == 0 for v in kept.saved if v.shares is not None)


# ---- why ----------------------------------------------------------------------------------------------------------


def test_reasons() -> None:
    graph = only(fxckpt.explain(stack(every_n=2)))
    recomputed, kept = graph.regions[2], graph.regions[1]
    assert {v.why.value for v in recomputed.saved} == {"boundary", "exit"}
    assert {v.why.value for v in kept.saved} == {"kept"}
    assert {v.why.value for v in graph.outside} == {"outside"}
    assert all("golden/model.py:" in v.source for v in (*recomputed.saved, *kept.saved, *graph.outside))


class Decaying(Block):
    """A block that reads a buffer and changes it."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("scale", torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x + self.scale)
        with torch.no_grad():
            self.scale.mul_(0.9)
        return out


@on_cpu
def test_a_copy_of_what_the_step_changes_is_named() -> None:
    model = Stack(depth=2)
    model.blocks = nn.ModuleList(Decaying(8) for _ in range(2))
    t = fxckpt.transform(model, layers=[Decaying])
    x = torch.randn(4, 8)
    held = held_for_backward(lambda: t(x))
    graph = only(fxckpt.explain(t))
    states = [v for v in (*graph.outside, *(v for r in graph.regions for v in r.saved)) if v.why.value == "state"]
    assert [v.saved_bytes for v in states] == [8 * 4, 8 * 4]
    assert graph.saved_bytes == held


def test_random_states_are_named() -> None:
    dropout = only(fxckpt.explain(stepped("plain_token_model", True, every_n=2)[0]))
    for region in dropout.regions:
        states = [v for v in region.saved if v.why.value == "random"]
        assert bool(states) is (region.treatment == "recompute")
        assert all(v.dtype == "uint8" for v in states)


def test_a_nested_region_says_what_it_is_in() -> None:
    graph = only(fxckpt.explain(stepped("swin", every_n=2)[0]))
    inside = {r.name: r.inside for r in graph.regions}
    assert inside["swin.encoder.layers.0.blocks.1"] == "swin.encoder.layers.0"
    assert inside["swin.encoder.layers.1.blocks.0"] is None
    nested = next(r for r in graph.regions if r.inside)
    assert nested.saved == () and nested.recomputed_flops > 0


class Selective(Block):
    """A block with a checkpoint of its own, which saves matrix products."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        contexts = partial(create_selective_checkpoint_contexts, saves_products)
        return checkpoint(super().forward, x, use_reentrant=False, context_fn=contexts)


def saves_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    products = op in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if products else CheckpointPolicy.PREFER_RECOMPUTE


def test_values_of_the_models_own_policy() -> None:
    model = Stack()
    model.blocks = nn.ModuleList(Selective(8) for _ in range(2))
    t = fxckpt.transform(model, layers=[Selective])
    t(torch.randn(4, 8)).backward()
    for region in only(fxckpt.explain(t)).regions:
        assert [v.shape for v in region.saved if v.why.value == "policy"] == [(4, 32)]


# ---- several graphs -----------------------------------------------------------------------------------------------


def test_other_shapes_are_alternatives() -> None:
    torch.manual_seed(0)
    t = fxckpt.transform(Stack(), layers=[Block])
    t(torch.randn(4, 8)).backward()
    first = fxckpt.explain(t).saved_bytes
    t(torch.randn(8, 8)).backward()
    report = fxckpt.explain(t)
    assert [g.current for g in report.graphs] == [False, True]
    assert report.saved_bytes == report.graphs[1].saved_bytes == 2 * first
    assert report.graphs[1].inputs == ("float32[8, 8]",)


class Broken(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.blocks[1](self.blocks[0](self.stem(x)))
        torch._dynamo.graph_break()
        return self.head(self.blocks[3](self.blocks[2](h))).square().mean()


@on_cpu
def test_graphs_of_one_call_add_up() -> None:
    t = fxckpt.transform(Broken(), layers=[Block])
    x = torch.randn(4, 8)
    held = held_for_backward(lambda: t(x))
    report = fxckpt.explain(t)
    assert len(report.current) == len(report.graphs) == 2
    assert report.saved_bytes == held
    (earlier,) = (v for r in report.graphs[1].regions for v in r.saved if v.why.value == "earlier")
    assert earlier.saved_bytes == 4 * 8 * 4 and "model.py:" in earlier.source


def test_a_compiled_model_is_explained() -> None:
    t = fxckpt.transform(Stack(), every_n=2, layers=[Block], offload=True)
    compiled = torch.compile(t)
    compiled(torch.randn(4, 8)).backward()
    report = fxckpt.explain(compiled)
    assert report.offloaded_bytes == 3 * 4 * 8 * 4 and report.saved_bytes < report.baseline_saved_bytes
    assert len(fxckpt.graphs(compiled)) == 1


# ---- FLOPs --------------------------------------------------------------------------------------------------------

ON_CPU = {  # PyTorch counts no attention on the CPU
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *a, **kw: sdpa_flop_count(q, k, v),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda g, q, k, v, *a, **kw: sdpa_backward_flop_count(g, q, k, v)
    ),
}


@pytest.mark.parametrize("name", ["llama", "gpt2_8layers", "plain_token_model", "plain_conv_tower_bn"])
def test_flops_are_those_of_the_eager_step(name: str) -> None:
    t, model, batch = stepped(name, every_n=2)
    with FlopCounterMode(display=False, custom_mapping=ON_CPU) as counter:
        get_loss(model(**batch)).backward()
    assert fxckpt.explain(t).flops == pytest.approx(counter.get_total_flops(), rel=0.01)


@pytest.mark.parametrize("every_n", [1, 2])
def test_recomputed_flops_of_a_known_model(every_n: int) -> None:
    t, *_ = stepped("plain_token_model", every_n=every_n)
    report = fxckpt.explain(t)
    tokens = BATCH * SEQ
    attention = 2 * 2 * tokens * SEQ * HID
    up_to_down = 2 * tokens * HID * (3 * HID + HID + 2 * HID) + attention
    down = 2 * tokens * 2 * HID * HID  # nothing in the backward reads the result of the last product of a block
    for region in only(report).regions:
        assert region.flops == up_to_down + down
        assert region.recomputed_flops == (up_to_down if region.treatment == "recompute" else 0)
    assert report.recomputed_flops == LAYERS // every_n * up_to_down
    if every_n == 1:
        assert 0.2 < report.recomputed_flops / report.flops < 1 / 3


# ---- export and print ---------------------------------------------------------------------------------------------


def test_json_has_all_figures() -> None:
    report = fxckpt.explain(stack(every_n=2, offload=True))
    data = json.loads(report.to_json())
    assert data == report.to_dict()
    totals = ("saved_bytes", "offloaded_bytes", "flops", "recomputed_flops", "baseline_saved_bytes")
    assert all(data[k] == getattr(report, k) > 0 for k in totals)
    assert data["model"] == "Stack" and data["settings"]["every_n"] == 2 and data["settings"]["offload"] == "cpu"
    assert data["settings"]["layers"] == ["Block"]
    (graph,) = data["graphs"]
    assert [r["name"] for r in graph["regions"]] == [f"blocks.{i}" for i in range(5)], "data stays unfolded"
    assert graph["regions"][0]["boundaries"][0]["shape"] == [4, 8]
    assert graph["regions"][0]["saved"][0]["why"] == "boundary"
    assert "indent" not in report.to_json(indent=None) and "\n" not in report.to_json(indent=None)


@on_cpu
def test_printed_tables() -> None:
    text = str(fxckpt.explain(stack(every_n=2, offload=True)))
    assert_golden("explain.txt", re.sub(r"\d+\.\d ms", "#.# ms", text))


def test_print_and_rich_print_give_the_tables() -> None:
    report = fxckpt.explain(stack(every_n=2))
    text = io.StringIO()
    Console(file=text, width=120).print(report)
    assert "\n".join(line.rstrip() for line in text.getvalue().splitlines()) == str(report)
    assert "blocks.{2,4}" in str(report) and max(map(len, str(report).splitlines())) <= 120
    assert "1 graphs" in repr(report)


def test_several_graphs_are_listed() -> None:
    t = fxckpt.transform(Broken(), layers=[Block])
    t(torch.randn(4, 8)).backward()
    text = str(fxckpt.explain(t))
    assert "captured graphs" in text and "rest of forward" in text and "earlier" in text


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        (["model.layers.0"], "model.layers.0"),
        (["model.layers.0", "model.layers.2", "model.layers.4"], "model.layers.{0,2,4}"),
        ([f"a.{i}.b" for i in range(4)], "a.{0-3}.b"),
        ([f"a.{i}" for i in range(0, 32, 2)], "a.{0,2,...,30}"),
        ([f"a.{i}" for i in range(36) if i % 3], "a.{1,2,4,...,34,35}"),
        (["s.0.b.0", "s.0.b.1", "s.1.b.0"], "s.0.b.{0,1}, s.1.b.0"),
        (["encoder.0", "decoder.0"], "encoder.0, decoder.0"),
        (["blocks.0#1", "blocks.0#2", "blocks.0#3"], "blocks.0#{1-3}"),
        (["head"], "head"),
        ([], ""),
    ],
    ids=str,
)
def test_names_fold(names: list[str], folded: str) -> None:
    assert fold_names(names) == folded


def test_units() -> None:
    assert [bytes_text(n) for n in (0, 1023, 1024, 1536, 1 << 20, (1 << 20) - 1, 3 << 30)] == [
        "0 B", "1023 B", "1.0 KiB", "1.5 KiB", "1.0 MiB", "1.0 MiB", "3.0 GiB"
    ]  # fmt: skip
    assert [flops_text(n) for n in (0, 999, 1000, 999_999, 2_500_000_000)] == [
        "0 FLOP", "999 FLOP", "1.0 kFLOP", "1.0 MFLOP", "2.5 GFLOP"
    ]  # fmt: skip
    assert [short_type(t) for t in ("float32[2, 3]", "bfloat16[]", "bool[1]", "int64[4]", "float8_e4m3fn[2]")] == [
        "f32[2, 3]", "bf16[]", "b8[1]", "i64[4]", "float8_e4m3fn[2]"
    ]  # fmt: skip


def test_transfer_nodes_have_readable_names() -> None:
    t, *_ = stepped("llama", every_n=3, offload=True)
    (record,) = fxckpt.graphs(t)
    forward = record.forward.print_readable(print_output=False)
    backward = record.backward.print_readable(print_output=False)
    for name in ("layers_0_input", "layers_3_input"):
        assert f"offload_{name}:" in forward.replace(" ", "") and f"reload_{name}:" in backward.replace(" ", "")


# ---- the graph of regions -----------------------------------------------------------------------------------------


def test_networkx_graph() -> None:
    t = stack(every_n=2, offload=True)
    graph = fxckpt.to_networkx(t)
    assert isinstance(graph, networkx.DiGraph) and networkx.is_directed_acyclic_graph(graph)
    blocks = [f"blocks.{i}" for i in range(5)]
    assert list(graph) == ["inputs", "before", *blocks, "after blocks.4", "outputs"]
    chain = list(graph)
    assert set(graph.edges) == set(pairwise(chain))
    figures = only(fxckpt.explain(t))
    for region in figures.regions:
        node = graph.nodes[region.name]
        assert node["treatment"] == region.treatment and node["inside"] == ""
        for key in ("nodes", "saved_bytes", "offloaded_bytes", "flops", "recomputed_flops"):
            assert node[key] == getattr(region, key)
    assert sum(n["saved_bytes"] for _, n in graph.nodes(data=True)) == figures.saved_bytes
    (tensor,) = graph.edges["blocks.0", "blocks.1"]["tensors"]
    assert tensor["type"] == "float32[4, 8]" and tensor["bytes"] == 4 * 8 * 4
    assert graph.edges["blocks.0", "blocks.1"]["bytes"] == 4 * 8 * 4


def test_networkx_graph_of_a_record_with_masks_and_nesting() -> None:
    t, *_ = stepped("llama", every_n=2)
    graph = fxckpt.to_networkx(fxckpt.graphs(t)[0])
    rotary = {tensor["name"] for tensor in graph.edges["before", "model.layers.1"]["tensors"]}
    assert rotary and not any(n.startswith("primals") for n in rotary)
    nested = fxckpt.to_networkx(stepped("swin", every_n=2)[0])
    assert nested.nodes["swin.encoder.layers.0.blocks.0"]["inside"] == "swin.encoder.layers.0"


# ---- errors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ask", [fxckpt.graphs, fxckpt.explain, fxckpt.to_networkx])
def test_asking_too_early_says_what_to_do(ask: Callable[[nn.Module], Any]) -> None:
    t = fxckpt.transform(Stack(), layers=[Block])
    with pytest.raises(fxckpt.CaptureError, match="gradients on first"):
        ask(t)
    with torch.no_grad():
        t(torch.randn(4, 8))
    with pytest.raises(fxckpt.CaptureError, match="gradients on first"):
        ask(t)
    with pytest.raises(fxckpt.FxckptError, match="not a transformed model"):
        ask(Stack())


def test_one_of_several_graphs_must_be_chosen() -> None:
    t = fxckpt.transform(Broken(), layers=[Block])
    t(torch.randn(4, 8)).backward()
    with pytest.raises(fxckpt.CaptureError, match="choose one"):
        fxckpt.to_networkx(t)
    assert all(fxckpt.to_networkx(r) for r in fxckpt.graphs(t))
