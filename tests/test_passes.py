"""The passes by what they make of a small graph: its text, what a second run changes, and what is left alone.

The golden texts of tests/golden are accepted anew with FXCKPT_ACCEPT=1.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

import fxckpt
from fxckpt import graph as G
from fxckpt import pipeline
from fxckpt.record import GraphRecord
from fxckpt.rewrite.obey import hold_boundaries, release_boundaries, tell_partitioner
from fxckpt.rewrite.offload import insert_transfers
from tests.golden import assert_golden
from tests.golden.model import Block, Stack
from tests.helpers import DEVICE, assert_same, train_step

on_cpu = pytest.mark.skipif(DEVICE != "cpu", reason="the golden texts name the device")
NAMES = (
    *("names", "regions", "take_over", "masks", "plan", "copy_inputs", "hold", "tags"),
    *("partition", "release", "transfers", "rematerialize", "schedule", "overlap"),
)


def step(model: nn.Module | None = None, compiled: bool = False, **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    model = (model or Stack(depth=2)).to(DEVICE)
    t = fxckpt.transform(model, **{"layers": [Block], "every_n": 2, "offload": True, "verify": True, **settings})
    run = torch.compile(t, backend="aot_eager") if compiled else t
    run(torch.randn(4, 8, device=DEVICE)).backward()
    return t


def record_of(**settings: Any) -> GraphRecord:
    (record,) = fxckpt.graphs(step(**settings))
    return record


def text(gm: fx.GraphModule) -> str:
    """One line a node: name, operator, arguments, and the tag the rewrite put on it."""
    return "\n".join(line for n in gm.graph.nodes if (line := _line(n)))


def _line(node: fx.Node) -> str:
    if node.op == "placeholder":
        return f"{node.name}: input" if node.users else ""
    args = ", ".join([*(str(a) for a in node.args), *(f"{k}={v}" for k, v in node.kwargs.items())])
    if node.op == "output":
        return f"return {args}"
    target = str(node.target) if isinstance(node.target, torch._ops.OpOverload) else node.target.__name__
    tag = G.tag(node)
    return f"{node.name} = {target}({args})" + (f"  # {tag.kind.value}" if tag is not None else "")


# ---- golden texts ------------------------------------------------------------------------------------------------


@on_cpu
def test_rewritten_graphs() -> None:
    record = record_of()
    assert_golden("rewritten_forward.txt", text(record.forward))
    assert_golden("rewritten_backward.txt", text(record.backward))


@on_cpu
def test_torch_compile_gets_the_same_graphs() -> None:
    (record,) = fxckpt.graphs(step(compiled=True))
    assert_golden("rewritten_forward.txt", text(record.forward))
    assert_golden("rewritten_backward.txt", text(record.backward))


def test_the_same_model_gives_the_same_text_twice() -> None:
    first, second = record_of(), record_of()
    assert text(first.forward) == text(second.forward) and text(first.backward) == text(second.backward)


def test_print_readable_shows_the_transfers() -> None:
    record = record_of()
    forward = record.forward.print_readable(print_output=False)
    backward = record.backward.print_readable(print_output=False)
    assert "offload_blocks_0_input" in forward and "torch.ops.fxckpt.offload" in forward
    assert "reload_blocks_0_input" in backward and "torch.ops.fxckpt.reload" in backward


def test_counts_of_operators() -> None:
    """A recomputed block computes its inside again, and not its last product: nothing reads that in the backward."""

    def count(gm: fx.GraphModule, op: Any) -> int:
        return sum(G.overload_packet(n) is op for n in gm.graph.nodes)

    aten, fxck = torch.ops.aten, torch.ops.fxckpt
    record = record_of(model=Stack(depth=4))
    assert count(record.forward, fxck.offload) == count(record.backward, fxck.reload) == 2
    assert count(record.forward, aten.addmm) == 1 + 4 * 2 + 1 and count(record.backward, aten.addmm) == 2
    assert count(record.forward, aten.tanh) == 4 and count(record.backward, aten.tanh) == 2
    assert count(record.backward, aten.native_layer_norm) == 2
    for gm in (record.forward, record.backward):
        assert not gm.graph.find_nodes(op="call_function", target=fxck.boundary.default)


def test_recomputation_starts_with_the_gradient_of_what_follows_it() -> None:
    """Just in time: nothing of a region is computed again before the backward reaches it."""
    record = record_of(model=Stack(depth=4))
    order = [n.name for n in record.backward.graph.nodes]
    waits = [n for n in record.backward.graph.nodes if G.is_wait_reload(n)]
    assert [n.name for n in waits] == ["wait_reload_blocks_2_input", "wait_reload_blocks_0_input"]
    gradients = [i for i, n in enumerate(record.backward.graph.nodes) if n.name.startswith("tanh_backward")]
    assert len(gradients) == 4
    assert gradients[0] < order.index(waits[0].name) < gradients[1] < gradients[2] < order.index(waits[1].name)


# ---- twice equals once -------------------------------------------------------------------------------------------


def rerun(monkeypatch: pytest.MonkeyPatch, name: str, again: Any) -> GraphRecord:
    """The record of a run in which `again` follows the pass `name`."""
    passes = list(pipeline.PASSES)
    passes.insert([n for n, _ in passes].index(name) + 1, (f"{name}_again", again))
    monkeypatch.setattr(pipeline, "PASSES", tuple(passes))
    return record_of()


@pytest.mark.parametrize("name", ["regions", "take_over", "masks", "plan", "copy_inputs", "hold", "tags", "release"])
def test_a_pass_run_twice_changes_nothing_more(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    once = record_of()
    twice = rerun(monkeypatch, name, dict(pipeline.PASSES)[name])
    assert text(twice.forward) == text(once.forward) and text(twice.backward) == text(once.backward)
    assert twice.plan == once.plan and twice.transfers == once.transfers


def test_transfers_inserted_twice_stand_once(monkeypatch: pytest.MonkeyPatch) -> None:
    once, added = record_of(), []

    def again(run: Any) -> None:
        added.extend(insert_transfers(run.forward, run.backward, run.num_forward_outputs))

    twice = rerun(monkeypatch, "transfers", again)
    assert not added and text(twice.forward) == text(once.forward) and text(twice.backward) == text(once.backward)


def test_holding_twice_and_releasing_leaves_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values picked out of a tuple are held once, however often the pass runs."""

    class Post(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x + torch.tanh(self.a(x)))

    def model() -> nn.Module:
        made = Stack(depth=0)
        made.blocks = nn.ModuleList(Post() for _ in range(3))
        return made

    held: list[int] = []

    def again(run: Any) -> None:
        hold_boundaries(run.joint.graph)
        held.append(len(run.joint.graph.find_nodes(op="call_function", target=torch.ops.fxckpt.boundary.default)))

    once = record_of(model=model(), layers=[Post], every_n=1)
    passes = list(pipeline.PASSES)
    passes.insert([n for n, _ in passes].index("hold") + 1, ("again", again))
    monkeypatch.setattr(pipeline, "PASSES", tuple(passes))
    twice = record_of(model=model(), layers=[Post], every_n=1)
    assert held == [3], "two inputs of blocks and the last block's output"
    assert text(twice.forward) == text(once.forward) and text(twice.backward) == text(once.backward)


# ---- kept when unsafe --------------------------------------------------------------------------------------------


def test_no_tag_no_change() -> None:
    """Passes obey tags only: without them each leaves both kinds of graph as they are."""
    record = record_of(policy=lambda layer: False)
    for gm in (record.joint, record.forward, record.backward):
        assert not [n for n in gm.graph.nodes if G.tag(n) is not None]
    before = text(record.joint)
    hold_boundaries(record.joint.graph)
    tell_partitioner(record.joint.graph)
    assert text(record.joint) == before and not any(G.policy(n) for n in record.joint.graph.nodes)
    before = text(record.forward) + text(record.backward)
    release_boundaries(record.forward.graph, record.backward.graph)
    assert insert_transfers(record.forward, record.backward, record.num_forward_outputs) == []
    assert text(record.forward) + text(record.backward) == before


def test_a_value_that_may_not_move_stays() -> None:
    """A tag that asks for an offload of an input, or of what an output keeps alive, is not obeyed."""
    record = record_of(offload=False)
    outputs = G.output_args(record.forward.graph)
    saved = [n for n in outputs[record.num_forward_outputs :] if isinstance(n, fx.Node)]
    parameter = next(n for n in saved if n.op == "placeholder")
    G.set_tag(parameter, G.Tag(G.Kind.BOUNDARY, (0,), "parameter", offload=True))
    hidden = next(n for n in saved if (t := G.tag(n)) is not None and t.name == "blocks_0_input")
    G.set_tag(hidden, G.Tag(G.Kind.BOUNDARY, (0,), "hidden", offload=True))
    outputs.insert(0, hidden)  # now the user gets it as well
    G.output_node(record.forward.graph).args = (tuple(outputs),)
    assert insert_transfers(record.forward, record.backward, record.num_forward_outputs + 1) == []


def test_what_changes_an_input_is_not_told_to_run_again() -> None:
    graph = fx.Graph()
    x = graph.placeholder("primals_1")
    changes = graph.call_function(torch.ops.aten.add_.Tensor, (x, 1))
    computes = graph.call_function(torch.ops.aten.add.Tensor, (x, 1))
    graph.output((changes, computes))
    for node in (changes, computes):
        G.set_tag(node, G.Tag(G.Kind.INTERIOR, (0,)))
    tell_partitioner(graph)
    assert G.policy(changes) is None and G.must_recompute(computes)


class Attention(nn.Module):
    """Attention over a batch of 4 sequences of 8 tokens, one feature each."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout, self.mix = dropout, nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.mix(x).view(4, 2, 2, 2)
        mixed = nn.functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=self.dropout)
        return x + mixed.reshape(4, 8).tanh()


class AttentionStack(nn.Module):
    def __init__(self, dropouts: Sequence[float]) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Attention(p) for p in dropouts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.blocks(x)
        return out.square().mean()


@pytest.mark.parametrize(("dropouts", "kept"), [((0.0, 0.0), False), ((0.3, 0.3), True)])
def test_a_random_state_is_kept_for_attention_with_dropout_only(dropouts: tuple[float, float], kept: bool) -> None:
    plain = AttentionStack(dropouts).to(DEVICE)
    changed = copy.deepcopy(plain)
    t = fxckpt.transform(changed, layers=[Attention], verify=True)
    batch = {"x": torch.randn(4, 8, device=DEVICE)}
    want = train_step(torch.compile(plain, backend="aot_eager"), plain, batch)
    assert_same(train_step(t, changed, batch), want)
    (record,) = fxckpt.graphs(t)
    assert any("rng_state" in str(n.target) for n in record.forward.graph.nodes) is kept
    seeded = torch.Tag.nondeterministic_seeded
    assert seeded in torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default.tags


def test_the_records_graphs_are_copies() -> None:
    """What a user does to a record's graphs changes no later step."""
    t = step()
    (record,) = fxckpt.graphs(t)
    for gm in (record.forward, record.backward, record.joint):
        for node in reversed(list(gm.graph.nodes)):
            gm.graph.erase_node(node)
    x = torch.randn(4, 8, device=DEVICE)
    want = fxckpt_model(t)(x)
    torch.testing.assert_close(t(x), want, rtol=0, atol=0)


def fxckpt_model(t: nn.Module) -> nn.Module:
    """The plain model over the same parameters."""
    torch.manual_seed(0)
    model = Stack(depth=2).to(DEVICE)
    model.load_state_dict(t.state_dict())
    return model


# ---- order, times, dumps -----------------------------------------------------------------------------------------


def test_passes_run_in_the_documented_order() -> None:
    assert tuple(name for name, _ in pipeline.PASSES) == NAMES
    documented = [line.split()[0] for line in (pipeline.__doc__ or "").splitlines() if line.startswith("    ")]
    assert tuple(documented) == NAMES
    record = record_of()
    assert tuple(record.seconds) == NAMES and all(s >= 0 for s in record.seconds.values())


def test_debug_dir_has_numbered_graphs_of_every_pass(tmp_path: Path) -> None:
    step(debug_dir=tmp_path / "dumps")
    (folder,) = (tmp_path / "dumps").iterdir()
    assert folder.name == "graph_00"
    files = sorted(p.name for p in folder.iterdir())
    joint = ["captured", *NAMES[: NAMES.index("partition")]]
    halves = [(name, half) for name in NAMES[NAMES.index("partition") :] for half in ("forward", "backward")]
    wanted = [f"{name}_joint" for name in joint] + [f"{name}_{half}" for name, half in halves]
    assert files == [*(f"{i:02d}_{name}.txt" for i, name in enumerate(wanted)), "seconds.txt"]
    times = [line.split() for line in (folder / "seconds.txt").read_text().splitlines()]
    assert tuple(name for _, name in times) == NAMES and all(float(seconds) >= 0 for seconds, _ in times)
    texts = {p.name[3:]: p.read_text() for p in folder.iterdir()}
    assert "fxckpt.offload" not in texts["release_forward.txt"] and "fxckpt.offload" in texts["transfers_forward.txt"]
    assert "fxckpt.reload" not in texts["release_backward.txt"] and "fxckpt.reload" in texts["transfers_backward.txt"]
    assert texts["captured_joint.txt"] == texts["plan_joint.txt"], "deciding changes no graph"


def test_debug_dir_has_a_folder_for_each_graph(tmp_path: Path) -> None:
    t = step(debug_dir=tmp_path)
    t(torch.randn(6, 4, 8, device=DEVICE)).backward()  # another number of dimensions: another graph
    assert len(fxckpt.graphs(t)) == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["graph_00", "graph_01"]
    assert len({len(list(p.iterdir())) for p in tmp_path.iterdir()}) == 1


def test_without_debug_dir_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    step()
    assert not list(tmp_path.iterdir())
