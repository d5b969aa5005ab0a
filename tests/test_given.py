"""Layers that are graphs of their own, as behind graph breaks: the activations that they are given leave, too."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxckpt
from fxckpt.config import Offload
from fxckpt.runtime import transfer
from tests.helpers import DEVICE, assert_close, assert_same, measured, train_step
from tests.hostile import hostile
from tests.situations.models import Batch, Residual

Compiler = Callable[[nn.Module], Any]
COMPILERS: dict[str, Compiler] = {
    "plain": lambda t: t,
    "aot_eager": lambda t: torch.compile(t, backend="aot_eager"),
    "inductor": torch.compile,
}


class Apart(nn.Module):
    """Dynamo runs the loop as Python, and captures each block by itself."""

    def __init__(self, blocks: int = 4, width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.blocks = nn.ModuleList(self.block(width) for _ in range(blocks))

    def block(self, width: int) -> nn.Module:
        return Residual(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.stem(x)
        for block in self.blocks:
            h = self.step(block, h)
            torch._dynamo.graph_break()
        return h.square().mean()

    def step(self, block: nn.Module, h: torch.Tensor) -> torch.Tensor:
        return block(h)  # type: ignore[no-any-return]


def batch(width: int = 64, rows: int = 32) -> Batch:
    return {"x": torch.randn(rows, width, device=DEVICE)}


def transformed(model: nn.Module, **settings: Any) -> nn.Module:
    return fxckpt.transform(model, **{"layers": "blocks.*", "offload": True, "verify": True, **settings})


def check(model: nn.Module, compiler: str = "plain", steps: int = 2, **settings: Any) -> fxckpt.TransferStats:
    """Figures of a step whose numbers are the model's, bit for bit."""
    torch.manual_seed(0)
    model, given = model.to(DEVICE), batch()
    t = transformed(model, **settings)
    run = COMPILERS[compiler](t)
    for _ in range(steps):
        compare = assert_close if compiler == "inductor" else assert_same
        compare(train_step(run, model, given), train_step(model, model, given))
    return fxckpt.stats(t)


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize(("every_n", "moved"), [(1, 4), (2, 2)])
def test_what_each_recomputed_layer_starts_from_leaves(compiler: str, every_n: int, moved: int) -> None:
    stats = check(Apart(), compiler, every_n=every_n)
    assert (stats.offloads, stats.reloads, stats.offloaded_bytes) == (moved, moved, moved * 32 * 64 * 4)


def test_on_the_hostile_device() -> None:
    with hostile():
        assert check(Apart()).offloads == 4


@pytest.mark.parametrize("compiler", ["plain", "inductor"])
@pytest.mark.parametrize(
    ("prefetch", "order"), [(0, "RWRWRWRW"), (1, "RRWRWRWW"), (2, "RRRWRWWW"), (9, "RRRRWWWW")], ids=str
)
def test_reloads_begin_while_a_later_graph_is_at_work(compiler: str, prefetch: int, order: str) -> None:
    letters = {"reload": "R", "wait_reload": "W"}
    with hostile() as tier:
        stats = check(Apart(), compiler, steps=1, offload=Offload(prefetch=prefetch))
    assert "".join(letters.get(verb, "") for verb, _ in tier.log) == order
    assert stats.reloads == 4


def test_a_second_backward_finds_what_it_needs() -> None:
    torch.manual_seed(0)
    model, given = Apart().to(DEVICE), batch()
    t = transformed(model)
    with hostile() as tier:
        loss = t(**given)
        loss.backward(retain_graph=True)
        loss.backward()
    twice = {n: p.grad for n, p in model.named_parameters()}
    want = train_step(model, model, given).grads
    assert_close(twice, {n: None if g is None else 2 * g for n, g in want.items()})
    assert [verb for verb, _ in tier.log].count("reload") == 8


def test_a_step_that_is_given_up_leaves_nothing_behind() -> None:
    torch.manual_seed(0)
    model, given = Apart().to(DEVICE), batch()
    t = transformed(model)
    with hostile() as tier:
        for _ in range(2):
            loss = t(**given)
            torch.autograd.grad(loss, list(model.blocks[3].parameters()))  # one layer's backward
            assert [verb for verb, _ in tier.log][-3:] == ["reload", "reload", "wait_reload"], "one is ahead"
            assert len(transfer._live) == 3
            del loss
            assert not transfer._live


class Shortened(Apart):
    """Blocks are given a part of what the one before gave, whose rows are further apart than they are long."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.stem(x)
        for block in self.blocks:
            h = self.step(block, h)[:, 1:]
            torch._dynamo.graph_break()
        return h.square().mean()


@pytest.mark.parametrize("compiler", COMPILERS)
def test_activations_with_gaps_and_lengths_that_vary(compiler: str) -> None:
    torch.manual_seed(0)
    model = Shortened().to(DEVICE)
    run = COMPILERS[compiler](t := transformed(model))
    for length in (7, 9, 12):
        given = {"x": torch.randn(4, length, 64, device=DEVICE)}
        assert_close(train_step(run, model, given), train_step(model, model, given))
        assert fxckpt.stats(t).offloads == 4


class TwoInputs(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Linear(2 * width, width)

    def forward(self, h: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        return h + self.mix(torch.cat([h, memory.tanh()], -1)).tanh()


class Decoder(Apart):
    """Each block also reads what the stem made, as a decoder's layers read the encoder's states."""

    def block(self, width: int) -> nn.Module:
        return TwoInputs(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.memory = self.stem(x).sin()
        return super().forward(x)

    def step(self, block: nn.Module, h: torch.Tensor) -> torch.Tensor:
        return block(h, self.memory)  # type: ignore[no-any-return]


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("tier", [contextlib.nullcontext, hostile])
def test_what_several_graphs_are_given_goes_once(compiler: str, tier: Callable[[], Any]) -> None:
    with tier():
        stats = check(Decoder(), compiler)
    assert stats.offloads == 4 + 1, "four inputs, and one memory for all"
    assert stats.reloads == 4 + 4
    assert stats.host_bytes == (5 * 32 * 64 * 4 if tier is contextlib.nullcontext else 0)


class Changing(Decoder):
    """The memory is changed in place between the blocks, as autograd allows where nobody saved it."""

    def step(self, block: nn.Module, h: torch.Tensor) -> torch.Tensor:
        out = super().step(block, h)
        self.memory += 1
        return out


def test_a_changed_activation_goes_anew() -> None:
    assert check(Changing()).offloads == 4 + 4


class Returning(nn.Module):
    """Returns what it is given, beside a result."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inner(h.tanh()).tanh(), h.view(-1, h.shape[-1])


class WithReturning(Apart):
    def block(self, width: int) -> nn.Module:
        return Returning(width)

    def step(self, block: nn.Module, h: torch.Tensor) -> torch.Tensor:
        out, given = block(h)
        return out + given  # type: ignore[no-any-return]


def test_what_the_graph_returns() -> None:
    check(WithReturning())


class InPlace(nn.Module):
    """Changes what it is given."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        made = self.inner(h.tanh()).tanh()
        h.add_(made)
        return h * 2


class WithInPlace(Apart):
    def block(self, width: int) -> nn.Module:
        return InPlace(width)

    def step(self, block: nn.Module, h: torch.Tensor) -> torch.Tensor:
        return block(h + 0)  # type: ignore[no-any-return]


@pytest.mark.parametrize("compiler", ["plain", "aot_eager"])
def test_what_the_graph_changes_keeps_its_first_value(compiler: str) -> None:
    check(WithInPlace(), compiler)


class Stemless(Apart):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.stem = nn.Identity()
        return super().forward(x)


def test_the_first_layer_is_given_a_leaf() -> None:
    """As behind a frozen embedding whose result was told to require a gradient; the layers share one graph."""
    model, given = Stemless().to(DEVICE), batch()
    t = transformed(model)
    given["x"].requires_grad_()
    train_step(t, model, given)
    assert fxckpt.stats(t).offloads == 4
    assert len([r for r in fxckpt.graphs(t) if r.regions]) == 1


@pytest.mark.parametrize("compiler", ["plain", "inductor"])
def test_kept_layers(compiler: str) -> None:
    stats = check(Apart(), compiler, every_n=2, offload=Offload(kept=True))
    assert stats.offloads > 4, "two that layers start from, two that kept ones were given, and what these save"


def test_memory_falls() -> None:
    """To a disk, since host copies of a CPU's activations lie in the same memory."""
    width, rows, blocks = 256, 2048, 12
    torch.manual_seed(0)
    model, given = Apart(blocks, width).to(DEVICE), batch(width, rows)

    def held(**settings: Any) -> int:
        t = transformed(model, **settings)
        train_step(t, model, given)
        loss, memory = measured(lambda: t(**given))
        assert loss.requires_grad  # and so is alive
        return memory.held

    kept, moved = held(offload=False), held(offload="disk")
    assert kept - moved >= (blocks - 0.1) * rows * width * 4
