"""How fast a device is: what is measured, stored, published, and what copies are started by."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import fxckpt
from fxckpt import graph as G
from fxckpt.bench import calibrate, rates, reference
from fxckpt.cli import app
from fxckpt.decide import device as devices
from fxckpt.decide.clock import Clock, find_clock
from fxckpt.decide.device import DeviceSpec, Disk, find_device, identity, load_measured, store_measured, store_path
from fxckpt.record import GraphRecord
from fxckpt.rewrite import overlap
from tests.helpers import differences, train_step
from tests.hostile import hostile
from tests.situations.models import Residual, stack

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXCKPT_CACHE", str(tmp_path / "cache"))


def spec(folder: Path, read: float = 1e9, flops: float = 1e9) -> DeviceSpec:
    return DeviceSpec(identity(CPU), "test", {"float32": flops}, 1e10, disks=(Disk(str(folder), 1e9, read),))


# ---- what is known ------------------------------------------------------------------------------------------------


def test_what_is_stored_is_found(tmp_path: Path) -> None:
    assert find_device(CPU) is None and not load_measured()
    store_measured(spec(tmp_path))
    assert find_device(CPU) == spec(tmp_path)
    (tmp_path / "other").mkdir()
    store_measured(spec(tmp_path / "other", flops=2e9))
    found = find_device(CPU)
    assert found is not None and found.flops == {"float32": 2e9}
    assert [disk.folder for disk in found.disks] == [str(tmp_path / "other"), str(tmp_path)]
    torch.set_num_threads(2)  # another speed, so nothing is known
    try:
        assert find_device(CPU) is None
    finally:
        torch.set_num_threads(1)


def test_a_disk_is_that_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    found = spec(tmp_path)
    assert found.disk(str(tmp_path)) == found.disk(str(tmp_path / "inside")) == found.disks[0]
    assert found.disk("/proc") is None and found.disk(str(tmp_path / "missing")) is None


@pytest.mark.parametrize("text", ["", "{}x", "{}", '["a"]', '[{"name": "a"}]', '[{"name": "a", "disks": [{}]}]'])
def test_a_broken_file_is_told(text: str) -> None:
    store_path().parent.mkdir()
    store_path().write_text(text)
    if text == "{}":
        assert load_measured() == {}
        return
    with pytest.raises(fxckpt.SettingsError, match=r"devices\.json is no list of devices.*fxckpt calibrate"):
        load_measured()


def test_a_file_without_the_rates_by_size() -> None:
    """What was measured before they were is known still."""
    store_path().parent.mkdir()
    old = {"name": identity(CPU), "source": "old", "flops": {"float32": 1e9}, "bandwidth": 1e9, "disks": []}
    store_path().write_text(json.dumps([old]))
    assert find_device(CPU) == DeviceSpec(identity(CPU), "old", {"float32": 1e9}, 1e9)


def test_a_rate_of_zero_is_told(tmp_path: Path) -> None:
    store_path().parent.mkdir()
    store_path().write_text(json.dumps([spec(tmp_path, read=0.0).to_dict()]))
    with pytest.raises(fxckpt.SettingsError, match="not positive"):
        fxckpt.transform(stack()[0], layers=Residual, offload=True)
    fxckpt.transform(stack()[0], layers=Residual)  # does not ask


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("NVIDIA H200", True),
        ("NVIDIA A100-SXM4-80GB", True),
        ("NVIDIA H200 MIG 1g.18gb", False),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", False),
        ("NVIDIA A10G", False),
    ],
)
def test_published_figures(monkeypatch: pytest.MonkeyPatch, name: str, published: bool) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    found = find_device(torch.device("cuda:0"))
    assert (found is not None) == published
    if found is not None:
        assert found.flops["bfloat16"] > 1e14 and found.from_host is not None and found.from_host > 1e10


def test_published_names_are_unique() -> None:
    names = [spec.name for spec in devices.PUBLISHED]
    assert len(names) == len(set(names)) and all(spec.source and spec.flops for spec in devices.PUBLISHED)


# ---- a clock ------------------------------------------------------------------------------------------------------


def test_a_clock_needs_all_rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = f"disk:{tmp_path}"
    assert find_clock(CPU, place) is None
    store_measured(spec(tmp_path, read=2e9))
    assert find_clock(CPU, "cpu") is None, "there is no copy beside the computation"
    assert find_clock(CPU, "disk:/proc") is None
    clock = find_clock(CPU, place)
    assert clock is not None and clock.reload(10**9) == 0.5
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    cuda = find_clock(torch.device("cuda:0"), "cpu")
    assert cuda is not None and cuda.reload(64 * 10**9) == 1.0
    assert find_clock(torch.device("cuda:0"), place) is None, "that disk was not measured for it"


def record_of(tmp_path: Path, n: int = 6, **settings: object) -> GraphRecord:
    model, batch = stack(n=n)
    offload = fxckpt.Offload(to="disk", dir=str(tmp_path))
    t = fxckpt.transform(model, layers=Residual, offload=offload, verify=True, **settings)
    train_step(t, model, batch)
    (record,) = fxckpt.graphs(t)
    return record


def test_least_compute(tmp_path: Path) -> None:
    record = record_of(tmp_path)
    clock = Clock(spec(tmp_path, flops=1e6), 1.0)
    seconds = {n.name: clock.least_compute(n) for n in record.forward.graph.nodes}
    product = next(n for n in record.forward.graph.nodes if "addmm" in n.name)
    rows, columns = product.meta["val"].shape
    assert seconds[product.name] == 2 * rows * columns * product.args[1].meta["val"].shape[1] / 1e6
    assert seconds["output"] == 0.0
    assert Clock(DeviceSpec("x", "y", {"bfloat16": 1.0}), 1.0).least_compute(product) == 0.0


# ---- copies that start as early as they must ----------------------------------------------------------------------


def spans(record: GraphRecord) -> list[tuple[int, int]]:
    """Position of start and wait of each reload, in order."""
    order = {n: i for i, n in enumerate(record.backward.graph.nodes)}
    return [
        (order[n], next(order[u] for u in n.users if G.is_wait_reload(u)))
        for n in record.backward.graph.nodes
        if G.is_reload(n)
    ]


def peak(record: GraphRecord) -> int:
    """Of the step, by the lifetimes of the graphs' storages, without the model's inputs and gradients."""
    inputs = G.placeholders(record.forward.graph)
    nodes = list(record.backward.graph.nodes)
    staying = {n for n in nodes if n.op == "placeholder" and n.name in {i.name for i in inputs}}
    staying |= {G.view_base(n) for n in G.output_args(record.backward.graph) if isinstance(n, torch.fx.Node)}
    return max(*G.bytes_alive(list(record.forward.graph.nodes), set(inputs)), *G.bytes_alive(nodes, staying))


@pytest.mark.parametrize("slower", [0.1, 1.0, 3.0, 1000.0])
def test_a_slow_place_is_asked_earlier(tmp_path: Path, slower: float) -> None:
    """`slower`: how much longer a copy takes than the backward of a region."""
    ordinary = record_of(tmp_path)
    clock = Clock(spec(tmp_path, flops=1e6), 1.0)
    nodes = list(ordinary.backward.graph.nodes)
    waits = [wait for _, wait in spans(ordinary)]
    region = sum(map(clock.least_compute, nodes[waits[0] : waits[1]]))
    nbytes = G.nbytes(next(n for n in nodes if G.is_reload(n)))
    store_measured(spec(tmp_path, read=nbytes / region / slower, flops=1e6))
    asked = record_of(tmp_path)

    def lead(record: GraphRecord) -> list[float]:
        nodes = list(record.backward.graph.nodes)
        return [sum(map(clock.least_compute, nodes[start:wait])) for start, wait in spans(record)]

    assert peak(asked) <= peak(ordinary)
    assert spans(asked) == sorted(spans(asked))
    if slower < 1:  # the first one has nothing but the loss to hide behind
        assert lead(asked)[1:] == lead(ordinary)[1:]
    else:
        assert all(a >= b for a, b in zip(lead(asked), lead(ordinary), strict=True))
        assert sum(lead(asked)) > sum(lead(ordinary))


def test_reloads_that_lift_the_peak_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that are free by the pass's own account: it starts as early as it likes."""
    store_measured(spec(tmp_path, read=1.0))
    model, batch = stack(n=6)
    place = fxckpt.Offload(to="disk", dir=str(tmp_path))
    original = overlap._start_in_time

    def greedy(coming: Any, nodes: Any, places: Any, alive: Any, *rest: Any) -> None:
        original(coming, nodes, places, [0] * len(alive), rest[0], 1 << 60)

    monkeypatch.setattr(overlap, "_start_in_time", greedy)
    t = fxckpt.transform(model, layers=Residual, offload=place, verify=True)
    with pytest.raises(fxckpt.FxckptError, match="reloads that start early lift the peak"):
        train_step(t, model, batch)


def test_numbers_when_copies_start_early(tmp_path: Path) -> None:
    store_measured(spec(tmp_path, read=1.0))
    model, batch = stack(n=6)
    want = train_step(model, model, batch)
    t = fxckpt.transform(model, layers=Residual, offload=fxckpt.Offload(to="disk", dir=str(tmp_path)), verify=True)
    for seed in range(20):
        with hostile(seed, poison=True, longest=0.001):
            assert not differences(train_step(t, model, batch).values(), want.values()), f"seed {seed}"
    compiled = torch.compile(t)
    got = train_step(compiled, model, batch)
    stock = train_step(torch.compile(model), model, batch)
    assert not differences(got.values(), stock.values())


def test_what_was_measured_is_part_of_the_key_of_compile_caches(tmp_path: Path) -> None:
    def key(offload: object) -> str:
        text: str = type(fxckpt.transform(stack()[0], layers=Residual, offload=offload))._fxckpt_state.key
        return text

    before = key("disk"), key(False)
    store_measured(spec(tmp_path))
    assert key("disk") != before[0] and key(False) == before[1]


# ---- measuring ----------------------------------------------------------------------------------------------------


def test_calibrate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "ENOUGH_SECONDS", 0.001)
    monkeypatch.setattr(calibrate, "BLOCK_BYTES", 1 << 20)
    monkeypatch.setattr(calibrate, "TOTAL_BYTES", calibrate.BLOCKS << 20)
    for name, small in (
        ("PRODUCT_SIZES", (8, 32)),
        ("BATCHED_SIZES", (8, 32)),
        ("BATCHED_VALUES", 1 << 12),
        ("TOKENS", (16, 32)),
        ("HEADS", (8, 16)),
        ("ATTENTION_VALUES", 1 << 12),
        ("VALUES", 1 << 12),
        ("FRESH_BYTES", 1 << 20),
        ("LEAST_SECONDS", 1e-6),
    ):
        monkeypatch.setattr(rates, name, small)
    for name, size in {"WIDTH": 16, "HEADS": 2, "LAYERS": 2, "TOKENS": 8, "VALUES": 16}.items():
        monkeypatch.setattr(reference, name, size)
    result = CliRunner().invoke(app, ["calibrate", "--dir", str(tmp_path), "--json", str(tmp_path / "out.json")])
    assert result.exit_code == 0, result.output
    for words in ("matrix products, float32", "GFLOP/s", "memory", "to the disk of", "devices.json"):
        assert words in result.output
    found = find_device(CPU)
    assert found is not None and json.loads((tmp_path / "out.json").read_text()) == json.loads(
        json.dumps(found.to_dict())
    )
    assert set(found.flops) == {"float32", "bfloat16", "float16"} and found.to_host is None
    assert 1e8 < found.flops["float32"] < 1e13 and found.bandwidth is not None and 1e8 < found.bandwidth < 1e13
    assert found.disks[0].folder == str(tmp_path) and found.disks[0].read > 1e5 and found.disks[0].write > 1e5
    assert found.products is not None and len(found.products) == 3 * 2 * 8
    assert found.attention is not None and len(found.attention) == 3 * 2 * 4
    assert found.functions is not None and set(found.functions) == {"exp", "tanh", "erf", "scatter"}
    assert found.fresh is not None and found.fresh > 0 and found.call is not None and 1e-8 < found.call < 1e-3
    assert found.overhead is not None and found.overhead > 0
    assert "measured on 20" in found.source
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cache", "out.json"]


def test_calibrate_refuses(tmp_path: Path) -> None:
    with pytest.raises(fxckpt.TransferError, match=r"missing cannot take 268435456 bytes.*--dir"):
        calibrate.calibrate("cpu", str(tmp_path / "missing"))
    with pytest.raises(fxckpt.SettingsError, match=r"use .cpu. or .cuda."):
        calibrate.calibrate("tpu", str(tmp_path))
    assert find_device(CPU) is None
