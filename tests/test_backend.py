"""`torch.compile(t)`: its modes and backends, refusals, no gradients, and as many graphs as the original has."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
from functorch.compile import make_boxed_func
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import InternalTorchDynamoError
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

import fxckpt
from fxckpt.torch_private import aot
from fxckpt.use import call
from fxckpt.use.backend import _convolves_inputs_only, plain_backend
from tests.helpers import Step, assert_close, assert_same, seed_all, train_step
from tests.situations.models import Residual, Stack, qwen3, stack, tokens
from tests.zoo import build, get_loss

Batch = dict[str, Any]


@pytest.fixture(autouse=True)
def fresh_counters() -> Iterator[None]:
    counters.clear()
    yield
    counters.clear()


def pair(**settings: Any) -> tuple[Stack, Stack, Batch]:
    model, batch = stack(lambda: Residual(8))
    return fxckpt.transform(model, layers=Residual, **settings), model, batch


def plain_step(run: Callable[[nn.Module], Callable[..., Any]] = lambda m: m) -> Step:
    model, batch = stack(lambda: Residual(8))
    return train_step(run(model), model, batch)


def rewritten(t: nn.Module, regions: int) -> None:
    records = fxckpt.graphs(t)
    assert sum(len(r.regions) for r in records) == regions
    assert any(record.transfers for record in records)


# ---- arguments of torch.compile -----------------------------------------------------------------------------------

INDUCTOR: dict[str, dict[str, Any]] = {
    "fullgraph": {"fullgraph": True},
    "dynamic": {"fullgraph": True, "dynamic": True},
    "reduce-overhead": {"mode": "reduce-overhead"},
    "max-autotune": {"mode": "max-autotune-no-cudagraphs"},
    "options": {"options": {"reorder_for_peak_memory": False, "score_fusion_memory_threshold": 10}},
}


@pytest.mark.parametrize("name", INDUCTOR)
def test_inductor(name: str) -> None:
    want = plain_step(lambda m: torch.compile(m, **INDUCTOR[name]))
    torch._dynamo.reset()
    t, model, batch = pair(offload=True)
    run = torch.compile(t, **INDUCTOR[name])
    for _ in range(2):
        assert_close(train_step(run, model, batch), want)
    rewritten(t, 4)
    assert len(fxckpt.graphs(t)) == 1


def test_inductor_dynamic_shapes() -> None:
    """Several lengths of a language model: one graph, right numbers in each."""
    plain, model = qwen3(layers=1), qwen3(layers=1)
    t = fxckpt.transform(model, offload=True)
    run = torch.compile(t, fullgraph=True, dynamic=True)
    for length in (8, 11):
        batch = tokens(s=length)
        assert_close(train_step(run, model, batch), train_step(plain, plain, batch))
    assert len(fxckpt.graphs(t)) == 1
    rewritten(t, 1)


def test_inspection_of_dynamic_shapes_from_a_warm_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo starts over to take some numbers as constants; so does whoever captures the graph again to look at it."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    found = []
    for _ in range(2):
        torch._dynamo.reset()
        model = qwen3(layers=1)
        t = fxckpt.transform(model, offload=True)
        train_step(torch.compile(t, fullgraph=True, dynamic=True), model, tokens(s=8))
        found.append([(r.transfers, r.plan.boundaries, r.offloaded_bytes) for r in fxckpt.graphs(t)])
    assert counters["aot_autograd"]["autograd_cache_hit"] and found[0] == found[1]


def test_vector_instructions_are_probed_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a thread, for Inductor only; that the probe fails there is nobody's error."""
    probed: list[threading.Thread] = []

    def fails() -> None:
        probed.append(threading.current_thread())
        raise RuntimeError("no compiler")

    monkeypatch.setattr("torch._inductor.cpu_vec_isa.pick_vec_isa", fails)
    aot._probe_vector_instructions.cache_clear()
    aot.prepare(plain_backend)
    assert probed == []
    aot.prepare(torch._TorchCompileInductorWrapper(None, None, None))
    aot.prepare(torch._TorchCompileInductorWrapper(None, None, None))
    while any(t.name == "fxckpt-vector-instructions" for t in threading.enumerate()):
        time.sleep(0.01)
    assert len(probed) == 1 and probed[0] is not threading.main_thread()


def test_users_options_win() -> None:
    """fxckpt's own defaults for Inductor neither replace the user's nor reach other compilations."""
    from torch._inductor import config

    seen: list[int] = []

    def look(graph: fx.Graph) -> None:
        seen.append(config.score_fusion_memory_threshold)

    before = config.score_fusion_memory_threshold
    for options in ({}, {"score_fusion_memory_threshold": 11}):
        torch._dynamo.reset()
        t, model, batch = pair()
        train_step(torch.compile(t, options={"post_grad_custom_post_pass": look, **options}), model, batch)
    torch._dynamo.reset()
    plain_step(lambda m: torch.compile(m, options={"post_grad_custom_post_pass": look}))
    assert len(seen) == 6
    ours, users, plain = set(seen[:2]), set(seen[2:4]), set(seen[4:])
    assert ours.isdisjoint({before, 11}) and users == {11} and plain == {before}
    assert config.score_fusion_memory_threshold == before


# ---- backends -----------------------------------------------------------------------------------------------------


def own_aot(log: list[int]) -> Callable[..., Any]:
    """A user's own backend, built on AOTAutograd as PyTorch's documentation shows."""

    def compiler(gm: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Callable[..., Any]:
        log.append(len(gm.graph.nodes))
        return make_boxed_func(gm.forward)

    return aot_autograd(fw_compiler=compiler)


def counted(log: list[int]) -> CompileCounterWithBackend:
    class Counter(CompileCounterWithBackend):
        def __call__(self, gm: fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
            log.extend((1, 1))
            return super().__call__(gm, inputs)

    return Counter("aot_eager")


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", "aot_eager_decomp_partition", own_aot, counted])
def test_backends_on_aotautograd(backend: Any, fullgraph: bool) -> None:
    log: list[int] = []
    want = plain_step(lambda m: torch.compile(m, backend=backend([]) if callable(backend) else backend))
    t, model, batch = pair(offload=True)
    run = torch.compile(t, backend=backend(log) if callable(backend) else backend, fullgraph=fullgraph)
    for _ in range(2):
        assert_same(train_step(run, model, batch), want)
    rewritten(t, 4)
    assert not callable(backend) or len(log) == 2, "one forward and one backward graph"


def own_plain(gm: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
    return gm.forward


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("backend", ["eager", own_plain])
def test_backends_without_aotautograd_are_refused(backend: Any, fullgraph: bool) -> None:
    t, _, batch = pair()
    run = torch.compile(t, backend=backend, fullgraph=fullgraph)
    for _ in range(2):
        with pytest.raises(fxckpt.BackendError, match="aot_eager"):
            run(**batch)
    with torch.no_grad():
        run(**batch)


def test_a_failing_backend_shows_its_own_error() -> None:
    def broken(gm: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        raise ZeroDivisionError("mine")

    t, _, batch = pair()
    with pytest.raises(Exception, match="mine") as info:
        torch.compile(t, backend=broken)(**batch)
    assert not isinstance(info.value, fxckpt.FxckptError)


def test_several_backends_one_after_the_other() -> None:
    want = plain_step()
    t, model, batch = pair(offload=True)
    for backend in ("aot_eager", None, "aot_eager_decomp_partition", "aot_eager", None):
        run = t if backend is None else torch.compile(t, backend=backend)
        assert_close(train_step(run, model, batch), want)
    assert len(fxckpt.graphs(t)) == 3, "each backend captures once"


# ---- inside somebody else's compiled function ---------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_inside_a_compiled_function(backend: str) -> None:
    want = plain_step()
    t, model, batch = pair(every_n=2, offload=True)

    @torch.compile(backend=backend, fullgraph=True)
    def step(x: torch.Tensor) -> torch.Tensor:
        return t(x=x * 2 / 2) * 1.0

    for _ in range(2):
        assert_close(train_step(step, model, batch), want)
    rewritten(t, 4)
    assert len(fxckpt.graphs(t)) == 1 and fxckpt.graphs(t)[0].transfers == ("blocks_2_input",)
    with torch.no_grad():
        torch.testing.assert_close(step(**batch), want.loss)


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.head = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(x=x)[None]).sum()


def test_inside_a_compiled_module() -> None:
    plain, batch = stack(lambda: Residual(8))
    torch.manual_seed(5)
    want = train_step(holder := Wrapper(plain), holder, batch)
    t, _, batch = pair(offload=True)
    torch.manual_seed(5)
    holder = Wrapper(t)
    assert_same(train_step(torch.compile(holder, backend="aot_eager", fullgraph=True), holder, batch), want)
    rewritten(t, 4)


def test_inside_a_compiled_function_a_plain_backend_is_refused() -> None:
    t, _, batch = pair()
    with pytest.raises(fxckpt.BackendError):
        torch.compile(lambda x: t(x=x) * 2, backend="eager", fullgraph=True)(**batch)


def our_error(error: BaseException) -> BaseException:
    """What Dynamo wraps when a backend raises inside a compilation of the user's."""
    return getattr(error, "inner_exception", error)


def test_two_transforms_inside_one_compiled_function_are_refused() -> None:
    t, _, batch = pair()
    u, _, _ = pair(every_n=2)
    step = torch.compile(lambda x: t(x=x) + u(x=x), backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="several transformed models") as info:
        step(**batch)
    assert isinstance(our_error(info.value), fxckpt.UnsupportedError)


def test_two_calls_inside_one_compiled_function() -> None:
    t, model, batch = pair(every_n=2)
    plain, _ = stack(lambda: Residual(8))
    want = train_step(lambda x: plain(x=x) + plain(x=x + 1), plain, batch)
    step = torch.compile(lambda x: t(x=x) + t(x=x + 1), backend="aot_eager", fullgraph=True)
    assert_close(train_step(step, model, batch), want)
    names = [r.name for r in fxckpt.graphs(t)[0].regions]
    assert len(names) == 8 and len(set(names)) == 8


class Idle(Stack):
    """Does not call its blocks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.blocks[0].a.bias[:8]).mean()


@pytest.mark.parametrize("how", ["plain", "compiled", "inside"])
def test_layers_that_are_not_called_are_told(how: str) -> None:
    t = fxckpt.transform(Idle([Residual(8)]), layers=Residual)
    run = {
        "plain": t,
        "compiled": torch.compile(t, backend="aot_eager"),
        "inside": torch.compile(lambda x: t(x=x) * 2, backend="aot_eager"),
    }[how]
    with pytest.raises(Exception, match=r"blocks\.0") as info:
        run(x=torch.randn(2, 8))
    assert isinstance(our_error(info.value), fxckpt.CaptureError)


# ---- Dynamo is off, or gives up -----------------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", [False, True])
def test_force_eager_is_refused(compiled: bool) -> None:
    t, model, batch = pair()
    run = torch.compile(t, backend="aot_eager") if compiled else t
    with torch.compiler.set_stance("force_eager"):
        with pytest.raises(fxckpt.CaptureError, match="set_stance"):
            run(**batch)
        with torch.no_grad():
            run(**batch)
    assert_same(train_step(run, model, batch), plain_step())


STANCES: list[tuple[str, dict[str, Any]]] = [
    ("force_eager", {}),
    ("eager_on_recompile", {}),
    ("eager_then_compile", {}),
    ("aot_eager_then_compile", {}),
    ("default", {"force_backend": "eager"}),
]


@pytest.mark.parametrize(("stance", "options"), STANCES, ids=[s for s, _ in STANCES])
@pytest.mark.parametrize("compiled", [False, True])
def test_stances_after_a_captured_call(compiled: bool, stance: str, options: dict[str, Any]) -> None:
    """The graphs of earlier calls prove nothing about this one."""
    t, model, batch = pair()
    run = torch.compile(t, backend="aot_eager") if compiled else t
    train_step(run, model, batch)
    with torch.compiler.set_stance(stance, **options):
        with pytest.raises(fxckpt.CaptureError, match="set_stance"):
            run(x=torch.randn(3, 8))
        with torch.no_grad():
            run(**batch)


def test_fail_on_recompile_is_allowed() -> None:
    t, model, batch = pair()
    want = train_step(t, model, batch)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert_same(train_step(t, model, batch), want)
        with pytest.raises(RuntimeError, match="fail_on_recompile"):
            t(x=torch.randn(3, 8))


def test_suppressed_errors_are_not() -> None:
    """`suppress_errors` would run what cannot be compiled plainly."""

    def broken(gm: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        raise ZeroDivisionError("mine")

    t, model, batch = pair()
    with torch._dynamo.config.patch(suppress_errors=True):
        assert_same(train_step(torch.compile(t, backend="aot_eager"), model, batch), plain_step())
        with pytest.raises(Exception, match="mine"):
            torch.compile(t, backend=broken)(**batch)


class Counting(nn.Module):
    """Takes a Python number that Dynamo compiles anew for each value of."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual(8) for _ in range(2))

    def forward(self, x: torch.Tensor, mode: str) -> torch.Tensor:
        for b in self.blocks:
            x = b(x)
        return x.square().mean() * len(mode)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_recompile_limit_is_refused(backend: str | None) -> None:
    model = Counting()
    t = fxckpt.transform(model, layers=Residual)
    run = torch.compile(t, backend=backend) if backend else t
    x = torch.randn(3, 8)
    limit = 4
    with torch._dynamo.config.patch(recompile_limit=limit, accumulated_recompile_limit=limit):
        calls = 0
        with pytest.raises(fxckpt.CaptureError, match="recompile_limit"):
            for calls in range(200):
                run(x=x, mode="m" * (calls + 1)).backward()
    assert len(fxckpt.graphs(t)) == calls >= limit
    run(x=x, mode="m").backward()  # what was compiled still runs


# ---- without gradients ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_is_captured(context: Callable[[], Any], backend: str | None) -> None:
    t, model, batch = pair()
    run = torch.compile(t, backend=backend) if backend else t
    with context():
        assert torch.equal(run(**batch), model(**batch))
    assert counters["stats"]["unique_graphs"] == (1 if backend else 0)
    with pytest.raises(fxckpt.CaptureError, match="captured yet"):
        fxckpt.graphs(t)


@pytest.mark.parametrize("training", [False, True])
def test_generate(training: bool) -> None:
    """Greedy generation with the key-value cache gives the original's tokens and captures nothing."""
    model, batch = build("llama")
    t = fxckpt.transform(model, offload=True)
    prompt = batch["input_ids"][:, :5]
    options = {"max_new_tokens": 6, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    model.train(training)
    want = model.generate(prompt, **options, return_dict_in_generate=True)
    got = t.generate(prompt, **options, return_dict_in_generate=True)
    assert torch.equal(got.sequences, want.sequences)
    assert got.past_key_values.get_seq_length() == want.past_key_values.get_seq_length() > 5
    assert not counters["stats"]["unique_graphs"] and model.training == training
    with pytest.raises(fxckpt.CaptureError, match="captured yet"):
        fxckpt.graphs(t)
    model.train()
    train_step(t, model, batch)
    graphs = counters["stats"]["unique_graphs"]
    assert torch.equal(t.generate(prompt, **options), t.generate(prompt, **options))
    assert counters["stats"]["unique_graphs"] == graphs


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_eval_with_gradients_is_rewritten(backend: str | None) -> None:
    plain, batch = build("llama", dropout=True)
    plain.eval()
    want = train_step(plain, plain, batch)
    model, batch = build("llama", dropout=True)
    t = fxckpt.transform(model, every_n=2, offload=True).eval()
    assert_same(train_step(torch.compile(t, backend=backend) if backend else t, model, batch), want)
    rewritten(t, 4)
    assert len(fxckpt.graphs(t)[0].transfers) == 2


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_frozen_model_runs_plainly(backend: str | None) -> None:
    t, model, batch = pair()
    model.requires_grad_(False)
    run = torch.compile(t, backend=backend) if backend else t
    assert torch.equal(run(**batch), model(**batch)) and not run(**batch).requires_grad
    with pytest.raises(fxckpt.CaptureError, match="captured yet"):
        fxckpt.graphs(t)
    plain, _ = stack(lambda: Residual(8))
    plain.requires_grad_(False)
    xs = [batch["x"].clone().requires_grad_() for _ in range(2)]
    run(x=xs[0]).backward()
    plain(x=xs[1]).backward()
    assert torch.equal(xs[0].grad, xs[1].grad), "an input that needs a gradient is reason enough"
    assert len(fxckpt.graphs(t)[0].regions) == 4


# ---- counts --------------------------------------------------------------------------------------------------------


class Broken(nn.Module):
    """A graph break between its layers, and one inside each of them."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual(8) for _ in range(3))
        self.inside = inside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for b in self.blocks:
            x = b(x)
            if not self.inside:
                torch._dynamo.graph_break()
        return x.square().mean()


class BrokenInside(Broken):
    def __init__(self) -> None:
        super().__init__(True)
        for b in self.blocks:
            b.act = broken_tanh


def broken_tanh(x: torch.Tensor) -> torch.Tensor:
    x = torch.tanh(x)
    torch._dynamo.graph_break()
    return x * 1.5


def lengths(make: Callable[[], nn.Module], sizes: Sequence[int]) -> tuple[nn.Module, list[Batch]]:
    torch.manual_seed(0)
    return make(), [{"x": torch.randn(s, 8)} for s in sizes]


def languages(sizes: Sequence[int]) -> tuple[nn.Module, list[Batch]]:
    return qwen3(layers=2), [tokens(b=2 + i % 2, s=s) for i, s in enumerate(sizes)]


SEQUENCE = (8, 8, 11, 13, 8, 1, 17)
MODELS: dict[str, Callable[[], tuple[nn.Module, list[Batch]]]] = {
    "stack": lambda: lengths(lambda: stack(lambda: Residual(8))[0], SEQUENCE),
    "qwen3": lambda: languages((8, 11, 8, 1)),
    "graph break": lambda: lengths(lambda: Broken(False), SEQUENCE),
    "graph break inside": lambda: lengths(BrokenInside, SEQUENCE),
}


def run_sequence(name: str, dynamic: bool | None, **settings: Any) -> tuple[list[Step], dict[str, int], nn.Module]:
    """Training steps with an evaluation and an eval-mode step among them, and what was compiled for it.

    Without settings the model is not transformed.
    """
    torch._dynamo.reset()
    counters.clear()
    model, batches = MODELS[name]()
    layers = None if name == "qwen3" else Residual
    target = fxckpt.transform(model, layers=layers, **settings) if settings else model
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(target, backend=counter, dynamic=dynamic)
    steps = []
    for i, batch in enumerate(batches):
        steps.append(train_step(run, model, batch))
        if i == 2:
            with torch.no_grad():
                get_loss(run(**batch))
        if i == 4:
            model.eval()
            steps.append(train_step(run, model, batch))
            model.train()
    return steps, {"frames": counter.frame_count, "graphs": counters["stats"]["unique_graphs"]}, target


def check_sequence(name: str, dynamic: bool | None, **settings: Any) -> tuple[dict[str, int], dict[str, int]]:
    """Counts of the transformed and of the plain model, after the same numbers from both."""
    with torch._dynamo.config.patch(recompile_limit=32):  # where it is hit, one runs plainly and the other raises
        want, plain_counts, _ = run_sequence(name, dynamic)
        got, counts, t = run_sequence(name, dynamic, **settings)
    for g, w in zip(got, want, strict=True):
        assert_same(g, w)
    called = {r.layer.name for record in fxckpt.graphs(t) for r in record.regions}
    if "break" in name:  # layers that are treated alike share the graphs of their frames
        assert "blocks.0" in called
    else:
        assert set(fxckpt.selected_layers(t)) <= called
    return counts, plain_counts


CASES = [(name, dynamic) for name in MODELS for dynamic in (None, True, False) if name != "qwen3" or dynamic is None]


@pytest.mark.parametrize(("name", "dynamic"), CASES)
def test_as_many_graphs_as_the_original(name: str, dynamic: bool | None) -> None:
    every_n = 1 if "break" in name else 2
    counts, plain_counts = check_sequence(name, dynamic, every_n=every_n, offload=True)
    assert counts == plain_counts


@pytest.mark.parametrize("name", ["graph break", "graph break inside"])
def test_layers_in_frames_of_their_own_need_a_graph_for_each_treatment(name: str) -> None:
    counts, plain_counts = check_sequence(name, None, every_n=2, offload=True)
    for kind, count in counts.items():
        assert count <= 2 * plain_counts[kind]


def test_plain_calls_capture_as_torch_compile_does() -> None:
    """Called without torch.compile, t has its own compilations: as many as torch.compile(model) has."""
    _, counts, _ = run_sequence("stack", None)
    torch._dynamo.reset()
    counters.clear()
    model, batches = MODELS["stack"]()
    t = fxckpt.transform(model, every_n=2, layers=Residual)
    for batch in batches:
        train_step(t, model, batch)
    assert len(fxckpt.graphs(t)) == counters["stats"]["unique_graphs"] <= counts["graphs"]


class ReadsData(nn.Module):
    """A block whose scale is a number read from a tensor, and whose rows are those that a mask names."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.detach().abs().max().item()
        rows = (x.detach()[:, 0] > 0).nonzero().squeeze(1)
        return x.index_add(0, rows, torch.tanh(self.a(x[rows])) / scale)


class Routes(nn.Module):
    """A block whose experts each take the rows that tensors tell."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = (x.detach()[:, 0] > 0).long()
        for i, expert in enumerate(self.experts):
            rows = torch.where(chosen == i)[0]
            x = x.index_add(0, rows, torch.tanh(expert(x[rows])))
        return x


@pytest.mark.parametrize(("make", "backend"), [(ReadsData, None), (Routes, None), (Routes, "aot_eager")])
def test_what_depends_on_data_is_captured(make: type[nn.Module], backend: str | None) -> None:
    """Dynamo's default is to break the graph there, and to leave a loop that does so alone."""
    model, batch = stack(make)
    want = train_step(model, model, batch)
    model, batch = stack(make)
    t = fxckpt.transform(model, layers=make, offload=True, verify=True)
    run = t if backend is None else torch.compile(t, backend=backend)
    for _ in range(2):
        assert_same(train_step(run, model, batch), want)
    (record,) = fxckpt.graphs(t)
    assert len(record.regions) == 4
    assert not torch._dynamo.config.capture_dynamic_output_shape_ops


class Loops(Routes):
    """A block that takes its experts as a tensor tells."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = (x.detach()[:, 0] > 0).long()
        for i in torch.unique(chosen):
            x = x + torch.tanh(self.experts[int(i)](x)) * (chosen == i)[:, None]
        return x


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_what_cannot_be_captured_either_way_is_refused(backend: str | None) -> None:
    model, batch = stack(Loops)
    t = fxckpt.transform(model, layers=Loops)
    run = t if backend is None else torch.compile(t, backend=backend)
    for _ in range(2):
        with pytest.raises(fxckpt.CaptureError, match=r"outside its graphs|was not captured by Dynamo"):
            train_step(run, model, batch)
    want = train_step(torch.compile(model, backend="aot_eager"), model, batch)
    assert_close(want, train_step(model, model, batch))  # the original model goes its ordinary way


BY_DATA = GuardOnDataDependentSymNode(sympy.Symbol("u0"), "a size that the data tell")
PENDING = InternalTorchDynamoError("PendingUnbackedSymbolNotFound: Pending unbacked symbols {u2}")


def failing_once(
    monkeypatch: pytest.MonkeyPatch, before: Callable[[nn.Module], None], error: Exception = BY_DATA
) -> list[bool]:
    """Let the first call of a compiled forward fail after `before(model)`; the list says how widely each captured."""
    tries: list[bool] = []
    real = call._compiled

    def compiled(state: Any, forward: Any, user: Any) -> Callable[..., Any]:
        run = real(state, forward, user)

        def once(*args: Any, **kwargs: Any) -> Any:
            tries.append(torch._dynamo.config.capture_scalar_outputs)
            if len(tries) == 1:
                before(state.model)
                raise error
            return run(*args, **kwargs)

        return once

    monkeypatch.setattr(call, "_compiled", compiled)
    return tries


@pytest.mark.parametrize("error", [BY_DATA, PENDING], ids=lambda error: type(error).__name__)
def test_what_cannot_be_captured_so_widely_is_captured_as_by_default(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The second try finds the random state that the first one found."""
    make = lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))  # noqa: E731
    model, batch = stack(make)
    want = train_step(model, model, batch)
    model, batch = stack(make)
    tries = failing_once(monkeypatch, lambda model: model(torch.rand(4, 8)).sum(), error)
    t = fxckpt.transform(model, layers=nn.Sequential)
    for _ in range(2):
        assert_same(train_step(t, model, batch), want)
    assert tries == [True, False, False]


def test_a_wrong_call_does_not_narrow_later_captures() -> None:
    model, batch = stack(ReadsData)
    t = fxckpt.transform(model, layers=ReadsData, offload=True, verify=True)
    with pytest.raises(fxckpt.CaptureError):
        t(**{name: value[:, :-1] for name, value in batch.items()})
    t(**batch)
    (record,) = fxckpt.graphs(t)
    assert len(record.regions) == 4


def test_no_second_try_after_a_change_of_state(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = stack(lambda: Residual(8))
    failing_once(monkeypatch, lambda model: model.scale.add_(1))  # type: ignore[operator, union-attr]
    t = fxckpt.transform(model, layers=Residual)
    with pytest.raises(fxckpt.CaptureError, match="a size that the data tell"):
        t(**batch)


def test_other_models_are_left_alone() -> None:
    """A model that was not transformed goes its ordinary way, before, between and after."""
    want = plain_step(lambda m: torch.compile(m, backend="aot_eager"))
    t, model, batch = pair()
    run = torch.compile(model, backend="aot_eager")
    assert_same(train_step(run, model, batch), want)
    assert_same(train_step(torch.compile(t, backend="aot_eager"), model, batch), want)
    seed_all()
    assert_same(train_step(run, model, batch), want)
    assert len(fxckpt.graphs(t)) == 1


@pytest.mark.parametrize(
    ("reads", "wanted"), [("input", True), ("cast input", True), ("activation", False), ("", False)]
)
def test_the_layout_is_kept_where_convolutions_read_inputs_only(reads: str, wanted: bool) -> None:
    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    read = {
        "cast input": lambda: graph.call_method("to", (x, torch.float32)),
        "activation": lambda: graph.call_function(torch.relu, (x,)),
    }.get(reads, lambda: x)()
    graph.output(graph.call_function(torch.conv2d if reads else torch.matmul, (read, weight)))
    assert _convolves_inputs_only(fx.GraphModule({}, graph)) is wanted
