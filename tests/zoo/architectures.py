"""Every architecture of transformers whose modelling file defines a ``GradientCheckpointingLayer``, as tiny models.

An architecture is a modelling file. Its models are those of the zoo that its classes make, and, where these leave some
of its layer classes out, further ones from configurations shrunk by themselves and batches made from the signature of
``forward`` (``automatic.py``).

    python -m tests.zoo.architectures            # each with its models, and the layer classes that none of them holds
    python -m tests.zoo.architectures llama clip
"""

from __future__ import annotations

import importlib
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from tests.zoo import REGISTRY, automatic
from tests.zoo.registry import SEED, Batch, Built, get_loss

LAYER = "GradientCheckpointingLayer"
CLASS = re.compile(r"^class (\w+)\((\w+)", re.MULTILINE)


@dataclass(frozen=True)
class Program:
    """One model of an architecture.

    Attributes:
        name: an entry of the zoo, or a class of the modelling file.
        build: the model in train mode and a batch, the same on every call.
        layers: the architecture's layer classes that the model runs.
    """

    name: str
    build: Callable[[], Built]
    layers: frozenset[str]


@dataclass
class Architecture:
    """A modelling file.

    Attributes:
        name: the file's, without ``modeling_``.
        module: the module's whole name.
        layers: its classes that are ``GradientCheckpointingLayer``, in the file's order.
        failed: why classes could not be made into a model that trains in eager, by name; filled by `programs`.
    """

    name: str
    module: str
    layers: tuple[str, ...]
    failed: dict[str, str] = field(default_factory=dict)

    def programs(self) -> list[Program]:
        """Models that together hold as many of the layer classes as can be."""
        found: list[Program] = []
        missing = set(self.layers)
        for name, build in self._candidates():
            if not missing:
                break
            try:
                ran = self._trained(build, missing)
                if ran & missing:
                    found.append(Program(name, build, ran))
                    missing -= ran
            except Exception as error:
                self.failed[name] = f"{type(error).__name__}: {str(error)[:300]}"
        return found

    def imported(self) -> ModuleType:
        """The module."""
        return importlib.import_module(self.module)

    def _candidates(self) -> Iterator[tuple[str, Callable[[], Built]]]:
        import transformers

        for entry in REGISTRY.values():
            if entry.model_class and getattr(transformers, entry.model_class).__module__ == self.module:
                yield entry.name, entry.build
        for cls in automatic.model_classes(self.imported()):
            for i, variant in enumerate(automatic.variants(cls)):
                name = f"{cls.__name__}{f' ({i + 1})' if i else ''}"
                yield name, lambda cls=cls, variant=variant: automatic.build(cls, variant)

    def _trained(self, build: Callable[[], Built], wanted: Set[str]) -> frozenset[str]:
        """The layer classes that run in a step in eager; none where the model has none of those wanted.

        Raises:
            Exception: the step fails, or gives numbers that compare with nothing.
        """
        model, batch = build()
        layers = [m for m in model.modules() if type(m).__module__ == self.module and type(m).__name__ in self.layers]
        ran: set[str] = set()
        if wanted & {type(layer).__name__ for layer in layers}:
            for layer in layers:
                layer.forward = _told(layer, ran)  # type: ignore[method-assign]  # a hook misses who calls it alone
            train(model, batch)
        return frozenset(ran)


def _told(layer: nn.Module, ran: set[str]) -> Callable[..., Any]:
    forward, name = layer.forward, type(layer).__name__

    def run(*args: Any, **kwargs: Any) -> Any:
        ran.add(name)
        return forward(*args, **kwargs)

    return run


def train(model: nn.Module, batch: Batch) -> None:
    """A step in eager.

    Raises:
        ValueError: its numbers compare with nothing.
    """
    torch.manual_seed(SEED)
    loss = get_loss(model(**batch))
    loss.backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    if not grads:
        raise ValueError("no parameter gets a gradient")
    if not torch.isfinite(loss) or not all(torch.isfinite(g).all() for g in grads):
        raise ValueError("the loss or a gradient is not finite")


def architectures() -> list[Architecture]:
    """All of the installed transformers, by name; read from the sources, so nothing is imported."""
    import transformers.models

    found = []
    for folder in pkgutil.iter_modules(transformers.models.__path__):
        for file in sorted(Path(transformers.models.__path__[0], folder.name).glob("modeling_*.py")):
            bases = dict(CLASS.findall(file.read_text(encoding="utf-8")))
            layers = tuple(name for name in bases if LAYER in _ancestry(name, bases))
            if layers:
                stem = file.stem.removeprefix("modeling_")
                found.append(Architecture(stem, f"transformers.models.{folder.name}.{file.stem}", layers))
    return found


def _ancestry(name: str, bases: dict[str, str]) -> set[str]:
    """Names of a class's first bases, as far as they stand in the file."""
    above: set[str] = set()
    while (name := bases.get(name, "")) and name not in above:
        above.add(name)
    return above


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    for architecture in architectures():
        if names and architecture.name not in names:
            continue
        programs = architecture.programs()
        missing = set(architecture.layers).difference(*(p.layers for p in programs))
        print(architecture.name, "|", ", ".join(p.name for p in programs), "|", ", ".join(sorted(missing)), flush=True)
        if missing:
            for name, why in architecture.failed.items():
                print("   ", name, why.replace("\n", " "), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
