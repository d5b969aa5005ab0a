"""Which modules of a model are boundary layers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable

from torch import nn

from fxckpt.capture.regions import BoundaryLayer
from fxckpt.config import LayerSpec
from fxckpt.errors import NoLayersError

_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


class GradientCheckpointingLayer(nn.Module):
    """Base class for boundary layers of models that do not use transformers.

    ``fxckpt.transform`` finds its subclasses' instances as it finds transformers' class of this name::

        class Block(fxckpt.GradientCheckpointingLayer): ...
    """


def is_checkpointing_layer(module: nn.Module) -> bool:
    """Whether `module` is a ``GradientCheckpointingLayer``, ours or transformers' (recognised by its name)."""
    return any(cls.__name__ == "GradientCheckpointingLayer" for cls in type(module).__mro__)


def boundary_layers(model: nn.Module, specs: Iterable[LayerSpec] | None = None) -> list[BoundaryLayer]:
    """The boundary layers of `model` in the order of ``model.modules()``, each module once.

    Args:
        model: any module.
        specs: classes, name patterns or predicates; None means ``GradientCheckpointingLayer`` instances.

    Raises:
        NoLayersError: nothing was found, or one of `specs` matches nothing.
    """
    named = list(model.named_modules())
    if specs is None:
        chosen = [(name, m) for name, m in named if is_checkpointing_layer(m)]
        if not chosen:
            raise NoLayersError(_nothing_found(model))
    else:
        matched: set[str] = set()
        for spec in specs:
            hits = {name for name, m in named if name and _matcher(spec)(name, m)}
            if not hits:
                raise NoLayersError(
                    f"layers: {_spoken(spec)} matches no module of {type(model).__name__}. " + _candidates(model)
                )
            _refuse_containers(spec, hits, dict(named))
            matched |= hits
        chosen = [(name, m) for name, m in named if name in matched]
    return [BoundaryLayer(name, index, module) for index, (name, module) in enumerate(chosen)]


def _matcher(spec: LayerSpec) -> Callable[[str, nn.Module], bool]:
    if isinstance(spec, str):
        pattern = name_pattern(spec)
        return lambda name, module: pattern.fullmatch(name) is not None
    if isinstance(spec, type):
        return lambda name, module: isinstance(module, spec)
    return lambda name, module: bool(spec(name, module))


def name_pattern(text: str) -> re.Pattern[str]:
    """A module name pattern: ``*`` stands for one part between dots, ``**`` for any number of parts."""
    parts = re.split(r"(\*\*|\*|\?)", text)
    wild = {"**": ".*", "*": r"[^.]+", "?": r"[^.]"}
    return re.compile("".join(wild.get(p, re.escape(p)) for p in parts))


def _spoken(spec: LayerSpec) -> str:
    if isinstance(spec, str):
        return repr(spec)
    return getattr(spec, "__name__", repr(spec))


def _refuse_containers(spec: LayerSpec, hits: set[str], named: dict[str, nn.Module]) -> None:
    for name in sorted(hits):
        if isinstance(named[name], _NEVER_CALLED):
            kind = type(named[name]).__name__
            raise NoLayersError(
                f"layers: {_spoken(spec)} matches {name!r}, a {kind}, which is never called itself. "
                f"Name what it holds: {name + '.*'!r}."
            )


def _nothing_found(model: nn.Module) -> str:
    return (
        f"{type(model).__name__} has no GradientCheckpointingLayer, so fxckpt does not know what to recompute. Say "
        f"which modules are its repeated layers with layers=(a class, a name pattern or a predicate (name, module) -> "
        f"bool). {_candidates(model)}"
    )


def _candidates(model: nn.Module) -> str:
    """Repeated children of one class, which is what boundary layers look like, largest share of parameters first."""
    found: list[tuple[int, str]] = []
    for name, module in model.named_modules():
        children = [c for c in module.children() if not isinstance(c, _NEVER_CALLED)]
        classes = Counter(type(c) for c in children)
        for cls, count in classes.items():
            size = sum(p.numel() for c in children if type(c) is cls for p in c.parameters())
            if count >= 2 and size and any(True for c in children if type(c) is cls for _ in c.children()):
                where = f"{name}.*" if name else "*"
                found.append((size, f"layers={cls.__name__} or layers={where!r} ({count} modules)"))
    if not found:
        children_of_root = ", ".join(name for name, _ in model.named_children()) or "none"
        return f"Its children are: {children_of_root}."
    best = [text for _, text in sorted(found, reverse=True)[:5]]
    return "Candidates in this model: " + "; ".join(best) + "."
