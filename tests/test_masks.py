"""Attention whose mask is known while the graph is rewritten needs none; any other mask stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn.functional import scaled_dot_product_attention

import fxckpt
from fxckpt import graph as G
from fxckpt.rewrite import masks
from tests.helpers import DEVICE, assert_close, assert_same, train_step
from tests.zoo import build

Mask = Callable[[torch.Tensor], "torch.Tensor | None"]


class Attention(nn.Module):
    def __init__(self, mask: Mask, keys: int = 0) -> None:
        super().__init__()
        self.mask, self.keys = mask, keys
        self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = x[:, : self.keys] if self.keys else x
        heads = [m(y).unflatten(-1, (4, 8)).transpose(1, 2) for m, y in ((self.q, x), (self.k, seen), (self.v, seen))]
        out = scaled_dot_product_attention(*heads, attn_mask=self.mask(x))
        return x + out.transpose(1, 2).flatten(2)


class Model(nn.Module):
    def __init__(self, mask: Mask, keys: int = 0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 32)
        self.layers = nn.ModuleList(Attention(mask, keys) for _ in range(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def positions(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    i = torch.arange(x.shape[1], device=x.device)
    return i[:, None], i[None]


def causal(x: torch.Tensor) -> torch.Tensor:
    q, k = positions(x)
    return (k <= q).expand(x.shape[0], 1, -1, -1)


def added(x: torch.Tensor) -> torch.Tensor:
    q, k = positions(x)
    return torch.zeros(len(q), len(q), device=x.device).masked_fill(k > q, float("-inf"))


def everything(x: torch.Tensor) -> torch.Tensor:
    q, k = positions(x)
    return (k - q) < 1000


def window(x: torch.Tensor) -> torch.Tensor:
    q, k = positions(x)
    return (k <= q) & (q - k < 4)


def smaller(x: torch.Tensor) -> torch.Tensor:
    q, k = positions(x)
    return torch.zeros(len(q), len(q), device=x.device).masked_fill(k > q, -1e4)


def of_the_data(x: torch.Tensor) -> torch.Tensor:
    q, k = positions(x)
    return (k <= q) & (x[:, None, :1, :1] < 1e9)


def wide(x: torch.Tensor) -> torch.Tensor:
    q, k = positions(x)
    return (k <= q)[:, :6]


def ids(length: int = 8) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {"ids": torch.randint(0, 16, (2, length), device=DEVICE)}


def model_of(mask: Mask, keys: int = 0) -> Model:
    torch.manual_seed(0)
    return Model(mask, keys).to(DEVICE)


def attention(graph: fx.Graph) -> list[tuple[bool, bool]]:
    """For each attention operator: whether it has a mask, and whether it is told that it is causal."""
    found = []
    for node in graph.nodes:
        name = masks._mask_argument(node)
        if name:
            found.append((G.argument(node, name) is not None, bool(G.argument(node, "is_causal"))))
    return found


def run(mask: Mask, keys: int = 0) -> tuple[list[tuple[bool, bool]], fxckpt.graph.Any]:
    model = model_of(mask, keys)
    t = fxckpt.transform(model, layers=Attention, verify=True)
    got = train_step(t, model, ids())
    same = model_of(mask, keys)
    assert_close(got, train_step(same, same, ids()))
    (record,) = fxckpt.graphs(t)
    return [*attention(record.forward.graph), *attention(record.backward.graph)], record


@pytest.mark.parametrize("mask", [causal, added])
def test_a_causal_mask_is_dropped(mask: Mask) -> None:
    found, record = run(mask)
    assert len(found) == 9 and set(found) == {(False, True)}  # forward, recompute and gradient of three layers
    text = f"{record.forward.code}{record.backward.code}"
    assert "arange" not in text and "where" not in text


def test_a_mask_that_hides_nothing_is_dropped() -> None:
    found, _ = run(everything)
    assert set(found) == {(False, False)}


@pytest.mark.parametrize("mask", [window, smaller, of_the_data])
def test_any_other_mask_stays(mask: Mask) -> None:
    found, _ = run(mask)
    assert set(found) == {(True, False)}


def test_causal_of_fewer_keys_than_queries_stays() -> None:
    found, _ = run(wide, keys=6)
    assert set(found) == {(True, False)}


def test_no_mask_and_no_attention_are_left_alone() -> None:
    found, _ = run(lambda x: None)
    assert set(found) == {(False, False)}


def test_a_mask_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[fx.Node] = []
    look = masks._look_at

    def counted(mask: fx.Node) -> Any:
        looked.append(mask)
        return look(mask)

    monkeypatch.setattr(masks, "_look_at", counted)
    run(causal)
    assert len(looked) == 1


def test_a_mask_too_large_to_look_at_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "_MOST_BYTES", 63)
    found, _ = run(causal)
    assert set(found) == {(True, False)}


def test_changing_lengths() -> None:
    """With symbolic sizes the mask is not known, and stays; with known ones it is dropped."""
    model = model_of(causal)
    t = fxckpt.transform(model, layers=Attention)
    for length in (8, 12, 16):
        got = train_step(t, model, ids(length))
        same = model_of(causal)
        assert_close(got, train_step(same, same, ids(length)))
    static, dynamic = (attention(r.forward.graph) for r in fxckpt.graphs(t))
    assert set(static) == {(False, True)} and set(dynamic) == {(True, False)}


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_transformers_decoder_needs_no_mask(name: str) -> None:
    """Captured, it makes one, as what decides depends on data; without it the numbers are the same bit for bit."""
    model, batch = build(name)
    batch.pop("attention_mask", None)
    t = fxckpt.transform(model, verify=True)
    got = train_step(t, model, batch)
    model, _ = build(name)
    assert_same(got, train_step(torch.compile(model, backend="aot_eager"), model, batch))
    found = [a for r in fxckpt.graphs(t) if r.regions for a in attention(r.backward.graph)]
    assert found and set(found) == {(False, True)}


def test_numbers_and_nodes_are_told_apart() -> None:
    """``q - 1 >= k`` and ``1 - q >= k`` hide different things, whatever number a node has."""
    graph = fx.Graph()
    known = masks._Known()

    def add(target: Any, *args: Any) -> fx.Node:
        node = graph.call_function(target, args)
        G.set_value(node, torch.empty(4))
        known.see(node)
        return node

    ranges = [add(torch.ops.aten.arange.default, end) for end in (4, 5, 6)]
    first = add(torch.ops.aten.sub.Tensor, ranges[1], 2)
    second = add(torch.ops.aten.rsub.Scalar, ranges[2], 1)
    third = add(torch.ops.aten.sub.Tensor, ranges[1], 2)
    swapped = add(torch.ops.aten.sub.Tensor, 1, ranges[2])
    assert known.number[first] == known.number[third]
    assert len({known.number[n] for n in (first, second, swapped)}) == 3
