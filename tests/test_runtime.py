"""Calls in any order, memory that returns to its level, and the transfer operators."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fxckpt
from fxckpt.rewrite.offload import _layout
from fxckpt.runtime import host, pool
from fxckpt.runtime.stats import Meter
from fxckpt.runtime.store import Store, reload, wait_offload, wait_reload
from fxckpt.runtime.transfer import transfer_of
from fxckpt.transform import _say_offload_saves_nothing
from tests.helpers import assert_close, assert_same, grads, train_step
from tests.situations.models import Residual, Stack, stack

Xs = list[torch.Tensor]
Run = Callable[..., torch.Tensor]


def pair(backend: str | None, **settings: Any) -> tuple[Run, Stack]:
    model, _ = stack(lambda: Residual(8))
    t = fxckpt.transform(model, layers=Residual, **{"offload": True, **settings})
    return (torch.compile(t, backend=backend) if backend else t), model


def inputs(n: int = 3) -> Xs:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(5, 8, generator=generator) for _ in range(n)]


# ---- forwards and backwards in any order ---------------------------------------------------------------------------


def accumulated(run: Run, xs: Xs) -> None:
    for x in xs:
        (run(x=x) / len(xs)).backward()


def together(run: Run, xs: Xs) -> None:
    losses = [run(x=x) for x in xs]
    (losses[0] * losses[1] + losses[2]).backward()


def first_in_first_out(run: Run, xs: Xs) -> None:
    for loss in [run(x=x) for x in xs]:
        loss.backward()


def last_in_first_out(run: Run, xs: Xs) -> None:
    for loss in reversed([run(x=x) for x in xs]):
        loss.backward()


def interleaved(run: Run, xs: Xs) -> None:
    a = run(x=xs[0])
    b = run(x=xs[1])
    a.backward()
    c = run(x=xs[2])
    c.backward()
    b.backward()


def evaluated_between(run: Run, xs: Xs) -> None:
    a = run(x=xs[0])
    with torch.no_grad():
        run(x=xs[1])
    a.backward()


def retained(run: Run, xs: Xs) -> None:
    loss = run(x=xs[0])
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    (2 * loss).backward()


def retained_beside_another(run: Run, xs: Xs) -> None:
    a, b = run(x=xs[0]), run(x=xs[1])
    a.backward(retain_graph=True)
    b.backward()
    a.backward()


ORDERS = [
    accumulated,
    together,
    first_in_first_out,
    last_in_first_out,
    interleaved,
    evaluated_between,
    retained,
    retained_beside_another,
]


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("order", ORDERS)
def test_orders(order: Callable[[Run, Xs], None], backend: str | None) -> None:
    plain, _ = stack(lambda: Residual(8))
    order(plain, inputs())
    run, model = pair(backend)
    order(run, inputs())
    assert_close(grads(model), grads(plain), rtol=1e-6, atol=1e-7)


def test_a_second_backward_without_retain_graph_is_pytorchs_error() -> None:
    run, _ = pair(None)
    loss = run(x=inputs()[0])
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


# ---- memory ---------------------------------------------------------------------------------------------------------


def live() -> tuple[int, int]:
    """Number of live tensors, and the bytes of their storages."""
    gc.collect()
    found = [o for o in gc.get_objects() if type(o) in (torch.Tensor, nn.Parameter)]
    return len(found), sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in found}.values())


class Boom(Exception):
    pass


def never_differentiated(run: Run, x: torch.Tensor) -> None:
    run(x=x)


def exception_between(run: Run, x: torch.Tensor) -> None:
    def step() -> None:
        loss = run(x=x)
        if loss > -1:
            raise Boom
        loss.backward()

    with pytest.raises(Boom):
        step()


def exception_in_backward(run: Run, x: torch.Tensor) -> None:
    def explode(grad: torch.Tensor) -> None:
        raise Boom

    z = x.clone().requires_grad_()
    y = z * 1
    y.register_hook(explode)
    with pytest.raises(Boom):
        run(x=y).backward()


def trained(run: Run, x: torch.Tensor) -> None:
    run(x=x).backward()


def retained_and_dropped(run: Run, x: torch.Tensor) -> None:
    run(x=x).backward(retain_graph=True)


def refused(run: Run, x: torch.Tensor) -> None:
    z = x.clone().requires_grad_()
    with pytest.raises(fxckpt.UnsupportedError):
        torch.autograd.grad(run(x=z), z, create_graph=True)


@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
def test_memory_returns_to_its_level(backend: str | None) -> None:
    run, model = pair(backend)
    x = inputs()[0]
    uses = [never_differentiated, exception_between, trained, exception_in_backward, refused]
    if backend is None:  # torch.compile's own limit
        uses.append(retained_and_dropped)
    for use in uses:  # compiles, and makes the gradients
        use(run, x)
    for use in uses:
        level = live()
        for _ in range(3):
            use(run, x)
        assert live() == level, use.__name__
    plain, _ = stack(lambda: Residual(8))
    assert_close(train_step(run, model, {"x": x}), train_step(plain, plain, {"x": x}))


def test_what_is_saved_goes_with_the_loss() -> None:
    run, _ = pair(None)
    x = inputs()[0]
    run(x=x).backward()
    level = live()
    loss = run(x=x)
    saved = [t for t in loss_node(loss).saved_tensors if t.shape == x.shape and t.data_ptr() != x.data_ptr()]
    assert len(saved) == 4, "the inputs of blocks 1, 2 and 3, and what the loss was made from"
    assert live()[1] > level[1]
    del loss, saved
    assert live() == level


def test_retain_graph_after_steps_without_it() -> None:
    run, model = pair(None)
    plain, _ = stack(lambda: Residual(8))
    for one in (run, plain):
        one(x=inputs()[0]).backward()
        retained(one, inputs())
    assert_close(grads(model), grads(plain), rtol=1e-6, atol=1e-7)


def loss_node(loss: torch.Tensor) -> Any:
    node: Any = loss.grad_fn
    while node.name() != "CompiledFunctionBackward":
        node = node.next_functions[0][0]
    return node


# ---- double backward ------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_double_backward_is_refused(backend: str | None) -> None:
    run, model = pair(backend)
    x = inputs()[0].requires_grad_()
    loss = run(x=x)
    with pytest.raises(fxckpt.UnsupportedError, match="create_graph"):
        torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(fxckpt.UnsupportedError, match="create_graph"):
        run(x=x).square().backward(create_graph=True)
    plain, _ = stack(lambda: Residual(8))
    assert_same(train_step(run, model, {"x": inputs()[0]}), train_step(plain, plain, {"x": inputs()[0]}))


def test_double_backward_inside_a_compiled_function_is_an_error() -> None:
    t = fxckpt.transform(stack(lambda: Residual(8))[0], layers=Residual)
    x = inputs()[0].requires_grad_()
    loss = torch.compile(lambda x: t(x=x) * 1.0, backend="aot_eager")(x)
    with pytest.raises(RuntimeError):
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        grad.sum().backward()


# ---- transfer operators ---------------------------------------------------------------------------------------------

TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: torch.randn(3, 4),
    "transposed": lambda: torch.randn(3, 4).t(),
    "permuted": lambda: torch.randn(2, 3, 4).permute(2, 0, 1),
    "expanded": lambda: torch.randn(3, 1).expand(3, 4),
    "expanded scalar": lambda: torch.tensor(2.5).expand(2, 3),
    "sliced": lambda: torch.randn(6, 8)[1:4, 2:7],
    "stepped": lambda: torch.randn(9, 4)[::3],
    "offset": lambda: torch.randn(20)[3:],
    "channels_last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "channels_last slice": lambda: torch.randn(2, 6, 4, 5).to(memory_format=torch.channels_last)[:, 1:4],
    "overlapping": lambda: torch.randn(12).as_strided((4, 3), (2, 1)),
    "zero-size": lambda: torch.randn(0, 4),
    "zero-size inside": lambda: torch.randn(3, 0, 2).transpose(0, 2),
    "0-dim": lambda: torch.tensor(1.5),
    "one element": lambda: torch.randn(1, 1, 1),
    "bf16": lambda: torch.randn(3, 4).bfloat16(),
    "half": lambda: torch.randn(3, 4).half(),
    "double": lambda: torch.randn(3, 4).double(),
    "complex": lambda: torch.randn(3, 4, dtype=torch.complex64),
    "int": lambda: torch.randint(-5, 5, (3, 4)),
    "uint8": lambda: torch.randint(0, 5, (3, 4), dtype=torch.uint8),
    "bool": lambda: torch.rand(3, 4) > 0.5,
    "nan": lambda: torch.tensor([float("nan"), float("inf"), -0.0]),
}
CPU = torch.device("cpu")


def offload(x: torch.Tensor, name: str, place: str) -> torch.Tensor:
    handle: torch.Tensor = torch.ops.fxckpt.offload(x, name, "blocks.0", place, False, [])
    torch.ops.fxckpt.wait_offload(handle, x, [])
    return handle


def layout(x: torch.Tensor) -> tuple[Any, Any]:
    """As the pass gives it to ``reload``: an order of dimensions where there are no gaps, else strides."""
    return _layout(x)


@pytest.mark.parametrize("place", ["cpu", "disk"])
@pytest.mark.parametrize("name", TENSORS)
def test_round_trip(name: str, place: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = TENSORS[name]()
    want = x.clone()
    handle = offload(x, name, "cpu" if place == "cpu" else f"disk:{tmp_path}")
    assert handle.device == CPU and handle.shape == x.shape and handle.dtype == x.dtype
    assert handle.untyped_storage().nbytes() == 32, "no copy of the activation"
    if not x._is_view():
        x.zero_()
    other = (None, list(torch.empty(x.shape).stride()))  # a compiler may have chosen others
    for order, stride in (layout(x), *([other] if 0 not in x.stride() else [])):
        got = torch.ops.fxckpt.reload(handle, CPU, name, order, stride, [])
        torch.ops.fxckpt.wait_reload(got, handle, [])
        assert got.dtype == want.dtype and got.shape == want.shape and got.device == CPU
        assert got.stride() == (x.stride() if stride is None else tuple(stride))
        assert torch.equal(got.nan_to_num(), want.nan_to_num()) if name == "nan" else torch.equal(got, want)
    assert not list(tmp_path.iterdir()), "the file has no name"


@pytest.mark.parametrize("name", TENSORS)
def test_an_order_is_enough_for_what_has_no_gaps(name: str) -> None:
    x = TENSORS[name]()
    order, stride = layout(x)
    packed = torch.empty_like(x, memory_format=torch.preserve_format).stride() == x.stride()
    assert (order is not None) == packed or x.numel() == 0
    assert stride is None or stride == list(x.stride())


@pytest.mark.parametrize("name", TENSORS)
def test_registered_as_pytorch_asks(name: str) -> None:
    """Schema and fake implementation, by PyTorch's own checks. (They copy what they are given; a handle is no copy.)"""
    x, ops = TENSORS[name](), torch.ops.fxckpt
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(ops.offload.default, (x, name, "blocks.0", "cpu", False, []), test_utils=checks)
    handle, (order, stride) = offload(x, name, "cpu"), layout(x)
    got = ops.reload(handle, CPU, name, order, stride, [])
    ops.wait_reload(got, handle, [])
    with FakeTensorMode() as mode:
        fake = ops.reload(mode.from_tensor(handle), CPU, name, order, stride, [])
    assert (fake.shape, fake.stride(), fake.dtype) == (got.shape, got.stride(), got.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.complex128])
def test_a_copy_of_a_handle_is_refused(dtype: torch.dtype) -> None:
    """It does not keep the activation, and holds nothing of it."""
    x = torch.randn(3, 4, dtype=dtype)
    handle = offload(x, "x", "cpu")
    for copied in (handle.clone(), handle.contiguous(), handle[:1]):
        if copied.untyped_storage().data_ptr() != handle.untyped_storage().data_ptr():
            with pytest.raises(fxckpt.TransferError, match="copy of its handle"):
                torch.ops.fxckpt.reload(copied, CPU, "x", None, None, [])


@pytest.mark.parametrize("place", ["cpu", "disk"])
@pytest.mark.parametrize("name", [n for n in TENSORS if n != "int"])
def test_hooks_on_saved_tensors_get_the_activation(name: str, place: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = TENSORS[name]()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        handle = offload(x, name, "cpu" if place == "cpu" else f"disk:{tmp_path}")
    order, stride = layout(x)
    for carried in (handle, handle.clone()):
        got = torch.ops.fxckpt.reload(carried, CPU, name, order, stride, [])
        torch.ops.fxckpt.wait_reload(got, carried, [])
        assert got.stride() == x.stride() and torch.equal(got.nan_to_num(), x.nan_to_num())


def test_hooks_on_saved_tensors_under_inductor_are_refused() -> None:
    run, model = pair("inductor")
    x = inputs()[0]
    with torch.autograd.graph.save_on_cpu(), pytest.raises(fxckpt.UnsupportedError, match="use one of them"):
        run(x=x)
    plain, _ = stack(lambda: Residual(8))
    assert_close(train_step(run, model, {"x": x}), train_step(plain, plain, {"x": x}))


@pytest.mark.parametrize("place", ["cpu", "disk"])
@pytest.mark.parametrize("backend", [None, "inductor"])
def test_inside_the_callers_checkpoint(backend: str | None, place: str) -> None:
    """Its hooks on saved tensors copy nothing: what is saved is thrown away, and made again by a second forward."""
    run, model = pair(backend, offload=place)
    x = inputs()[0].requires_grad_()
    plain, _ = stack(lambda: Residual(8))
    for one in (run, plain):
        torch.utils.checkpoint.checkpoint(lambda x, one=one: one(x=x), x, use_reentrant=False).backward()
    assert_close(grads(model), grads(plain))


def test_pinned_memory_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never more than was in use at once, or than the next block needs. (Here it is not pinned.)"""
    empty = torch.empty
    monkeypatch.setattr(pool.torch, "empty", lambda *a, pin_memory=False, **k: empty(*a, **k))
    meter = Meter()
    made = pool.PinnedPool(meter)
    blocks = [made.take(n) for n in (100, 300, 200)]
    addresses = [b.pinned.memory.data_ptr() for b in blocks]
    assert meter.read().host_bytes == 600
    shaped = blocks[0].shaped(torch.zeros(2, 3), (1, 2))
    assert shaped.shape == (2, 3) and shaped.stride() == (1, 2) and shaped.data_ptr() == addresses[0]
    blocks[2].pinned.busy = "an event"
    del blocks, shaped
    again = made.take(150)
    assert again.pinned.memory.data_ptr() == addresses[2] and again.pinned.busy == "an event", "the smallest that fits"
    large = made.take(500)  # the others go before it comes
    assert meter.levels()["host"] == 200 + 500
    del again, large
    assert [made.take(n).pinned.nbytes for n in (500, 200)] == [500, 200]
    assert meter.read().host_bytes == 700


class Permuting(nn.Module):
    """Boundary activations that are no plain tensors: channels last, transposed, sliced, in half precision."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Tanh()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for b in self.blocks:
            x = b(self.between(x))
        return x.float().square().mean()

    def between(self, x: torch.Tensor) -> torch.Tensor:
        match self.how:
            case "channels_last":
                return x.contiguous(memory_format=torch.channels_last)
            case "transposed":
                return (x * 2).transpose(2, 3)
            case "sliced":
                return torch.cat([x, x], 2)[:, :, 3 : 3 + x.shape[2]]
            case "expanded":
                return x.mean(2, keepdim=True).expand(-1, -1, x.shape[2], -1)
        return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", ["plain", "channels_last", "transposed", "sliced", "expanded"])
def test_activations_of_any_layout(how: str, dtype: torch.dtype) -> None:
    def make() -> tuple[nn.Module, dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        return Permuting(how).to(dtype), {"x": torch.randn(2, 4, 6, 6, dtype=dtype)}

    plain, batch = make()
    want = train_step(plain, plain, batch)
    model, batch = make()
    t = fxckpt.transform(model, layers="blocks.*", offload=True, verify=True)
    assert_same(train_step(t, model, batch), want)
    assert fxckpt.graphs(t)[0].transfers


def test_no_host_memory_is_a_transfer_error(monkeypatch: pytest.MonkeyPatch) -> None:
    run, model = pair(None)
    x = inputs()[0]
    run(x=x).backward()

    def full(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(host, "empty_packed", full)
        with pytest.raises(fxckpt.TransferError, match=r"blocks_1_input.*160 bytes") as info:
            run(x=x)
        assert "allocate" in str(info.value.__cause__)
    plain, _ = stack(lambda: Residual(8))
    assert_same(train_step(run, model, {"x": x}), train_step(plain, plain, {"x": x}))


def test_offload_on_a_cpu_model_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    _say_offload_saves_nothing.cache_clear()  # another test of this process may have had it told
    with caplog.at_level(logging.INFO, "fxckpt"):
        run, _ = pair(None)
        for x in inputs():
            run(x=x).backward()
    assert len([r for r in caplog.records if "saves no memory" in r.getMessage()]) == 1


# ---- what several graphs are given ---------------------------------------------------------------------------------


def test_a_given_activation_is_known_as_long_as_it_is_there_and_unchanged() -> None:
    found = Store()

    def send(x: torch.Tensor, given: bool = True) -> torch.Tensor:
        return found.offload(x, "x", "blocks.0", "cpu", given)

    x = torch.randn(4, 8)
    first, second = send(x), send(x)
    assert transfer_of(first) is transfer_of(second) and found.stats().offloads == 1
    assert transfer_of(send(x, given=False)) is not transfer_of(first)
    assert transfer_of(send(x.t())) is not transfer_of(first), "other strides"
    before = x.clone()
    third = send(x.add_(1))
    assert transfer_of(third) is not transfer_of(first)
    for handle, want in ((first, before), (second, before), (third, x)):
        wait_offload(handle)
        back = reload(handle, CPU, x.stride())
        wait_reload(back, handle)
        assert torch.equal(back, want)
    number = transfer_of(third).number  # type: ignore[union-attr]
    del third, handle
    assert transfer_of(send(x)).number != number, "the transfer was over"  # type: ignore[union-attr]


def test_a_given_activation_is_not_taken_for_one_that_lay_where_it_lies() -> None:
    found, handles, memory = Store(), [], bytearray(64 * 1024 * 4)
    for i in range(3):
        x = torch.frombuffer(memory, dtype=torch.float32).view(64, 1024).fill_(i)  # as an allocator gives memory again
        handles.append(found.offload(x, "x", "blocks.0", "cpu", True))
        wait_offload(handles[-1])
        del x
    for i, handle in enumerate(handles):
        back = reload(handle, CPU, (1024, 1))
        wait_reload(back, handle)
        assert bool((back == i).all())
