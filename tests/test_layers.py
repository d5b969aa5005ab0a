"""Which modules are boundary layers: by class, by name, by predicate, in what order, and what is said if none is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer as TransformersLayer

import fxckpt
from fxckpt.config import make_settings
from fxckpt.decide.layers import boundary_layers, name_pattern
from tests.helpers import gc_layers
from tests.zoo import build


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)


class SubBlock(Block):
    pass


class Other(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)


class OwnLayer(fxckpt.GradientCheckpointingLayer):
    pass


class TheirLayer(TransformersLayer):
    pass


class Tree(nn.Module):
    """Every way in which a layer can be held."""

    def __init__(self) -> None:
        super().__init__()
        self.first = SubBlock()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.stages = nn.ModuleList(nn.ModuleList([Block(), Other()]) for _ in range(2))
        self.named = nn.ModuleDict({"left": Block(), "right": Other()})
        self.body = nn.Sequential(Block(), nn.ReLU())
        self.last = Other()


BLOCKS = ["first", "blocks.0", "blocks.1", "stages.0.0", "stages.1.0", "named.left", "body.0"]
OTHERS = ["stages.0.1", "stages.1.1", "named.right", "last"]


def found(model: nn.Module, layers: Any = None) -> list[str]:
    """Names of the boundary layers, through the parsing of `layers=` that transform does."""
    parsed = make_settings(every_n=1, offload=False, layers=layers, policy=None, verify=False, debug_dir=None).layers
    listed = boundary_layers(model, parsed)
    assert [b.index for b in listed] == list(range(len(listed)))
    assert all(model.get_submodule(b.name) is b.module for b in listed)
    assert fxckpt.selected_layers(fxckpt.transform(model, layers=layers)) == [b.name for b in listed]
    return [b.name for b in listed]


def in_module_order(model: nn.Module, names: list[str]) -> list[str]:
    return [name for name, _ in model.named_modules() if name in names]


# ---- GradientCheckpointingLayer ----------------------------------------------------------------------------------


def test_own_and_transformers_layers_without_naming_them() -> None:
    model = nn.Sequential(OwnLayer(), nn.Linear(2, 2), TheirLayer(), nn.ModuleList([OwnLayer()]))
    assert found(model) == ["0", "2", "3.0"]


def test_subclasses_of_subclasses_count() -> None:
    class Deeper(OwnLayer):
        pass

    assert found(nn.Sequential(Deeper(), nn.ReLU())) == ["0"]


def test_own_layer_is_found_by_name_not_by_identity() -> None:
    """transformers is not imported by the core: a class of that name, from anywhere, is meant."""
    theirs = type("GradientCheckpointingLayer", (nn.Module,), {})
    assert found(nn.Sequential(type("Mine", (theirs,), {})(), nn.ReLU())) == ["0"]


@pytest.mark.parametrize("name", ["llama", "t5", "swin", "bert", "plain_gc_layer"])
def test_all_and_only_those_of_a_real_model(name: str) -> None:
    model, _ = build(name)
    assert [b.name for b in boundary_layers(model)] == list(gc_layers(model))


def test_layers_replaces_the_search_for_checkpointing_layers() -> None:
    assert found(nn.Sequential(OwnLayer(), Block()), Block) == ["1"]


# ---- classes, patterns, predicates -------------------------------------------------------------------------------


def test_a_class_and_its_subclasses() -> None:
    assert found(Tree(), Block) == BLOCKS
    assert found(Tree(), SubBlock) == ["first"]


def test_several_classes_in_the_order_of_modules_not_of_the_tuple() -> None:
    model = Tree()
    for layers in ((Block, Other), [Other, Block], {Block, Other}):
        assert found(model, layers) == in_module_order(model, BLOCKS + OTHERS)


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("blocks.*", ["blocks.0", "blocks.1"]),
        ("blocks.0", ["blocks.0"]),
        ("stages.*.0", ["stages.0.0", "stages.1.0"]),
        ("stages.?.1", ["stages.0.1", "stages.1.1"]),
        ("**.left", ["named.left"]),
        ("last", ["last"]),
        ("*.a", ["first.a", "last.a"]),
        ("stages.**.a", ["stages.0.0.a", "stages.0.1.a", "stages.1.0.a", "stages.1.1.a"]),
    ],
)
def test_patterns(pattern: str, names: list[str]) -> None:
    assert found(Tree(), pattern) == names


@pytest.mark.parametrize(
    ("pattern", "name", "match"),
    [
        ("blocks.*", "blocks.0", True),
        ("blocks.*", "blocks.0.attn", False),
        ("blocks.*", "xblocks.0", False),
        ("blocks.**", "blocks.0.attn", True),
        ("blocks.1", "blocks.10", False),
        ("b.c", "bxc", False),
        ("layer?", "layer1", True),
        ("layer?", "layer12", False),
        ("layer?", "layer.", False),
        ("l*r.0", "layer.0", True),
        ("**.attn", "a.b.attn", True),
        ("a[0]", "a0", False),
    ],
)
def test_one_star_is_one_part_and_two_are_any_number(pattern: str, name: str, match: bool) -> None:
    assert bool(name_pattern(pattern).fullmatch(name)) is match


def test_predicates_see_name_and_module() -> None:
    assert found(Tree(), lambda name, module: name.startswith("blocks.") and isinstance(module, Block)) == [
        "blocks.0",
        "blocks.1",
    ]


def test_kinds_mix_and_a_module_named_twice_counts_once() -> None:
    model = Tree()
    layers = [SubBlock, "blocks.*", "blocks.0", lambda name, module: name == "last"]
    assert found(model, layers) == ["first", "blocks.0", "blocks.1", "last"]


def test_the_model_itself_is_no_layer_of_itself() -> None:
    model = nn.Sequential(Block(), Block())
    assert found(model, lambda name, module: isinstance(module, (Block, nn.Sequential))) == ["0", "1"]


# ---- order and sharing -------------------------------------------------------------------------------------------


def test_order_is_that_of_modules() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.second, self.first = Block(), Block()

    assert found(Backwards(), Block) == ["second", "first"]


def test_nested_layers_are_counted_outer_first() -> None:
    class Outer(fxckpt.GradientCheckpointingLayer):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleList(OwnLayer() for _ in range(2))

    model = nn.Sequential(Outer(), Outer())
    names = ["0", "0.inner.0", "0.inner.1", "1", "1.inner.0", "1.inner.1"]
    assert found(model) == names
    assert fxckpt.selected_layers(fxckpt.transform(model, every_n=2)) == names[::2]


def test_a_shared_module_counts_once_under_its_first_name() -> None:
    shared = Block()
    model = nn.Sequential(shared, Block(), shared, Block())
    assert found(model, Block) == ["0", "1", "3"]
    assert fxckpt.selected_layers(fxckpt.transform(model, layers=Block, every_n=2)) == ["0", "3"]


def test_a_layer_outside_any_list() -> None:
    assert found(Tree(), ["first", "last"]) == ["first", "last"]


# ---- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", ["blocks", nn.ModuleList, "named", nn.ModuleDict, lambda name, module: "st" in name])
def test_containers_are_refused(layers: Any) -> None:
    with pytest.raises(fxckpt.NoLayersError, match=r"which is never called itself. Name what it holds: '\w+\.\*'"):
        fxckpt.transform(Tree(), layers=layers)


def test_a_sequential_is_called_and_so_allowed() -> None:
    assert found(Tree(), "body") == ["body"]


@pytest.mark.parametrize(
    ("layers", "spoken"),
    [
        ("blocks.9", "'blocks.9'"),
        ("block", "'block'"),
        ("layers.*", "'layers.*'"),
        (nn.Conv2d, "Conv2d"),
        (lambda name, module: False, "lambda"),
        ([Block, "nowhere"], "'nowhere'"),
    ],
)
def test_what_matches_nothing_is_named(layers: Any, spoken: str) -> None:
    with pytest.raises(fxckpt.NoLayersError) as info:
        fxckpt.transform(Tree(), layers=layers)
    message = str(info.value)
    assert f"{spoken}> matches" in message or f"{spoken} matches no module of Tree" in message
    assert "layers=Block or layers='blocks.*' (2 modules)" in message


@pytest.mark.parametrize("make", [Tree, lambda: nn.Sequential(Tree())])
def test_without_layers_the_message_names_candidates(make: Callable[[], nn.Module]) -> None:
    model = make()
    prefix = "" if isinstance(model, Tree) else "0."
    with pytest.raises(fxckpt.NoLayersError) as info:
        fxckpt.transform(model)
    message = str(info.value)
    assert type(model).__name__ in message and "GradientCheckpointingLayer" in message
    assert f"Candidates in this model: layers=Block or layers='{prefix}blocks.*' (2 modules)" in message
    assert fxckpt.selected_layers(fxckpt.transform(model, layers=f"{prefix}blocks.*"))


def test_the_largest_candidate_comes_first() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(40, 40), nn.ReLU()

    model = nn.Module()
    model.small, model.large = nn.ModuleList(Block() for _ in range(5)), nn.ModuleList(Wide() for _ in range(2))
    with pytest.raises(fxckpt.NoLayersError, match=r"layers=Wide .*; layers=Block or layers='small\.\*' \(5 modules\)"):
        fxckpt.transform(model)


def test_without_candidates_the_children_are_named() -> None:
    model = nn.Module()
    model.body, model.head = Block(), Other()
    with pytest.raises(fxckpt.NoLayersError, match="Its children are: body, head"):
        fxckpt.transform(model)
    with pytest.raises(fxckpt.NoLayersError, match="Its children are: none"):
        fxckpt.transform(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ([], "names no layer"),
        (int, "int is not a subclass"),
        (3, "neither a module class, a name pattern, nor a predicate"),
        ([Block, None], "None is neither"),
        (Block(), "a Block itself is given"),
    ],
)
def test_what_is_no_way_to_name_layers_is_an_error(layers: Any, said: str) -> None:
    with pytest.raises(fxckpt.SettingsError, match=said):
        fxckpt.transform(Tree(), layers=layers)
