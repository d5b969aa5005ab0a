"""The comparisons and readings that other tests trust catch what is broken on purpose."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.helpers import DEVICE, assert_close, assert_same, boundary_layers, measured
from tests.zoo import build

ONE = torch.ones(3)
NEXT = torch.nextafter(ONE, ONE + 1)  # one bit away


def test_equal_values_pass() -> None:
    nan = torch.tensor([1.0, float("nan")])
    assert_same({"a": ONE, "b": None, "c": nan}, {"a": ONE.clone(), "b": None, "c": nan.clone()})
    assert_close({"a": NEXT, "b": None}, {"a": ONE, "b": None})


@pytest.mark.parametrize(
    ("got", "said"),
    [
        (NEXT, "a: largest difference 1.19e-07"),
        (None, "a: got None"),
        (ONE.double(), r"a: got float64\[3\], want float32\[3\]"),
        (torch.ones(1, 3), r"a: got float32\[1, 3\]"),
        (torch.tensor([1.0, 1.0, float("nan")]), "a: largest difference nan"),
    ],
)
def test_assert_same_names_what_differs(got: torch.Tensor | None, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        assert_same({"a": got}, {"a": ONE})


def test_a_missing_name_is_a_difference() -> None:
    for compare in (assert_same, assert_close):
        with pytest.raises(AssertionError, match="extra"):
            compare({"a": ONE, "extra": ONE}, {"a": ONE})


def test_zeros_are_not_none_unless_asked() -> None:
    with pytest.raises(AssertionError, match="a: expected none"):
        assert_close({"a": torch.zeros(3)}, {"a": None})
    assert_close({"a": torch.zeros(3)}, {"a": None}, none_is_zero=True)


def test_measured_bytes() -> None:
    def work() -> torch.Tensor:
        return torch.ones(1024, device=DEVICE) + torch.ones(1024, device=DEVICE)

    out, memory = measured(work)
    assert memory.held == out.numel() * 4
    assert memory.peak == 3 * out.numel() * 4


def test_boundary_layers_of_entries() -> None:
    def names(entry: str) -> list[str] | None:
        classes = boundary_layers(entry, build(entry)[0])
        return None if classes is None else [c.__name__ for c in classes]

    assert names("llama") is None and names("plain_gc_layer") is None
    assert names("albert") == ["AlbertLayer"]
    assert names("convnext") == ["ConvNextLayer"]
    assert names("plain_shared_loop") == ["AttnBlock"]
    assert names("plain_nn_transformer") == ["TransformerEncoderLayer", "TransformerDecoderLayer"]
    with pytest.raises(pytest.skip.Exception, match="nothing to checkpoint"):
        boundary_layers("a single layer", nn.Linear(2, 2))
