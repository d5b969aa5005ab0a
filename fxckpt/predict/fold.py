"""Equal layers are captured a few times and counted many times.

A model of 80 equal layers has a graph of 80 equal stretches. Of a list of layers that repeats with some period, a few
periods are left in; :mod:`~fxckpt.predict.steps` then repeats what one of them does, after it has seen two do the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fxckpt.decide.policy import Treatment


@dataclass(frozen=True)
class Fold:
    """A list of layers of which some are left out.

    Attributes:
        container: name of the list.
        lead: how many at its start are not part of the repetition.
        period: after how many layers it repeats.
        kept: how many periods are left in.
        left_out: how many are not.
    """

    container: str
    lead: int
    period: int
    kept: int
    left_out: int

    @property
    def block(self) -> int:
        """The period, counted from the lead, that stands for those left out: one in the middle."""
        return (self.kept - 1) // 2

    @property
    def layers(self) -> range:
        """The layers of that period, by their numbers in the short list."""
        start = self.lead + self.block * self.period
        return range(start, start + self.period)

    def stands_for(self, index: int) -> int:
        """The layer of the short list that layer `index` of the whole list is like."""
        end = self.layers.stop
        if index < end:
            return index
        beyond = index - end
        if beyond < self.left_out * self.period:
            return self.layers.start + beyond % self.period
        return index - self.left_out * self.period


def find_folds(model: nn.Module, treatments: Mapping[str, Treatment], kept: int) -> list[Fold]:
    """The lists of layers of `model` that repeat, where more than `kept` periods of them do.

    Args:
        model: any module.
        treatments: what becomes of each boundary layer, by name.
        kept: how many periods are to be left in.
    """
    found: list[Fold] = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or any(_inside(name, f.container) for f in found):
            continue
        layers = list(module)
        prefixes = [f"{name}.{i}" if name else str(i) for i in range(len(layers))]
        if len(layers) <= kept or not all(any(_inside(t, p) for t in treatments) for p in prefixes):
            continue
        signatures = _signatures(layers, prefixes, treatments, list(_settings_of(model, name, len(layers))))
        fold = _repetition(name, signatures, kept)
        if fold is not None:
            found.append(fold)
    return found


def shorten(model: nn.Module, folds: Sequence[Fold]) -> None:
    """Leave the periods out, in place."""
    for fold in folds:
        whole = model.get_submodule(fold.container)
        del whole[fold.layers.stop : fold.layers.stop + fold.left_out * fold.period]  # type: ignore[operator]


def short_name(name: str, folds: Sequence[Fold]) -> str:
    """The layer of the shortened model that stands for the layer `name` of the whole one."""
    for fold in folds:
        if _inside(name, fold.container) and name != fold.container:
            index, rest = _split(name, fold)
            return f"{fold.container}.{fold.stands_for(index)}{rest}".lstrip(".")
    return name


def shifted(fold: Fold, module: str, layers: int) -> str:
    """The path of the same module of the layer so many further on; of a module of no layer, its own."""
    if index_in(fold, module) is None:
        return module
    index, rest = _split(module, fold)
    return f"{fold.container}.{index + layers}{rest}".lstrip(".")


def index_in(fold: Fold, module: str) -> int | None:
    """The number, in the short list, of the layer that the module of this path is or lies in; None for others."""
    if module == fold.container or not _inside(module, fold.container):
        return None
    index, _ = _split(module, fold)
    return index


def _split(name: str, fold: Fold) -> tuple[int, str]:
    below = name[len(fold.container) :].lstrip(".") if fold.container else name
    index, dot, rest = below.partition(".")
    return int(index), dot + rest


def _inside(name: str, container: str) -> bool:
    return not container or name == container or name.startswith(container + ".")


def _repetition(name: str, signatures: Sequence[Any], kept: int) -> Fold | None:
    length = len(signatures)
    for period in range(1, length // (kept + 1) + 1):
        lead = length - period
        while lead > 0 and signatures[lead - 1] == signatures[lead - 1 + period]:
            lead -= 1
        whole = (length - lead) // period
        if whole > kept:
            return Fold(name, lead, period, kept, whole - kept)
    return None


def _settings_of(model: nn.Module, container: str, length: int) -> Iterator[Sequence[Any]]:
    """Lists in the configurations of the modules around a list of layers that have an entry for each layer."""
    parts = container.split(".") if container else []
    for i in range(len(parts) + 1):
        config = getattr(model.get_submodule(".".join(parts[:i])), "config", None)
        for value in vars(config).values() if hasattr(config, "__dict__") else ():
            if isinstance(value, list | tuple) and len(value) == length:
                yield value


def _signatures(
    layers: Sequence[nn.Module],
    prefixes: Sequence[str],
    treatments: Mapping[str, Treatment],
    settings: Sequence[Sequence[Any]],
) -> list[dict[str, Any]]:
    """For each layer all that can make its graph another than the next one's."""
    found = []
    for i, (layer, prefix) in enumerate(zip(layers, prefixes, strict=True)):
        signature = dict(_structure(layer))
        signature |= {f"<{n[len(prefix) :]}>": t for n, t in treatments.items() if _inside(n, prefix)}
        signature["<settings>"] = repr([value[i] for value in settings])
        found.append(signature)
    for key in [k for k, value in found[0].items() if isinstance(value, int) and not isinstance(value, bool)]:
        if all(s.get(key) == found[0][key] + i for i, s in enumerate(found)):  # the layer's own number
            for signature in found:
                signature[key] = "<number>"
    return found


def _structure(layer: nn.Module) -> Iterator[tuple[str, Any]]:
    for path, module in layer.named_modules():
        yield path, type(module)
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers"):
                for key, tensor in value.items():
                    yield f"{path}.{key}", None if tensor is None else _shape(tensor)
            elif name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks"):
                yield f"{path}.{name}", len(value)
            elif not name.startswith("_"):
                yield f"{path}.{name}", _plain(value)


def _shape(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.requires_grad


def _plain(value: Any) -> Any:
    """An attribute as far as it can change a graph's shape: rates matter for being 0 or not."""
    if isinstance(value, float):
        return value == 0.0
    if isinstance(value, bool | int | str | torch.dtype) or value is None:
        return value
    if isinstance(value, list | tuple):
        return tuple(_plain(v) for v in value)
    return type(value)
