"""Loss and gradients: offload, autocast, layouts, tied and shared weights, a caller's own loss, odd arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxckpt
from tests.helpers import DEVICE, Step, assert_close, assert_same, grads, train_step
from tests.situations.models import Batch, Stack, qwen3, stack, tokens

TIGHT = {"rtol": 1e-4, "atol": 1e-6}
BF16 = {"rtol": 2e-2, "atol": 2e-3}


def test_offload_changes_no_number() -> None:
    """Source: huggingface/transformers#48444 (asked for in #29648, #43597, pytorch/pytorch#158657).

    Rule: loss and all gradients with offload=True are bitwise those of offload=False, and match plain eager training.
    """

    def run(offload: bool) -> Step:
        model = qwen3()
        return train_step(fxckpt.transform(model, every_n=2, offload=offload), model, tokens())

    plain = qwen3()
    want = train_step(plain, plain, tokens())
    on, off = run(True), run(False)
    assert_close(on, want, **TIGHT)
    torch.testing.assert_close(on.loss, want.loss, rtol=1e-5, atol=1e-6)
    assert_same(on, off)


# ---- autocast ----------------------------------------------------------------------------------------------------


class DropoutBlock(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(d, 2 * d), nn.Linear(2 * d, d), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(self.drop(F.relu(self.a(x))))


def dropout_stack() -> tuple[Stack, Batch]:
    return stack(lambda: DropoutBlock(32), n=3, shape=(24, 32))


def test_dropout_under_autocast() -> None:
    """Source: pytorch/pytorch#121966.

    Rule: dropout in checkpointed layers under bf16 autocast: eager equals the plain run with the same seed.
    """
    model, batch = dropout_stack()
    want = train_step(model, model, batch, autocast=True)
    model, batch = dropout_stack()
    t = fxckpt.transform(model, every_n=2, offload=True, layers=[DropoutBlock])
    got = train_step(t, model, batch, autocast=True)
    torch.testing.assert_close(got.loss, want.loss, rtol=1e-2, atol=1e-3)
    assert_close(got, want, **BF16)


def test_dropout_under_autocast_compiled() -> None:
    """Source: pytorch/pytorch#121966. Rule: compiled runs and gives finite gradients."""
    model, batch = dropout_stack()
    t = fxckpt.transform(model, every_n=2, offload=True, layers=[DropoutBlock])
    got = train_step(torch.compile(t), model, batch, autocast=True)
    assert torch.isfinite(got.loss)
    for name, g in got.grads.items():
        assert g is not None and g.dtype == torch.float32 and torch.isfinite(g).all(), name


class SharedBlock(nn.Module):
    """Uses one shared weight twice, and leaves autocast in between."""

    def __init__(self, d: int, shared: nn.Linear) -> None:
        super().__init__()
        self.shared, self.own = shared, nn.Linear(d, d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.own(torch.tanh(self.shared(x)))
        with torch.autocast(x.device.type, enabled=False):
            h = h.float() * 1.5
        return x + self.shared(h)


class SharedNet(Stack):
    def __init__(self, d: int = 32) -> None:
        shared = nn.Linear(d, d)
        super().__init__([SharedBlock(d, shared) for _ in range(4)])
        self.first = shared

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return super().hidden(self.first(x))


def shared_net() -> tuple[SharedNet, Batch]:
    torch.manual_seed(0)
    return SharedNet().to(DEVICE), {"x": torch.randn(16, 32, device=DEVICE)}


@pytest.mark.parametrize("every_n", [1, 2])
def test_autocast_with_a_shared_weight(every_n: int) -> None:
    """Source: pytorch/pytorch#193338, #141896.

    Rule: with shared weights across layers, twice in a layer and outside it, bf16 autocast gradients equal the plain
    run; the recompute uses the forward's autocast state even when backward runs outside it.
    """
    model, batch = shared_net()
    want = train_step(model, model, batch, autocast=True)
    full = train_step(model, model, batch)
    assert any(not torch.equal(want.grads[k], v) for k, v in full.grads.items()), "autocast must matter here"

    model, batch = shared_net()
    t = fxckpt.transform(model, every_n=every_n, offload=True, layers=[SharedBlock])
    got = train_step(t, model, batch, autocast=True)
    torch.testing.assert_close(got.loss, want.loss, rtol=5e-3, atol=1e-4)
    assert_close(got, want, **BF16)


def test_precision_follows_the_call() -> None:
    """Source: pytorch/pytorch#193338. Rule: a call without autocast after one with it computes in full precision."""
    model, batch = shared_net()
    want = train_step(model, model, batch)
    model, batch = shared_net()
    t = fxckpt.transform(model, every_n=1, offload=True, layers=[SharedBlock])
    train_step(t, model, batch, autocast=True)
    assert_close(train_step(t, model, batch), want, **TIGHT)


# ---- logits and a caller's loss ------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", [False, True])
def test_loss_computed_by_the_caller(compiled: bool) -> None:
    """Source: pytorch/pytorch#97436, allenai/OLMo#105.

    Rule: a compiled, transformed causal LM gives eager's loss, logits and gradients, also when the caller computes the
    loss from the logits (no labels passed).
    """

    def step(run: Callable[..., Any], model: nn.Module) -> tuple[torch.Tensor, torch.Tensor, Any]:
        batch = tokens()
        ids = batch.pop("labels")
        out = run(**batch)
        loss = F.cross_entropy(out.logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        return out.logits.detach(), loss.detach(), grads(model)

    plain = qwen3(layers=2)
    want_logits, want_loss, want = step(plain, plain)
    model = qwen3(layers=2)
    t = fxckpt.transform(model, every_n=2, offload=True)
    logits, loss, got = step(torch.compile(t) if compiled else t, model)
    torch.testing.assert_close(logits, want_logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(loss, want_loss, rtol=1e-4, atol=1e-5)
    assert_close(got, want, rtol=1e-3, atol=1e-5)


# ---- layouts -----------------------------------------------------------------------------------------------------


class LayoutBlock(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.w = nn.Linear(d, d)

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        y = x.transpose(0, 1).view(-1)  # only legal while x keeps its transposed layout
        return torch.tanh(self.w(x)) + y.view(x.shape[1], x.shape[0]).transpose(0, 1) * 0.1 + other.mean(0)


class LayoutNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(LayoutBlock(6) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        square = torch.tanh(x)  # 6 x 6
        h = self.blocks[0](square.t(), square)  # transpose and base, one storage
        h = self.blocks[1](h.t().contiguous().t(), square[1:])  # slice with an offset
        h = self.blocks[2](h.t().contiguous().t(), h[:1].expand(9, -1))
        wide = torch.stack([h, h * 2], -1)
        return self.blocks[3](h.t().contiguous().t(), wide[..., 1]).square().mean()


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("every_n", [1, 2])
def test_views_and_strides_at_the_boundary(backend: str | None, every_n: int) -> None:
    """Source: huggingface/trl#5694, #6241, modelscope/ms-swift#10157, pytorch/pytorch#186396, DeepSpeed#8388.

    Rule: layers fed by transposed, sliced, expanded and mutually aliasing tensors, and that rely on the layout (view),
    give eager's gradients with offload.
    """

    def make() -> tuple[LayoutNet, torch.Tensor]:
        torch.manual_seed(0)
        return LayoutNet().to(DEVICE), torch.randn(6, 6, device=DEVICE, requires_grad=True)

    model, want_x = make()
    want = train_step(model, model, {"x": want_x})
    model, x = make()
    t = fxckpt.transform(model, every_n=every_n, offload=True, layers=[LayoutBlock])
    got = train_step(torch.compile(t, backend=backend) if backend else t, model, {"x": x})
    assert_close(got, want, **TIGHT)
    torch.testing.assert_close(x.grad, want_x.grad, **TIGHT)


# ---- tied weights ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_tied_embeddings(backend: str | None) -> None:
    """Source: meta-pytorch/torchtune#1847, huggingface/accelerate#4171.

    Rule: with a tied head the shared weight gets the sum of both gradients, once, and stays tied after a step.
    """
    plain = qwen3(tie_word_embeddings=True)
    assert plain.lm_head.weight is plain.model.embed_tokens.weight
    want = train_step(plain, plain, tokens())
    model = qwen3(tie_word_embeddings=True)
    t = fxckpt.transform(model, every_n=2, offload=True)
    got = train_step(torch.compile(t, backend=backend) if backend else t, model, tokens())
    assert_close(got, want, **TIGHT)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert model.lm_head.weight is model.model.embed_tokens.weight


# ---- arguments that are no tensors -------------------------------------------------------------------------------


class OddBlock(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.w = nn.Linear(d, d)

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None, scale: float, flip: bool, kind: str
    ) -> tuple[torch.Tensor, None, int, torch.Tensor]:
        h = self.w(x)
        h = F.relu(h) if kind == "relu" else torch.tanh(h)
        if mask is not None:
            h = h * mask
        if flip:
            h = -h
        return x + scale * h, None, 3, h.mean()


class OddNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(OddBlock(8) for _ in range(4))

    def forward(
        self,
        x: torch.Tensor,
        mask: torch.Tensor | None = None,
        scale: float = 1.0,
        flip: bool = False,
        kind: str = "relu",
    ) -> torch.Tensor:
        total: Any = 0.0
        for b in self.blocks:
            x, nothing, three, m = b(x, mask, scale, flip, kind)
            assert nothing is None and three == 3
            total = total + three * m
        return x.square().mean() + total


def test_non_tensor_arguments_and_outputs() -> None:
    """Source: pytorch/pytorch#52415, #63394, #17969, NVIDIA/TransformerEngine#581.

    Rule: a layer with None, float, bool and str arguments and a (tensor, None, int, tensor) output trains with eager's
    gradients, and changed values take effect on the next call.
    """

    def make() -> tuple[OddNet, torch.Tensor]:
        torch.manual_seed(0)
        return OddNet().to(DEVICE), torch.randn(6, 8, device=DEVICE)

    def run(step: Callable[..., Any], model: nn.Module, x: torch.Tensor) -> list[Step]:
        mask = (x > 0).to(x.dtype)
        calls: list[Batch] = [{}, {"scale": 0.5, "flip": True}, {"kind": "tanh", "mask": mask}, {}]
        return [train_step(step, model, {"x": x, **call}) for call in calls]

    model, x = make()
    wants = run(model, model, x)
    assert torch.equal(wants[0].loss, wants[3].loss) and not torch.equal(wants[0].loss, wants[1].loss)
    model, x = make()
    t = fxckpt.transform(model, every_n=2, offload=True, layers=[OddBlock])
    for got, want in zip(run(t, model, x), wants, strict=True):
        assert_close(got, want, **TIGHT)
