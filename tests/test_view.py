"""The transformed model is the same model seen through another forward; the original keeps its own."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxckpt
from tests.helpers import assert_same, train_step
from tests.situations.models import Residual, Stack, stack
from tests.zoo import build, get_loss

ROOT = Path(__file__).parents[1]


def llama() -> tuple[nn.Module, nn.Module, dict[str, Any]]:
    """(transformed, original, batch)."""
    model, batch = build("llama")
    return fxckpt.transform(model, every_n=2, offload=True), model, batch


def residuals(**settings: Any) -> tuple[Stack, Stack, dict[str, Any]]:
    model, batch = stack(lambda: Residual(8))
    return fxckpt.transform(model, layers=Residual, **settings), model, batch


def rewritten(t: nn.Module) -> bool:
    return any(record.regions for record in fxckpt.graphs(t))


# ---- identity ----------------------------------------------------------------------------------------------------


def test_class_and_state() -> None:
    t, model, _ = llama()
    assert isinstance(t, type(model)) and t is not model
    assert type(t).__name__ == type(model).__name__ and type(t).__qualname__ == type(model).__qualname__
    assert type(t).__module__ == type(model).__module__ and type(t).__doc__ == type(model).__doc__
    assert list(t.state_dict()) == list(model.state_dict())
    assert all(a is b for a, b in zip(t.parameters(), model.parameters(), strict=True))
    assert all(a is b for a, b in zip(t.buffers(), model.buffers(), strict=True))
    assert [n for n, _ in t.named_modules()] == [n for n, _ in model.named_modules()]
    assert all(a is b for a, b in zip(list(t.modules())[1:], list(model.modules())[1:], strict=True))
    assert t.config is model.config and repr(t) == repr(model)


def test_signatures() -> None:
    t, model, _ = llama()
    assert inspect.signature(t.forward) == inspect.signature(model.forward)
    assert inspect.signature(type(t).forward) == inspect.signature(type(model).forward)
    assert inspect.signature(t.generate) == inspect.signature(model.generate)
    assert t.forward.__doc__ == model.forward.__doc__ and t.forward.__name__ == "forward"


def test_another_instance_of_the_class_is_a_plain_model() -> None:
    t, model, batch = llama()
    other = type(t)(copy.deepcopy(model.config))
    assert type(other) is type(model)
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        next(other.parameters()).zero_()
        assert get_loss(other(**batch)) != get_loss(model(**batch)), "it must not run the original's parameters"


def test_save_and_load(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    t, model, batch = llama()
    get_loss(t(**batch)).backward()
    t.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.architectures == [type(model).__name__] and type(loaded) is type(model)
    assert_same(dict(loaded.state_dict()), dict(model.state_dict()))
    same_class = type(t).from_pretrained(tmp_path)
    assert type(same_class) is type(model)
    assert_same(dict(same_class.state_dict()), dict(model.state_dict()))


def test_state_dict_goes_in() -> None:
    t, model, batch = llama()
    other, _ = build("llama")
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.01)
    want = train_step(other, other, batch)
    train_step(t, model, batch)
    t.load_state_dict(other.state_dict())
    assert_same(train_step(t, model, batch), want)


# ---- changes seen on both -----------------------------------------------------------------------------------------


def test_changes_are_seen_on_both() -> None:
    t, model, batch = residuals(offload=True)
    train_step(t, model, batch)
    assert t.eval() is t and not model.training and not model.blocks[0].training
    model.train()
    assert t.training and t.blocks[1].training
    t.requires_grad_(False)
    assert not any(p.requires_grad for p in model.parameters())
    model.requires_grad_(True)
    t.to(torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    model.to(torch.float64)
    assert t.blocks[0].a.weight.dtype == torch.float64 and t.scale.dtype == torch.float64
    t.anything = 3
    assert model.anything == 3

    plain, _ = stack(lambda: Residual(8))
    plain.to(torch.bfloat16).to(torch.float64)
    batch64 = {"x": batch["x"].double()}
    assert_same(train_step(t, model, batch64), train_step(plain, plain, batch64))


def test_optimiser_moves_both() -> None:
    t, model, batch = residuals()
    plain, _ = stack(lambda: Residual(8))
    ours, theirs = torch.optim.AdamW(t.parameters(), lr=1e-2), torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for _ in range(3):
        for run, optimiser in ((t, ours), (plain, theirs)):
            optimiser.zero_grad()
            run(**batch).backward()
            optimiser.step()
    assert_same(dict(model.state_dict()), dict(plain.state_dict()))


# ---- copies -------------------------------------------------------------------------------------------------------


def by_pickle(t: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(t))


def by_torch_save(t: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(t, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("copied", [copy.deepcopy, by_pickle, by_torch_save])
def test_copies(copied: Callable[[nn.Module], nn.Module], called: bool) -> None:
    t, model, batch = residuals(every_n=2, offload=True)
    if called:
        train_step(t, model, batch)
    made = copied(t)
    assert isinstance(made, type(model).__mro__[0]) and type(made).__name__ == type(model).__name__
    assert not {id(p) for p in made.parameters()} & {id(p) for p in model.parameters()}
    assert fxckpt.selected_layers(made) == fxckpt.selected_layers(t)
    plain, _ = stack(lambda: Residual(8))
    want = train_step(plain, plain, batch)
    model.zero_grad()
    assert_same(train_step(made, made, batch), want)
    assert all(p.grad is None for p in model.parameters())
    assert rewritten(made) and fxckpt.graphs(made)[0].transfers
    with torch.no_grad():
        for p in made.parameters():
            p.zero_()
    assert_same(train_step(t, model, batch), want)


def test_copies_of_a_holder_share_as_they_did() -> None:
    t, model, _ = residuals()
    made = copy.deepcopy({"t": t, "model": model})
    assert made["t"].blocks[0] is made["model"].blocks[0]
    made = pickle.loads(pickle.dumps({"t": t, "model": model}))
    assert made["t"].blocks[0] is made["model"].blocks[0]


def test_shallow_copy_shares_parameters() -> None:
    t, model, batch = residuals(every_n=2)
    made = copy.copy(t)
    assert made is not t and all(a is b for a, b in zip(made.parameters(), model.parameters(), strict=True))
    plain, _ = stack(lambda: Residual(8))
    assert_same(train_step(made, model, batch), train_step(plain, plain, batch))
    assert rewritten(made)


LOADER = """
import sys, torch
t = torch.load(sys.argv[1], weights_only=False)
x = torch.randn(5, 8)
t(x=x).backward()
import fxckpt
assert fxckpt.graphs(t)[0].transfers, "not rewritten"
"""


def test_loaded_in_another_process(tmp_path: Path) -> None:
    t, _, _ = residuals(offload=True)
    torch.save(t, tmp_path / "t.pt")
    command = [sys.executable, "-c", LOADER, str(tmp_path / "t.pt")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


# ---- hooks, own attributes ----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_hooks_on_root_and_layers() -> None:
    t, model, batch = residuals(offload=True)
    plain, _ = stack(lambda: Residual(8))
    seen: list[str] = []

    def hooked(root: nn.Module, names: list[str]) -> None:
        root.register_forward_pre_hook(lambda m, a, k: ((), {"x": k["x"] * 2}), with_kwargs=True)
        root.register_forward_hook(lambda m, a, out: names.append("root") or out * 3)
        root.register_full_backward_hook(lambda m, gi, go: names.append("backward"))
        root.blocks[1].register_forward_hook(lambda m, a, out: out * 1.5)

    hooked(t, seen)
    want_seen: list[str] = []
    hooked(plain, want_seen)
    want = train_step(plain, plain, batch)
    for _ in range(2):
        seen.clear()
        assert_same(train_step(t, model, batch), want)
        assert seen == want_seen
    seen.clear()
    assert_same(train_step(torch.compile(t, backend="aot_eager"), model, batch), want)
    assert seen == want_seen
    assert rewritten(t)


def test_own_forward_does_not_touch_the_original() -> None:
    t, model, batch = residuals()
    before = dict(vars(model))
    original = t.forward
    t.forward = lambda x: original(x=x) * 2
    assert torch.equal(t(**batch), 2 * model(**batch))
    assert "forward" not in vars(model) and vars(model).keys() == before.keys()
    del t.forward
    assert torch.equal(t(**batch), model(**batch))


def test_compile_in_place_does_not_touch_the_original() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    t, model, batch = residuals(offload=True)
    plain, _ = stack(lambda: Residual(8))
    want = train_step(plain, plain, batch)
    counter = CompileCounterWithBackend("aot_eager")
    t.compile(backend=counter, fullgraph=True)
    assert model._compiled_call_impl is None
    assert_same(train_step(t, model, batch), want)
    assert counter.frame_count == 1 and rewritten(t)
    assert_same(train_step(model, model, batch), want)
    assert counter.frame_count == 1


def test_a_model_compiled_in_place_is_transformed() -> None:
    """`model.compile()` stays the original's own."""
    model, batch = stack(lambda: Residual(8))
    model.compile(backend="aot_eager")
    t = fxckpt.transform(model, layers=Residual)
    plain, _ = stack(lambda: Residual(8))
    want = train_step(plain, plain, batch)
    assert_same(train_step(t, model, batch), want)
    assert rewritten(t)
    assert_same(train_step(model, model, batch), want)
    assert len(fxckpt.graphs(t)) == 1


def test_original_is_untouched() -> None:
    model, batch = build("llama")
    model.activation_checkpointing_enable()

    def picture() -> list[Any]:
        hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        found = []
        for name, m in model.named_modules():
            keys = vars(m).keys() - {
                "_is_torch_compile",
                "_compile_kwargs",
            }  # of torch.compile and Lightning
            flag = getattr(m, "gradient_checkpointing", None)
            found.append((name, type(m), keys, m.training, flag, [len(getattr(m, h)) for h in hooks]))
        return found

    train_step(model, model, batch)  # transformers installs hooks of its own at the first call
    before = picture()
    want = train_step(model, model, batch)
    t = fxckpt.transform(model, offload=True)
    assert picture() == before
    assert_same(train_step(t, model, batch), want)
    train_step(torch.compile(t, backend="aot_eager"), model, batch)
    t.activation_checkpointing_disable()
    for now, then in zip(picture(), before, strict=True):
        assert now == then, (now[0], now[2] ^ then[2])
    calls: list[int] = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *a: calls.append(1))
    graphs = len(list(t._fxckpt_state.records))
    assert_same(train_step(model, model, batch), want)
    assert len(calls) == 2, "the original still checkpoints in its own way: the layer runs again in the backward"
    assert len(t._fxckpt_state.records) == graphs


def test_a_boundary_layer_alone() -> None:
    """Classes derived from transformers' layer get another forward from ``__init_subclass__``."""
    model, _ = build("llama")
    layer, plain = model.model.layers[0], copy.deepcopy(model.model.layers[0])
    x = torch.randn(2, 16, 32)
    batch = {"hidden_states": x, "position_embeddings": model.model.rotary_emb(x, torch.arange(16)[None])}
    t = fxckpt.transform(layer)
    assert inspect.signature(t.forward) == inspect.signature(layer.forward)
    want = train_step(lambda **b: plain(**b).square(), plain, batch)
    assert_same(train_step(lambda **b: t(**b).square(), layer, batch), want)
    assert rewritten(t)
    t.forward = lambda **b: None
    assert "forward" not in vars(layer)


# ---- again, and refused -------------------------------------------------------------------------------------------


def test_transform_again_takes_the_new_settings() -> None:
    t, model, batch = residuals(every_n=2, offload=True)
    train_step(t, model, batch)
    again = fxckpt.transform(t, every_n=1, layers=Residual)
    assert type(again).__mro__[1] is type(model), "views do not pile up"
    assert len(fxckpt.selected_layers(again)) == 2 * len(fxckpt.selected_layers(t))
    plain, _ = stack(lambda: Residual(8))
    want = train_step(plain, plain, batch)
    assert_same(train_step(again, model, batch), want)
    assert not fxckpt.graphs(again)[0].transfers
    assert_same(train_step(t, model, batch), want)
    assert len(fxckpt.graphs(t)) == 1 and fxckpt.graphs(t)[0].transfers


def test_a_compiled_model_is_refused() -> None:
    model, _ = stack(lambda: Residual(8))
    with pytest.raises(fxckpt.SettingsError, match="transform it first"):
        fxckpt.transform(torch.compile(model, backend="aot_eager"), layers=Residual)
    t = fxckpt.transform(model, layers=Residual)
    with pytest.raises(fxckpt.SettingsError, match="transform it first"):
        fxckpt.transform(torch.compile(t, backend="aot_eager"), layers=Residual)


def test_replicas_are_refused() -> None:
    t, _, _ = residuals()
    with pytest.raises(fxckpt.UnsupportedError, match="DataParallel"):
        t._replicate_for_data_parallel()


def test_something_else_is_refused() -> None:
    with pytest.raises(fxckpt.SettingsError, match="Module"):
        fxckpt.transform(lambda x: x)  # type: ignore[type-var]
    with pytest.raises(fxckpt.FxckptError, match="not a transformed model"):
        fxckpt.graphs(nn.Linear(2, 2))


# ---- the end ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inspected", [False, True])
@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
def test_both_are_freed(backend: str | None, inspected: bool) -> None:
    def use() -> tuple[weakref.ref[nn.Module], ...]:
        t, model, batch = residuals(offload=True)
        run = torch.compile(t, backend=backend) if backend else t
        train_step(run, model, batch)
        with torch.no_grad():
            run(**batch)
        if inspected:
            fxckpt.graphs(t)
            str(fxckpt.explain(t))
        return weakref.ref(t), weakref.ref(model), weakref.ref(model.blocks[0].a.weight)

    refs = use()
    gc.collect()
    assert [r() is None for r in refs] == [True, True, True]


def test_original_outlives_the_view() -> None:
    t, model, batch = residuals()
    want = train_step(t, model, batch)
    ref = weakref.ref(t)
    del t
    gc.collect()
    assert ref() is None
    assert_same(train_step(model, model, batch), want)
