"""When transfers start and when they are waited for: right under any timing, and no earlier or later than allowed.

Numbers are checked on the hostile device (`tests/hostile.py`); removing each wait shows that such a test can fail.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._inductor.utils import run_and_get_code

import fxckpt
from fxckpt import graph as G
from fxckpt import pipeline
from fxckpt.record import GraphRecord
from fxckpt.use import backend
from tests.helpers import Step, boundary_layers, differences, grads, train_step
from tests.hostile import Late, hostile
from tests.situations.models import Batch, Residual, Stack, stack
from tests.test_runtime import ORDERS, Run, Xs, inputs
from tests.zoo import REGISTRY, build

MODELS = ["llama", "t5", "albert", "swin", "whisper", "plain_conv_tower_bn"]
"""Decoder; encoder states read by every decoder layer; one block called often; stages; convolutions, buffers."""


class Skips(nn.Module):
    """Each activation of the way down is read again on the way up, as in a U-net."""

    def __init__(self, n: int = 3) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Residual(8) for _ in range(2 * n))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, kept = self.stem(x), []
        half = len(self.blocks) // 2
        for block in self.blocks[:half]:
            kept.append(x)
            x = block(x)
        for block in self.blocks[half:]:
            x = block(x) + kept.pop()
        return x.square().mean()


def skips() -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    return Skips(), {"x": torch.randn(5, 8)}


def stemmed() -> tuple[nn.Module, Batch]:
    """Five blocks, the first of which reads a computed value too."""
    torch.manual_seed(0)
    return Stemmed(), {"x": torch.randn(5, 8)}


class Stemmed(Stack):
    def __init__(self, n: int = 5) -> None:
        super().__init__([Residual(8) for _ in range(n)])
        self.stem = nn.Linear(8, 8)

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return super().hidden(self.stem(x))


def transformed(model: nn.Module, layers: Any = "blocks.*", **settings: Any) -> nn.Module:
    return fxckpt.transform(model, **{"layers": layers, "offload": True, "verify": True, **settings})


def of_zoo(name: str) -> tuple[nn.Module, Batch, Any]:
    model, batch = build(name)
    return model, batch, boundary_layers(name, model)


# ---- numbers on the hostile device -------------------------------------------------------------------------------


@pytest.mark.parametrize("late", Late)
@pytest.mark.parametrize("name", MODELS)
def test_numbers_of_real_models(name: str, late: Late) -> None:
    model, batch, layers = of_zoo(name)
    want = train_step(transformed(model, layers, offload=False), model, batch)
    model, batch, layers = of_zoo(name)
    t = transformed(model, layers)
    with hostile(1, late, poison=True) as tier:
        got = train_step(t, model, batch)
    assert not differences(got.values(), want.values())
    assert len(tier.log) == 4 * sum(len(r.transfers) for r in fxckpt.graphs(t)) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", REGISTRY)
def test_numbers_of_the_whole_zoo(name: str) -> None:
    """Copies run when they are waited for, and what was let go holds NaN; settings change from model to model."""
    number = list(REGISTRY).index(name)
    every_n = 1 + number % 2
    offload = fxckpt.Offload(max_in_flight=1 + number % 3, prefetch=number // 3 % 3)
    model, batch, layers = of_zoo(name)
    try:
        want = train_step(transformed(model, layers, every_n=every_n, offload=False), model, batch)
    except fxckpt.CaptureError as error:
        pytest.skip(f"refused without offload, too: {error}")
    model, batch, layers = of_zoo(name)
    t = transformed(model, layers, every_n=every_n, offload=offload)
    with hostile(number, Late.AT_THE_WAIT, poison=True) as tier:
        got = train_step(t, model, batch)
    assert not differences(got.values(), want.values())
    assert len(tier.log) == 4 * sum(len(r.transfers) for r in fxckpt.graphs(t))


@pytest.mark.parametrize(("max_in_flight", "prefetch"), [(1, 0), (1, 1), (2, 0), (2, 1), (3, 2), (9, 9)])
@pytest.mark.parametrize("make", [stemmed, skips])
def test_hundreds_of_timings(make: Callable[[], tuple[nn.Module, Batch]], max_in_flight: int, prefetch: int) -> None:
    model, batch = make()
    want = train_step(model, model, batch)
    t = transformed(model, offload=fxckpt.Offload(max_in_flight=max_in_flight, prefetch=prefetch))
    for seed in range(40):
        with hostile(seed, poison=True, longest=0.0005):
            assert not differences(train_step(t, model, batch).values(), want.values()), f"seed {seed}"


@pytest.mark.parametrize("order", ORDERS)
def test_orders_of_calls(order: Callable[[Run, Xs], None]) -> None:
    plain, _ = stack()
    order(plain, inputs())
    want = grads(plain)
    model, _ = stack()
    t = transformed(model)
    for seed in range(10):
        model.zero_grad()
        with hostile(seed, poison=True, longest=0.0005):
            order(t, inputs())
        assert not differences(grads(model), want)


@pytest.mark.parametrize("late", Late)
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_numbers_of_compiled_models(name: str, late: Late) -> None:
    model, batch, layers = of_zoo(name)
    t = transformed(model, layers)
    run = torch.compile(t)
    want = train_step(run, model, batch)  # on the real tier
    for seed in range(1 if late is Late.AT_THE_WAIT else 12):
        with hostile(seed, late, longest=0.0005):
            assert not differences(train_step(run, model, batch).values(), want.values()), f"seed {seed}"


# ---- each wait is needed ------------------------------------------------------------------------------------------


def waits(run: Any) -> list[fx.Node]:
    nodes = [*run.forward.graph.nodes, *run.backward.graph.nodes]
    return [n for n in nodes if G.is_wait_offload(n) or G.is_wait_reload(n)]


def without_wait(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """From here on one wait, counted through forward and backward, is missing in captured graphs."""

    def remove(run: Any) -> None:
        wait = waits(run)[number]
        wait.graph.erase_node(wait)

    monkeypatch.setattr(pipeline, "PASSES", (*pipeline.PASSES, ("sabotage", remove)))


def wrong(got: Step, want: Step) -> bool:
    return bool(differences(got.values(), want.values()))


@pytest.mark.parametrize("number", range(10))
def test_without_any_one_wait_numbers_are_wrong(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    model, batch = stemmed()
    want = train_step(model, model, batch)
    without_wait(monkeypatch, number)
    t = transformed(model, verify=False)
    with hostile(late=Late.AT_THE_WAIT):
        got = train_step(t, model, batch)
    (record,) = fxckpt.graphs(t)
    assert len(record.transfers) == 5, "ten waits"
    assert wrong(got, want)


@pytest.mark.parametrize("number", [0, 4, 5, 9])
def test_without_a_wait_compiled_numbers_are_wrong(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    model, batch = stemmed()
    want = train_step(model, model, batch)
    without_wait(monkeypatch, number)
    t = transformed(model, verify=False)
    with torch._inductor.config.patch(force_disable_caches=True), hostile(late=Late.AT_THE_WAIT):
        got = train_step(torch.compile(t), model, batch)
    assert got.loss.isnan() or any(g is not None and g.isnan().any() for g in got.grads.values())
    assert wrong(got, want)


def test_a_wait_that_is_late_by_chance_shows_with_some_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that run beside the computation, not at the wait: one missing wait is seen by some of the seeds."""
    model, batch = stemmed()
    want = train_step(model, model, batch)
    without_wait(monkeypatch, 9)
    t = transformed(model, verify=False)
    seen = 0
    for seed in range(30):
        with hostile(seed, longest=0.01):
            seen += wrong(train_step(t, model, batch), want)
    assert seen


# ---- the window ---------------------------------------------------------------------------------------------------


def recorded(make: Callable[[], tuple[nn.Module, Batch]], **offload: Any) -> GraphRecord:
    model, batch = make()
    t = transformed(model, offload=fxckpt.Offload(**offload))
    train_step(t, model, batch)
    (record,) = fxckpt.graphs(t)
    return record


def under_way(graph: fx.Graph, start: Callable[[fx.Node], bool], end: Callable[[fx.Node], bool]) -> Iterator[int]:
    count = 0
    for node in graph.nodes:
        count += start(node) - end(node)
        yield count


@pytest.mark.parametrize("limit", [1, 2, 3])
@pytest.mark.parametrize("make", [stemmed, skips])
def test_no_more_offloads_than_allowed_are_under_way(make: Callable[[], tuple[nn.Module, Batch]], limit: int) -> None:
    record = recorded(make, max_in_flight=limit)
    assert max(under_way(record.forward.graph, G.is_offload, G.is_wait_offload)) == limit


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_reloads_start_so_many_regions_before_their_use(prefetch: int) -> None:
    record = recorded(stemmed, prefetch=prefetch)
    assert max(under_way(record.backward.graph, G.is_reload, G.is_wait_reload)) == max(prefetch, 1)
    order = [n.name for n in record.backward.graph.nodes]
    waits = [order.index(f"wait_reload_blocks_{block}_input") for block in range(5)]
    assert waits == sorted(waits, reverse=True)
    for block in range(5):
        start = order.index(f"reload_blocks_{block}_input")
        if prefetch == 0:
            assert start + 1 == waits[block]
        else:
            assert start < waits[min(block + prefetch - 1, 4)]
            assert block + prefetch > 4 or waits[block + prefetch] < start


@pytest.mark.parametrize("prefetch", [1, 2])
def test_a_region_that_reads_a_part_late_is_one_region(prefetch: int) -> None:
    """Its layers read keys and values of earlier ones, and need their own input and these at different times."""
    model, batch, layers = of_zoo("gemma4_shared_kv")
    want = train_step(model, model, batch)
    t = transformed(model, layers, offload=fxckpt.Offload(prefetch=prefetch))  # verify counts the regions under way
    assert not differences(train_step(t, model, batch).values(), want.values())


@pytest.mark.parametrize("name", ["llama", "t5", "whisper"])
def test_a_prefetch_does_not_lift_the_peak(name: str) -> None:
    """By the lifetimes of the graph's own storages."""
    peaks = {}
    for prefetch in (0, 1):
        model, batch, layers = of_zoo(name)
        t = transformed(model, layers, offload=fxckpt.Offload(prefetch=prefetch))
        train_step(t, model, batch)
        (record,) = fxckpt.graphs(t)
        inputs = {n.name for n in G.placeholders(record.forward.graph)}
        nodes = list(record.backward.graph.nodes)
        peaks[prefetch] = max(G.bytes_alive(nodes, {n for n in nodes if n.name in inputs}))
    assert peaks[1] <= peaks[0]


@pytest.mark.parametrize(("max_in_flight", "prefetch"), [(1, 1), (2, 1), (3, 2)])
def test_memory_of_the_forward_is_bounded(max_in_flight: int, prefetch: int) -> None:
    """Whatever the number of layers: a step's working set, and a boundary activation for each transfer under way."""

    def peak(offload: Any, n: int) -> int:
        torch.manual_seed(0)
        t = transformed(Stemmed(n), offload=offload)
        t(torch.randn(50, 8)).backward()
        (record,) = fxckpt.graphs(t)
        nodes = list(record.forward.graph.nodes)[:-1]  # what is returned counts no longer than it is read
        return max(G.bytes_alive(nodes, set(G.placeholders(record.forward.graph))))

    boundary = 50 * 8 * 4
    offload = fxckpt.Offload(max_in_flight=max_in_flight, prefetch=prefetch)
    working_set = peak(False, 12)
    assert peak(offload, 5) == peak(offload, 12) <= working_set + boundary * (max_in_flight + prefetch + 1)


def test_bytes_alive() -> None:
    """By hand: 4 bytes an element, views free, what is returned to the end, residents not at all."""
    graph = fx.Graph()
    ops = torch.ops.aten
    kept, x = graph.placeholder("kept"), graph.placeholder("x")
    a = graph.call_function(ops.exp.default, (x,))
    view = graph.call_function(ops.view.default, (a, [2]))
    b = graph.call_function(ops.add.Tensor, (x, kept))
    c = graph.call_function(ops.mul.Tensor, (view, view))
    graph.output((b, c))
    for node in (kept, x, a, view, b, c):
        G.set_value(node, torch.empty(2))
    assert G.bytes_alive(list(graph.nodes), {kept}) == [0, 8, 16, 16, 24, 24, 16]


def test_an_activation_goes_while_the_forward_still_runs() -> None:
    """With two under way, the wait for the first stands where the third starts."""
    record = recorded(stemmed)
    order = [n.name for n in record.forward.graph.nodes]
    for block in range(3):
        wait, start = f"wait_offload_blocks_{block}_input", f"offload_blocks_{block + 2}_input"
        assert order.index(wait) + 1 == order.index(start)


def test_an_activation_that_is_read_late_starts_late() -> None:
    """Its memory stays until its last reader has run: to copy it away earlier frees nothing."""
    record = recorded(skips, max_in_flight=1)
    order = list(record.forward.graph.nodes)
    for offload in (n for n in order if G.is_offload(n)):
        readers = [u for u in offload.args[0].users if not G.is_transfer(u) and not G.is_order(u)]
        (wait,) = (u for u in offload.users if G.is_wait_offload(u))
        assert all(order.index(u) < order.index(wait) for u in readers)
    first = next(n for n in order if n.name == "offload_blocks_0_input")
    last = max(order.index(u) for u in first.args[0].users if not G.is_transfer(u) and not G.is_order(u))
    assert all(G.is_wait_offload(n) for n in order[last + 1 : order.index(first)])


# ---- the order that Inductor keeps --------------------------------------------------------------------------------

CALL = re.compile(r"(?:buf\d+ = )?(torch\.ops\.(?:fxckpt|aten)\.\w+|extern_kernels\.\w+|cpp_fused\w*)[.\w]*\(")


def generated(t: nn.Module, batch: Batch, **options: Any) -> list[list[str]]:
    """The calls of the generated forward and backward, in order: ``offload blocks_1_input``, ``mm``, ..."""

    def run() -> None:
        torch.compile(t, options=options)(**batch).backward()

    with torch._inductor.config.patch(force_disable_caches=True):
        _, codes = run_and_get_code(run)
    return [calls(code) for code in codes if "fxckpt" in code]


def calls(code: str) -> list[str]:
    found, named = [], {}
    for line in code.splitlines():
        text = line.strip()
        match = CALL.match(text)
        if match is None:
            continue
        call = match.group(1).rsplit(".", 1)[-1]
        if call in ("offload", "reload"):
            transfer = re.search(r"'(\w+_input)'", text).group(1)
            named[text.partition(" = ")[0]] = transfer
            call = f"{call} {transfer}"
        elif call.startswith("wait_"):
            first = re.search(r"\((\w+),", text).group(1)
            call = f"{call} {transfer_of(first, named, code)}"
        found.append(call)
    return found


def transfer_of(buffer: str, named: dict[str, str], code: str) -> str:
    """The transfer whose start gave `buffer`, perhaps through another name."""
    while buffer not in named:
        buffer = re.search(rf"^\s*{buffer} = (\w+)", code, re.MULTILINE).group(1)
    return named[buffer]


@pytest.mark.parametrize("reorder", [True, False])
def test_inductor_keeps_the_order(reorder: bool) -> None:
    model, batch = stemmed()
    t = transformed(model)
    forward, backward = generated(t, batch, reorder_for_peak_memory=reorder)
    (record,) = fxckpt.graphs(t)
    for text, gm in ((forward, record.forward), (backward, record.backward)):
        want = [n for n in gm.graph.nodes if G.is_transfer(n)]
        names = [re.sub(r"(wait_)?(offload|reload)_", r"\1\2 ", n.name, count=1) for n in want]
        assert [c for c in text if "_input" in c] == names
    for block in range(1, 5):  # a product of the block before stands between one start and the next
        start, later = (forward.index(f"offload blocks_{b}_input") for b in (block - 1, block))
        assert any("mm" in c for c in forward[start:later])
    for block in range(1, 5):
        start, later = (backward.index(f"wait_reload blocks_{b}_input") for b in (block, block - 1))
        assert sum("mm" in c for c in backward[start:later]) >= 4, "a region's recompute and gradients"
        begun = backward.index(f"reload blocks_{block - 1}_input")
        assert start < begun < later, "a region ahead"
        assert any("mm" in c for c in backward[begun:later]), "and products are computed meanwhile"


def test_an_offload_costs_no_fusion() -> None:
    """What makes an activation is fused with what reads it, as without offload."""

    def kernels(offload: bool) -> int:
        torch.compiler.reset()
        model, batch = stemmed()
        with torch._inductor.config.patch(force_disable_caches=True):
            t = transformed(model, offload=offload)
            _, codes = run_and_get_code(lambda: torch.compile(t)(**batch).backward())
        return sum(c.startswith("cpp_fused") for code in codes for c in calls(code))

    assert kernels(True) == kernels(False)


# ---- CUDA graphs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ({"mode": "reduce-overhead"}, True),
        ({"options": {"triton.cudagraphs": True}}, True),
        ({"mode": "max-autotune-no-cudagraphs"}, False),
        ({}, False),
    ],
)
def test_offload_under_cuda_graphs_is_refused(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], refused: bool
) -> None:
    """A replay would run no Python, and so move nobody's activation. (The batch only seems to be on a GPU here.)"""
    asked: list[bool] = []

    def seen(inputs: Any) -> None:
        asked.append(True)
        raise fxckpt.UnsupportedError("no offload in CUDA graphs")

    monkeypatch.setattr(backend, "_refuse_cuda_graphs", seen)
    model, batch = stack(n=1)
    t = transformed(model)
    if refused:
        with pytest.raises(fxckpt.UnsupportedError):
            torch.compile(t, **settings)(**batch)
    else:
        torch.compile(t, **settings)(**batch).backward()
    assert bool(asked) is refused
    transformed(model, offload=False)(**batch).backward()


def test_on_a_cpu_there_are_no_cuda_graphs_to_refuse() -> None:
    model, batch = stack(n=1)
    torch.compile(transformed(model), mode="reduce-overhead")(**batch).backward()


# ---- figures ------------------------------------------------------------------------------------------------------


def test_figures_are_those_of_the_last_step() -> None:
    model, batch = stemmed()
    t = transformed(model)
    assert fxckpt.stats(t) == fxckpt.TransferStats()
    for _ in range(3):
        t(**batch).backward()
    figures = fxckpt.stats(t)
    assert (figures.offloads, figures.reloads) == (5, 5)
    assert figures.offloaded_bytes == figures.reloaded_bytes == figures.host_bytes == 5 * 5 * 8 * 4
    assert figures.in_flight_bytes == 2 * 5 * 8 * 4 and figures.disk_bytes == 0
    assert fxckpt.explain(t).to_dict()["transfers"] == figures.to_dict()
    t(**batch)
    assert (fxckpt.stats(t).offloads, fxckpt.stats(t).reloads) == (5, 0)
    with torch.no_grad():
        t(**batch)
    assert fxckpt.stats(t).offloads == 5


def test_figures_of_a_model_in_a_compiled_function() -> None:
    model, batch = stemmed()
    t = transformed(model, offload=fxckpt.Offload(max_in_flight=3))
    step = torch.compile(lambda x: t(x=x) * 2, backend="aot_eager")
    for _ in range(3):
        step(batch["x"]).backward()
    figures = fxckpt.stats(t)
    assert (figures.offloads, figures.reloads, figures.offloaded_bytes) == (5, 5, 5 * 5 * 8 * 4)
