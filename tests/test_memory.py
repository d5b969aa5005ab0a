"""The simulated memory of a step that runs node by node, against what the profiler sees."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx

import fxckpt
from fxckpt import graph as G
from fxckpt.bench.step import TrainingStep
from fxckpt.bench.timeline import measure_timeline
from fxckpt.decide.memory import OF_PARAMETERS, OTHER, RECOMPUTED, SAVED, GraphTimeline, StepGraphs, Value, simulate
from fxckpt.decide.workspace import workspace_nbytes
from fxckpt.models.load import load
from fxckpt.models.spec import ModelSpec
from fxckpt.record import simulate_records
from fxckpt.torch_private import memory_after
from tests.helpers import DEVICE

aten = torch.ops.aten
WIDTHS = {"hidden_size": 128, "intermediate_size": 344, "num_attention_heads": 4}
ENCODER = {**WIDTHS, "vocab_size": 256, "num_hidden_layers": 3}
DECODER = {**ENCODER, "num_key_value_heads": 2}
SPECS = {
    "llama": ModelSpec("llama", batch=2, seq=512, device=DEVICE, overrides=DECODER),
    "gpt2": ModelSpec(
        "gpt2", batch=2, seq=512, device=DEVICE, overrides={"vocab_size": 256, "n_embd": 128, "n_layer": 3, "n_head": 4}
    ),
    "bert": ModelSpec("bert", batch=4, seq=256, device=DEVICE, overrides=ENCODER),
    "t5": ModelSpec(
        "t5",
        batch=4,
        seq=256,
        device=DEVICE,
        overrides={"vocab_size": 256, "d_model": 128, "d_kv": 32, "d_ff": 256, "num_layers": 2, "num_heads": 4},
    ),
    "vit": ModelSpec("vit", batch=8, device=DEVICE, overrides={**WIDTHS, "num_hidden_layers": 3, "image_size": 128}),
    "mixtral": ModelSpec(  # its products of experts count as random to PyTorch's partitioner
        "mixtral", batch=2, seq=512, device=DEVICE, overrides={**DECODER, "num_local_experts": 4}
    ),
    "bert with dropout": ModelSpec("bert", batch=4, seq=256, device=DEVICE, overrides=ENCODER, dropout=True),
}
SETTINGS: list[dict[str, Any]] = [{}, {"every_n": 2}, {"offload": True}, {"every_n": 2, "offload": "disk"}]


def peak(timelines: list[GraphTimeline]) -> int:
    return max(t.peak_bytes for t in timelines)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_the_peak_is_what_is_measured(name: str, settings: dict[str, Any]) -> None:
    model, batch = load(SPECS[name])
    t = fxckpt.transform(model, verify=True, **settings)
    step = TrainingStep(model, t, batch, seed=0)
    step.timed()
    step.timed()  # some models are captured once more at their second call
    held, measured = step.memory()
    timelines = simulate_records(fxckpt.graphs(t))
    assert abs(peak(timelines) / measured - 1) <= 0.02
    saved = sum(v.nbytes for g in timelines if not g.is_backward for v in g.values if v.kind == SAVED)
    assert abs(saved / held - 1) <= 0.02


def test_a_timeline_without_a_compiler() -> None:
    timeline = measure_timeline(SPECS["llama"], "fxckpt-plain@1")
    forward, backward = timeline.graphs
    assert not forward.is_backward and backward.is_backward
    assert abs(max(g.peak_bytes for g in timeline.graphs) / timeline.measured_bytes - 1) <= 0.02
    assert {v.kind for v in backward.values} == {SAVED, RECOMPUTED, OF_PARAMETERS, OTHER}
    boundaries = [v for v in backward.values if v.kind == SAVED and v.nbytes == 2 * 512 * 128 * 4]
    assert len(boundaries) >= 3 and all("modeling_llama.py" in v.source or v.module for v in boundaries)
    for graph in timeline.graphs:
        assert all(0 <= v.first <= v.last < len(graph.modules) for v in graph.values)


@pytest.mark.parametrize("gradient_as_made", [True, False], ids=["gradient laid out alike", "otherwise"])
@pytest.mark.parametrize(("queries", "keys"), [(100, 100), (200, 300), (800, 600)])
def test_attention_needs_a_block_of_scores_for_each_thread(queries: int, keys: int, gradient_as_made: bool) -> None:
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    q = torch.randn(2, queries, 3, 16).transpose(1, 2)
    k, v = (torch.randn(2, keys, 3, 16).transpose(1, 2) for _ in range(2))
    out, sums = forward(q, k, v)
    gradient = torch.randn_like(out) if gradient_as_made else torch.randn(out.shape)
    for operator_, given in ((forward, (q, k, v)), (backward, (gradient, q, k, v, out, sums, 0.0, False))):
        graph = fx.Graph()
        inputs = [graph.placeholder(f"x{i}") if isinstance(x, torch.Tensor) else x for i, x in enumerate(given)]
        for node, value in zip(inputs, given, strict=True):
            if isinstance(node, fx.Node):
                G.set_value(node, value)
        call = graph.call_function(operator_, tuple(inputs))
        made = operator_(*given)
        G.set_value(call, made)
        with torch.profiler.profile(profile_memory=True) as profile, torch.profiler.record_function("call"):
            made = operator_(*given)
        left, most = memory_after(profile, "call")
        assert workspace_nbytes(call) == most - left


# ---- by hand ------------------------------------------------------------------------------------------------------


def spans(graph: fx.Graph, resident: set[fx.Node]) -> dict[tuple[str, int | None], tuple[int, int, int]]:
    """Bytes, first and last position of each storage, by the node that makes it and the number of its result."""
    found = G.lifetimes(list(graph.nodes), resident)
    return {(node.name, part): (life.nbytes, life.first, life.last) for (node, part), life in found.items()}


def test_results_of_one_operator_go_one_by_one() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    both = graph.call_function(aten.aminmax.default, (x,))
    low, high = (graph.call_function(operator.getitem, (both, i)) for i in range(2))
    a = graph.call_function(aten.exp.default, (low,))
    b = graph.call_function(aten.mul.Tensor, (a, high))
    graph.output(b)
    for node, result in ((x, 8), (low, 2), (high, 3), (a, 4), (b, 5)):
        G.set_value(node, torch.empty(result))
    G.set_value(both, (torch.empty(2), torch.empty(3)))
    assert spans(graph, {x}) == {
        ("aminmax_default", 0): (8, 1, 4),
        ("aminmax_default", 1): (12, 1, 5),
        ("exp_default", None): (16, 4, 5),
        ("mul_tensor", None): (20, 5, 6),
    }


def test_what_is_changed_in_place_and_views_are_no_memory() -> None:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    a = graph.call_function(aten.exp.default, (y,))
    half = graph.call_function(aten.slice.Tensor, (a, 0, 0, 2))
    changed = graph.call_function(aten.copy_.default, (half, y))
    b = graph.call_function(aten.add.Tensor, (changed, y))
    into = graph.call_function(aten.copy_.default, (x, b))
    graph.output(into)
    for node in (x, y, a, half, changed, b, into):
        G.set_value(node, torch.empty(4))
    assert spans(graph, {x}) == {
        ("y", None): (16, 1, 5),
        ("exp_default", None): (16, 2, 5),
        ("add_tensor", None): (16, 5, 6),
    }
    assert G.returned(graph) == [(x, None)]


def a_step() -> StepGraphs:
    """Forward: a = exp(x), loss = sum(a * w); saved are two views of a. Backward: the gradients of w and x."""
    forward, backward = fx.Graph(), fx.Graph()
    w, x = forward.placeholder("w"), forward.placeholder("x")
    a = forward.call_function(aten.exp.default, (x,))
    one, two = (forward.call_function(aten.view.default, (a, [n])) for n in (4, -1))
    product = forward.call_function(aten.mul.Tensor, (a, w))
    loss = forward.call_function(aten.sum.default, (product,))
    forward.output((loss, w, one, two))
    saved = [backward.placeholder(n.name) for n in (w, one, two)]
    tangent = backward.placeholder("tangents_1")
    grown = backward.call_function(aten.expand.default, (tangent, [4]))
    to_w = backward.call_function(aten.mul.Tensor, (grown, saved[1]))
    partly = backward.call_function(aten.mul.Tensor, (grown, saved[0]))
    to_x = backward.call_function(aten.mul.Tensor, (partly, saved[2]))
    backward.output((to_w, to_x))
    for node in (w, x, a, one, two, product, *saved, grown, to_w, partly, to_x):
        G.set_value(node, torch.empty(4))
    for node in (loss, tangent):
        G.set_value(node, torch.empty(()))
    return StepGraphs(forward, backward, 1)


def test_a_step_by_hand() -> None:
    forward, backward = simulate([a_step()])
    assert [(v.name, v.kind, v.nbytes, v.first, v.last) for v in forward.values] == [
        ("exp_default", SAVED, 16, 2, 6),
        ("mul_tensor", OTHER, 16, 5, 6),
        ("sum_default", OTHER, 4, 6, 6),
    ]
    assert forward.totals == [0, 0, 16, 16, 16, 32, 36]
    assert [(v.name, v.kind, v.nbytes, v.first, v.last) for v in backward.values] == [
        ("tangents_1", OTHER, 4, 3, 6),
        ("mul_tensor", OF_PARAMETERS, 16, 5, 7),
        ("mul_tensor_1", OTHER, 16, 6, 7),
        ("mul_tensor_2", OF_PARAMETERS, 16, 7, 7),
        ("exp_default", SAVED, 16, 0, 7),
    ]
    assert backward.totals[-1] == backward.peak_bytes == 64


def test_graphs_of_one_step_hold_for_each_other() -> None:
    first, second = a_step(), a_step()
    second = StepGraphs(second.forward, second.backward, 1, activations={"x"})
    timelines = simulate([first, second])
    assert [t.is_backward for t in timelines] == [False, False, True, True]
    assert [t.around for t in timelines] == [0, 16, 16, 16], (
        "what the first saved; then the gradient of w, not that of x"
    )


def test_a_timeline_adds_up() -> None:
    values = (Value("a", SAVED, 5, "", "", 0, 1), Value("b", OTHER, 7, "", "", 1, 2))
    timeline = GraphTimeline(False, ("", "", ""), values, around=100)
    assert timeline.totals == [105, 112, 107] and timeline.peak == 1 and timeline.peak_bytes == 112
    assert timeline.bytes_by_kind()[SAVED] == [105, 105, 100]
    assert GraphTimeline(True, (), ()).peak_bytes == 0
