"""Seconds of nodes and kernels on a known device, and of a whole plan."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import fxckpt
from fxckpt.decide.device import (
    AttentionRate,
    DeviceSpec,
    Disk,
    ProductRate,
    choose_device,
    find_device,
    identity,
    store_measured,
)
from fxckpt.decide.seconds import Pace, Product, interpolate, moved_bytes, product_of, work
from tests.situations.models import Residual, stack

CPU = torch.device("cpu")
BEST, BANDWIDTH = 1e9, 1e9


@pytest.fixture(autouse=True)
def nothing_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXCKPT_CACHE", str(tmp_path / "cache"))


def device(**known: Any) -> DeviceSpec:
    return DeviceSpec("a device", "a test", {"float32": BEST}, BANDWIDTH, **known)


def node_of(function: Any, *shapes: tuple[int, ...], **options: Any) -> fx.Node:
    """The last operator of a function of tensors of these shapes."""
    inputs = [torch.zeros(shape, **options) for shape in shapes]
    graph = make_fx(function, tracing_mode="fake")(*inputs).graph
    return [n for n in graph.nodes if n.op == "call_function"][-1]


# ---- what a node does ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "shapes", "want"),
    [
        (torch.mm, [(3, 4), (4, 5)], Product(1, 3, 4, 5)),
        (torch.bmm, [(2, 3, 4), (2, 4, 5)], Product(2, 3, 4, 5)),
        (torch.addmm, [(5,), (3, 4), (4, 5)], Product(1, 3, 4, 5)),
        (torch.add, [(3, 4), (3, 4)], None),
    ],
)
def test_products(function: Any, shapes: list[tuple[int, ...]], want: Product | None) -> None:
    assert product_of(node_of(function, *shapes)) == want


def test_moved_bytes() -> None:
    assert moved_bytes(node_of(torch.add, (8, 4), (8, 4))) == 3 * 8 * 4 * 4
    assert moved_bytes(node_of(lambda x: x.expand(8, 4) + 1, (1, 4))) == (4 + 8 * 4) * 4
    rows = node_of(lambda table: torch.nn.functional.embedding(torch.arange(6), table), (1000, 4))
    assert moved_bytes(rows) == 2 * 6 * 4 * 4 + 6 * 8  # the rows looked up, written, and their numbers
    assert moved_bytes(node_of(lambda x: torch.empty_like(x), (8, 4))) == 0


@pytest.mark.parametrize(
    ("at", "want"),
    [((1, 1), 1.0), ((2, 2), 1.0), ((8, 2), 4.0), ((4, 2), 2.0), ((100, 100), 16.0), ((4, 8), 8.0)],
)
def test_rates_are_interpolated(at: tuple[int, int], want: float) -> None:
    points = {(2, 2): 1.0, (8, 2): 4.0, (2, 8): 4.0, (8, 8): 16.0}
    assert interpolate(points, at) == pytest.approx(want)


# ---- how long that takes ------------------------------------------------------------------------------------------


def test_the_longer_of_computing_and_moving() -> None:
    pace = Pace(device())
    assert pace.of_node(node_of(torch.add, (8, 4), (8, 4))) == 3 * 8 * 4 * 4 / BANDWIDTH
    assert pace.of_node(node_of(torch.mm, (256, 256), (256, 256))) == 2 * 256**3 / BEST
    thin = node_of(torch.mm, (1, 256), (256, 256))
    assert pace.of_node(thin) == (256 * 256 + 2 * 256) * 4 / BANDWIDTH
    assert pace.of_node(node_of(lambda x: x.view(-1), (8, 4))) == 0.0
    assert Pace(device(call=1.0)).of_node(thin) == pytest.approx(1.0, rel=0.01)
    assert Pace(device(call=1.0, overhead=1.5)).of_node(thin) == pytest.approx(1.5, rel=0.01)


def test_what_is_not_known_is_none() -> None:
    product = node_of(torch.mm, (8, 8), (8, 8), dtype=torch.bfloat16)
    assert Pace(device()).of_node(product) is None
    assert Pace(DeviceSpec("x", "y", {"bfloat16": 1.0})).of_node(product) is None
    assert Pace(DeviceSpec("x", "y")).of_node(node_of(torch.add, (2,), (2,))) is None


def test_rates_by_size() -> None:
    products = tuple(ProductRate("float32", False, m, 64, 64, 1e6 * m) for m in (64, 256))
    pace = Pace(device(products=products))
    for m in (64, 128, 256, 512):
        seconds = pace.of_node(node_of(torch.mm, (m, 64), (64, 64)))
        assert seconds == pytest.approx(2 * m * 64 * 64 / (1e6 * min(m, 256)))
    batched = pace.of_node(node_of(torch.bmm, (64, 64, 64), (64, 64, 64)))
    assert batched == 2 * 64**4 / BEST, "only single ones were measured"


@pytest.mark.parametrize("is_causal", [False, True])
def test_attention(is_causal: bool) -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        name = "_scaled_dot_product_flash_attention_for_cpu"
        return getattr(torch.ops.aten, name)(q, k, v, is_causal=is_causal)[0]

    (node,) = (n for n in node_of(attend, *[(1, 2, 64, 32)] * 3).graph.nodes if "attention" in n.name)
    count = 4 * 2 * 64 * 64 * 32
    assert Pace(device()).of_node(node) == count / BEST / (2 if is_causal else 1)
    rates = tuple(AttentionRate("float32", c, 64, 32, 1e6, 1e3) for c in (False, True))
    assert Pace(device(attention=rates)).of_node(node) == pytest.approx(count / 1e6)


def test_functions() -> None:
    pace = Pace(device(functions={"tanh": 1e3, "exp": 1e6, "erf": 1e4}))
    assert pace.of_node(node_of(torch.tanh, (8, 4))) == 8 * 4 / 1e3
    gelu = torch.nn.functional.gelu
    assert pace.of_node(node_of(gelu, (8, 4))) == 8 * 4 / 1e4
    assert pace.of_node(node_of(lambda x: gelu(x, approximate="tanh"), (8, 4))) == 8 * 4 / 1e3


def test_large_values_get_new_memory() -> None:
    assert Pace(device()).new([32 << 20]) == 0.0
    assert Pace(device(fresh=1e8)).new([32 << 20, 48 << 20, 28 << 20]) == (80 << 20) / 1e8


@pytest.mark.parametrize(("rows", "nbytes"), [(2048, 32 << 20), (1024, 0)])
def test_a_node_that_makes_a_large_value_gets_new_memory(rows: int, nbytes: int) -> None:
    node, known = node_of(torch.ops.aten.relu, (rows, 4096)), device()
    slow, fast = Pace(device(fresh=1e8)).of_node(node), Pace(known).of_node(node)
    assert slow is not None and fast is not None
    assert slow - fast == pytest.approx(nbytes / 1e8)


def test_scattered_values_are_added_one_by_one() -> None:
    def scatter(out: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.index_put(out, [torch.zeros(64, dtype=torch.long)], values, True)

    node = node_of(scatter, (8, 16), (64, 16))
    assert Pace(device(functions={"scatter": 1e3})).of_node(node) == pytest.approx(64 * 16 / 1e3)
    assert (Pace(device()).of_node(node) or 1.0) < 64 * 16 / 1e3


def test_grouped_products() -> None:
    """The products of a mixture's experts, which PyTorch counts no FLOPs for."""
    graph = fx.Graph()
    rows, experts = graph.placeholder("rows"), graph.placeholder("experts")
    grouped = graph.call_function(torch.ops.aten._grouped_mm.default, (rows, experts))
    for n, shape in ((rows, (64, 8)), (experts, (4, 8, 16)), (grouped, (64, 16))):
        n.meta["val"] = torch.empty(shape, device="meta")
    assert product_of(grouped) == Product(4, 16, 8, 16)
    assert work(grouped) == 2 * 64 * 8 * 16


def test_transfers() -> None:
    host = Pace(DeviceSpec("x", "y", {}, 1e8, to_host=2e6, from_host=1e6))
    assert host.transfers(fxckpt.Offload(), 10**6, 0.1, 0.2) == 0.5 + 1.0
    assert host.transfers(fxckpt.Offload(), 10**6, 3.0, 4.0) == 7.0, "copies run beside the computation"
    disk = fxckpt.Offload(to="disk", dir="/somewhere")
    assert host.transfers(disk, 10**6, 0.1, 0.2) is None
    known = Pace(DeviceSpec("x", "y", {}, 1e8, 2e6, 1e6, (Disk("/somewhere", 1e6, 5e6),)))
    assert known.transfers(disk, 10**6, 0.1, 0.2) == 1.0 + 1.0
    cpu = Pace(device())
    assert cpu.transfers(fxckpt.Offload(), 10**6, 0.1, 0.2) == pytest.approx(0.3 + 4 * 10**6 / BANDWIDTH)


# ---- of a plan ----------------------------------------------------------------------------------------------------


def plan(**given: Any) -> fxckpt.Plan:
    model, batch = stack(n=8)
    return fxckpt.plan(model, batch, layers=Residual, **given)


def test_a_plan_has_seconds_where_the_device_is_known(tmp_path: Path) -> None:
    assert plan().predicted_seconds is None, "this processor was not measured"
    kept = fxckpt.plan(*stack(n=8), layers=Residual, policy=lambda layer: False, device=device())
    recomputed = plan(device=device())
    assert kept.predicted_seconds is not None and recomputed.predicted_seconds is not None
    assert recomputed.predicted_seconds > kept.predicted_seconds
    recomputed.save(tmp_path / "plan.json")
    assert fxckpt.Plan.load(tmp_path / "plan.json") == recomputed
    store_measured(DeviceSpec(identity(CPU), "a test", {"float32": BEST}, BANDWIDTH))
    found = plan().predicted_seconds
    assert found == recomputed.predicted_seconds == plan(device="cpu").predicted_seconds
    with torch.device("meta"):
        model = nn.Sequential(*[Residual(8) for _ in range(2)])
    assert fxckpt.plan(model, {"input": torch.ones(2, 8)}, layers=Residual).predicted_seconds is None


def test_layers_left_out_take_their_time() -> None:
    """Eight equal layers are captured in part and counted as a whole."""
    seconds = []
    for n in (6, 8, 10, 12):
        model, batch = stack(n=n)
        found = fxckpt.plan(model, batch, layers=Residual, device=device()).predicted_seconds
        assert found is not None
        seconds.append(found)
    steps = [b - a for a, b in itertools.pairwise(seconds)]
    assert all(math.isclose(step, steps[0], rel_tol=1e-6) for step in steps)


def test_devices_by_name() -> None:
    found = choose_device("NVIDIA H200")
    assert found is not None and found.flops["bfloat16"] > 1e14
    assert choose_device("cpu") is find_device(CPU) is None
    assert choose_device(found) is found
    for wrong in ("a toaster", 3.5):
        with pytest.raises(fxckpt.SettingsError, match=r"NVIDIA H200"):
            choose_device(wrong)
    if not torch.cuda.is_available():
        with pytest.raises(fxckpt.SettingsError, match=r"no such device"):
            choose_device("cuda")
