"""Names of the transform, and the original model left as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import fxckpt
from tests.helpers import assert_close, train_step
from tests.situations.models import Residual, qwen3, stack, tokens


def test_state_dict_names() -> None:
    """Source: pytorch/pytorch#77224 (_checkpoint_wrapped_module), #101107, mlfoundations/open_clip#639 (_orig_mod).

    Rule: names of state_dict, parameters and buffers of the transform equal the model's, it loads a plain state dict
    strictly, and the model's own names stay the same after a compiled step.
    """
    model, batch = stack()
    keys, names = list(model.state_dict()), [n for n, _ in model.named_parameters()]
    t = fxckpt.transform(model, every_n=2, offload=True, layers=[Residual])
    assert list(t.state_dict()) == keys
    assert [n for n, _ in t.named_parameters()] == names
    assert all(a is b for a, b in zip(t.parameters(), model.parameters(), strict=True)), "parameters must be shared"
    torch.compile(t, backend="aot_eager")(**batch).backward()
    assert list(model.state_dict()) == keys and list(t.state_dict()) == keys
    other, _ = stack()
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.5)
    t.load_state_dict(other.state_dict(), strict=True)
    torch.testing.assert_close(t(**batch), other(**batch), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model(**batch), other(**batch), rtol=1e-5, atol=1e-6)


def snapshot(model: nn.Module) -> list[tuple[Any, ...]]:
    """What a careless transform would leave on the modules of the original."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    return [
        (
            name,
            type(m),
            "forward" in vars(m),
            m.training,
            getattr(m, "gradient_checkpointing", None),
            *(len(getattr(m, h)) for h in hooks),
        )
        for name, m in model.named_modules()
    ]


def test_original_model_left_alone() -> None:
    """Source: unslothai/unsloth#2362, #2870.

    Rule: transform does not change the original: its classes, forward, flags and hooks are the same, it still runs
    plainly (dropout stream included), and several transforms of one model coexist.
    """
    plain = qwen3(attention_dropout=0.1)
    want_snapshot, want = snapshot(plain), train_step(plain, plain, tokens(), seed=2)
    model = qwen3(attention_dropout=0.1)
    first = fxckpt.transform(model, every_n=1, offload=True)
    second = fxckpt.transform(model, every_n=3, offload=False)
    runs: list[Callable[..., Any]] = [first, model, second, first, model]
    for run in runs:
        got = train_step(run, model, tokens(), seed=2)
        torch.testing.assert_close(got.loss, want.loss, rtol=1e-5, atol=1e-6)
        assert_close(got, want, rtol=1e-4, atol=1e-6)
        assert snapshot(model) == want_snapshot
