"""What a layer's treatment may say beside keep and recompute: values saved all the same, and what leaves the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxckpt
from fxckpt import Treatment
from fxckpt.capture.regions import BoundaryLayer
from fxckpt.config import Offload, make_settings
from fxckpt.decide.policy import decide_layers
from tests.helpers import assert_close, assert_same, train_step
from tests.zoo import build

WIDTH, HEADS, TOKENS = 64, 4, 32


class Block(fxckpt.GradientCheckpointingLayer):
    """A transformer's layer, whose author named one value."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(drop)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.view(*x.shape[:-1], HEADS, -1).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(mixed.transpose(1, 2).reshape(x.shape)))
        hidden = fxckpt.name(F.gelu(self.up(self.norm2(x))), "hidden")
        return x + self.drop(self.down(hidden))


class Net(nn.Module):
    def __init__(self, depth: int = 4, drop: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(drop) for _ in range(depth))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def net(depth: int = 4, drop: float = 0.0) -> tuple[Net, dict[str, Any]]:
    torch.manual_seed(0)
    return Net(depth, drop), {"x": torch.randn(2, TOKENS, WIDTH)}


HIDDEN = 2 * TOKENS * WIDTH * 4
"""Bytes of a hidden state."""


def report(compiled: bool = False, drop: float = 0.0, **given: Any) -> fxckpt.Explanation:
    """What a step saves and recomputes, after its numbers were found to be the original's."""
    model, batch = net(drop=drop)
    torch._dynamo.reset()
    expected = train_step(torch.compile(model) if compiled else model, model, batch)
    t = fxckpt.transform(model, verify=True, **given)
    found = train_step(torch.compile(t) if compiled else t, model, batch)
    (assert_close if compiled else assert_same)(found, expected)
    return fxckpt.explain(t)


def why(told: Any, reason: str) -> list[Any]:
    return [v for g in told.current for r in g.regions for v in r.saved if v.why.value == reason]


# ---- save= ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drop", [0.0, 0.5])
def test_saved_attention_is_not_computed_again(drop: float) -> None:
    plain, saving = report(drop=drop), report(drop=drop, save="attention")
    named = why(saving, "named")
    assert sorted({v.saved_bytes for v in named}) == [2 * HEADS * TOKENS * 4, HIDDEN]  # log-sum-exps, results
    assert len(named) == 8 and not why(plain, "named")
    assert saving.saved_bytes == plain.saved_bytes + sum(v.saved_bytes for v in named)
    attention = 2 * 2 * 2 * TOKENS * TOKENS * WIDTH  # two products, of each sequence
    assert plain.recomputed_flops - saving.recomputed_flops == 4 * attention


def test_grouped_products_of_libraries_are_products() -> None:
    """transformers has one for experts in types that PyTorch's own does not take."""

    def recomputed(**given: Any) -> int:
        model, batch = build("mixtral", False)
        t = fxckpt.transform(model, verify=True, **given)
        t(**batch)
        called = [n for record in fxckpt.graphs(t) for n in record.backward.graph.nodes if n.op == "call_function"]
        operators = [str(part) for n in called for part in (n.target, *n.args)]  # some run under a random state
        return operators.count("transformers.grouped_mm_fallback.default")

    assert recomputed() > recomputed(save="matmul") == 0


def test_an_operator_is_saved_by_its_name() -> None:
    plain, saving = report(), report(save=["addmm"])
    assert {v.name.partition("_")[0] for v in why(saving, "named")} == {"addmm"}
    assert saving.recomputed_flops < plain.recomputed_flops
    assert report(save=["aten.addmm"]).recomputed_flops == saving.recomputed_flops
    assert report(save=["matmul"]).recomputed_flops == saving.recomputed_flops
    assert report(save=["matmul", "attention"]).recomputed_flops == 0


@pytest.mark.parametrize("compiled", [False, True])
def test_a_value_is_saved_by_the_name_its_author_gave(compiled: bool) -> None:
    saving = report(compiled, save="hidden")
    assert [v.saved_bytes for v in why(saving, "named")] == [4 * HIDDEN] * 4


def test_a_name_changes_nothing_outside_a_capture() -> None:
    x = torch.randn(3)
    assert fxckpt.name(x, "x") is x
    compiled = torch.compile(lambda y: fxckpt.name(y * 2, "twice").sum(), backend="aot_eager")
    y = torch.randn(3, requires_grad=True)
    compiled(y).backward()
    assert y.grad is not None and y.grad.tolist() == [2.0] * 3
    with pytest.raises(fxckpt.SettingsError, match="a name is a text"):
        fxckpt.name(x, "")


def test_no_name_stays_in_a_graph() -> None:
    model, batch = net()
    t = fxckpt.transform(model, policy=lambda layer: layer.index < 2)
    t(**batch).backward()
    (record,) = fxckpt.graphs(t)
    for graph in (record.forward.graph, record.backward.graph):
        assert not graph.find_nodes(op="call_function", target=torch.ops.fxckpt.named.default)


@pytest.mark.parametrize("compiled", [False, True])
def test_what_no_layer_computes_cannot_be_saved(compiled: bool) -> None:
    model, batch = net()
    t = fxckpt.transform(model, save=["attention", "flash"])
    with pytest.raises(fxckpt.SettingsError, match=r"save=\['flash'\] .* compute hidden, attention, matmul, aten\."):
        (torch.compile(t, backend="aot_eager") if compiled else t)(**batch)
    with pytest.raises(fxckpt.SettingsError, match="flash"):
        fxckpt.plan(model, batch, save="flash")


@pytest.mark.parametrize("wrong", [[""], 3, [3], {"a": 1}])
def test_save_names_things(wrong: Any) -> None:
    with pytest.raises(fxckpt.SettingsError, match="give texts"):
        fxckpt.transform(net()[0], save=wrong)


def test_each_layer_may_save_something_else() -> None:
    by_layer = [Treatment.KEEP, Treatment(save=("attention",)), Treatment(save=()), Treatment.RECOMPUTE]
    told = report(policy=lambda layer: by_layer[layer.index], save="hidden")
    (graph,) = told.current
    assert [(r.treatment, r.save) for r in graph.regions] == [
        ("keep", ()),
        ("recompute", ("attention",)),
        ("recompute", ()),
        ("recompute", ("hidden",)),
    ]
    assert [len([v for v in r.saved if v.why.value == "named"]) for r in graph.regions] == [0, 2, 0, 1]
    assert "recompute, save attention" in str(told)


@pytest.mark.parametrize("name", ["llama", "bert", "gpt2", "t5", "swin", "whisper", "mixtral", "vit"])
@pytest.mark.parametrize("save", ["attention", "matmul"])
def test_models_keep_their_numbers(name: str, save: str) -> None:
    model, batch = build(name, True)
    expected = train_step(model, model, batch)
    t = fxckpt.transform(model, save=save, offload=Offload(kept=True), verify=True, every_n=2)
    try:
        found = train_step(t, model, batch)
    except fxckpt.SettingsError as error:  # a model without fused attention says so
        assert save == "attention" and "names nothing" in str(error)
        assert name in ("swin", "t5", "bert", "gpt2")  # their own, or with dropout, for which a CPU has no such kernel
        return
    assert_same(found, expected)


# ---- offload, by layer ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", [False, True])
def test_kept_values_leave_the_device_too(compiled: bool) -> None:
    kept = report(compiled, every_n=100, offload=False)
    moved = report(compiled, every_n=100, offload=Offload(kept=True))
    layers = sum(r.saved_bytes for g in kept.current for r in g.regions[1:])
    assert moved.offloaded_bytes >= 0.95 * layers
    assert sum(r.saved_bytes for g in moved.current for r in g.regions) <= 0.1 * layers


def test_saved_values_leave_with_what_a_region_starts_from() -> None:
    stays, moved = report(save="attention"), report(save="attention", offload=True)
    assert moved.offloaded_bytes - 3 * HIDDEN == sum(v.saved_bytes for v in why(stays, "named"))


def test_a_layer_may_stay_on_the_device() -> None:
    told = report(policy=lambda layer: Treatment(offload=layer.index < 2), offload=True)
    (graph,) = told.current
    assert [r.offloaded_bytes for r in graph.regions] == [0, HIDDEN, 0, 0]  # the first starts from the batch


def test_nothing_leaves_without_a_place() -> None:
    with pytest.raises(fxckpt.SettingsError, match=r"'blocks\.0' is to be offloaded, and nobody says where"):
        fxckpt.transform(net()[0], policy=lambda layer: Treatment(offload=True))
    with pytest.raises(fxckpt.SettingsError, match="True or False"):
        Offload(kept=1)  # type: ignore[arg-type]
    with pytest.raises(fxckpt.SettingsError, match="a kept layer saves"):
        Treatment(recompute=False, save=("attention",))


def test_a_storage_travels_once_whatever_views_of_it_are_saved() -> None:
    class Views(fxckpt.GradientCheckpointingLayer):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.a(x)
            turned = h.transpose(-1, -2)
            rows = torch.matmul(h.sin(), turned.tanh()).sum(-1, keepdim=True)
            return rows * h + h.view(-1, WIDTH).cos().view(h.shape)

    model = nn.Sequential(Views(), Views())
    x = torch.randn(2, TOKENS, WIDTH)
    model(x).sum().backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    t = fxckpt.transform(model, policy=lambda layer: False, offload=Offload(kept=True), verify=True)
    t(x).sum().backward()
    for p, g in zip(model.parameters(), expected, strict=True):
        assert torch.equal(p.grad, g)  # type: ignore[arg-type]
    told = fxckpt.explain(t)
    assert told.offloaded_bytes and all(v.shares is None for v in why(told, "kept"))


# ---- what stands where ----------------------------------------------------------------------------------------------


def test_nothing_is_left_open() -> None:
    layers = [BoundaryLayer("a", 0, nn.Identity()), BoundaryLayer("b", 1, nn.Identity())]
    decided = decide_layers(layers, make_settings(every_n=2, offload=True, save=["x"]))
    assert decided == {"a": Treatment(True, ("x",), True), "b": Treatment(False, (), False)}
    assert [t.text for t in decided.values()] == ["recompute, save x, offload", "keep"]
    decided = decide_layers(layers, make_settings(every_n=2, offload={"kept": True}))
    assert decided["b"] == Treatment(False, (), True) and decided["b"].text == "keep, offload"


def test_either_recomputes_as_the_first_that_does() -> None:
    policy = fxckpt.either(lambda layer: False, lambda layer: Treatment(save=("x",)), lambda layer: True)
    assert policy(BoundaryLayer("a", 0, nn.Identity())) == Treatment(save=("x",))


def test_a_plan_keeps_what_each_layer_saves() -> None:
    model, batch = net()
    by_layer = [Treatment.KEEP, Treatment(save=("attention",)), Treatment(save=(), offload=False), Treatment.RECOMPUTE]
    plan = fxckpt.plan(model, batch, policy=lambda layer: by_layer[layer.index], save="hidden", offload=True)
    again = fxckpt.Plan.from_dict(plan.to_dict())
    assert again == plan
    t = fxckpt.transform(model, plan=again)
    t(**batch).backward()
    told = fxckpt.explain(t)
    assert (told.saved_bytes, told.offloaded_bytes) == (plan.saved_bytes, plan.offloaded_bytes)
    assert [layer.decided.text for layer in plan.layers] == [
        "keep",
        "recompute, save attention, offload",
        "recompute",
        "recompute, save hidden, offload",
    ]
