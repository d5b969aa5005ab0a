"""Policies: small functions that say what becomes of a boundary layer's calls.

A policy is any callable ``policy(layer) -> Treatment`` (or ``True`` for recompute, ``False`` for keep). It only
decides; the rewrite obeys. Policies combine: :func:`either` recomputes what any of several would.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from fxckpt.capture.regions import BoundaryLayer
from fxckpt.config import Settings, check_whole
from fxckpt.decide.layers import name_pattern
from fxckpt.errors import NoLayersError, SettingsError


class Treatment(enum.Enum):
    """What becomes of a region's values."""

    KEEP = "keep"
    """The partitioner saves what it would save without fxckpt."""
    RECOMPUTE = "recompute"
    """Interior values are recomputed in the backward from the region's boundary activations."""


Policy: TypeAlias = Callable[[BoundaryLayer], "Treatment | bool"]


@dataclass(frozen=True)
class EveryN:
    """Recompute boundary layers 0, n, 2n, ...: transformers' ``every_n_layers``."""

    n: int = 1

    def __post_init__(self) -> None:
        check_whole("every_n", self.n, 1)

    def __call__(self, layer: BoundaryLayer) -> Treatment:
        """What becomes of the calls of `layer`."""
        return Treatment.RECOMPUTE if layer.index % self.n == 0 else Treatment.KEEP


@dataclass(frozen=True)
class Names:
    """Recompute the boundary layers whose names match one of the patterns (as in ``layers=``), keep the others."""

    patterns: tuple[str, ...]

    def __init__(self, patterns: Iterable[str]) -> None:
        object.__setattr__(self, "patterns", (patterns,) if isinstance(patterns, str) else tuple(patterns))

    def __call__(self, layer: BoundaryLayer) -> Treatment:
        """What becomes of the calls of `layer`."""
        hit = any(name_pattern(p).fullmatch(layer.name) for p in self.patterns)
        return Treatment.RECOMPUTE if hit else Treatment.KEEP


@dataclass(frozen=True)
class Given:
    """What was decided for each boundary layer, by name; layers that are not among them are kept."""

    treatments: tuple[tuple[str, Treatment], ...]

    def __call__(self, layer: BoundaryLayer) -> Treatment:
        """What becomes of the calls of `layer`."""
        return dict(self.treatments).get(layer.name, Treatment.KEEP)


@dataclass(frozen=True)
class Either:
    """Recompute what any of several policies would."""

    policies: tuple[Policy, ...]

    def __call__(self, layer: BoundaryLayer) -> Treatment:
        """What becomes of the calls of `layer`."""
        chosen = [ask(p, layer) for p in self.policies]
        return Treatment.RECOMPUTE if Treatment.RECOMPUTE in chosen else Treatment.KEEP


def every_n(n: int) -> EveryN:
    """Recompute boundary layers 0, n, 2n, ... in the order of ``model.modules()``."""
    return EveryN(n)


def names(*patterns: str) -> Names:
    """Recompute the boundary layers whose names match, such as ``names("model.layers.0", "decoder.*")``."""
    return Names(patterns)


def either(*policies: Policy) -> Either:
    """Recompute what any of `policies` would."""
    return Either(policies)


def ask(policy: Policy, layer: BoundaryLayer) -> Treatment:
    """What `policy` says of `layer`.

    Raises:
        SettingsError: the policy answers with neither a Treatment nor a bool.
    """
    answer = policy(layer)
    if isinstance(answer, Treatment):
        return answer
    if isinstance(answer, bool):
        return Treatment.RECOMPUTE if answer else Treatment.KEEP
    raise SettingsError(f"policy {policy!r} said {answer!r} of {layer.name!r}: a Treatment or a bool is needed.")


def policy_of(settings: Settings) -> Policy:
    """The policy that `settings` stand for."""
    if settings.policy is None:
        return EveryN(settings.every_n)
    chosen = settings.policy
    if isinstance(chosen, (list, tuple, set, frozenset)) and all(isinstance(p, str) for p in chosen):
        return Names(chosen)
    if not callable(chosen):
        raise SettingsError(
            f"policy={chosen!r}: use a callable (layer) -> Treatment or bool, or a list of layer names."
        )
    asked: Policy = chosen
    return asked


def decide_layers(layers: Iterable[BoundaryLayer], settings: Settings) -> dict[str, Treatment]:
    """What becomes of each boundary layer, by name, in order.

    Raises:
        NoLayersError: a name pattern of the policy matches no boundary layer, or it is an empty list of names.
    """
    policy, layers = policy_of(settings), list(layers)
    known = [layer.name for layer in layers]
    if isinstance(policy, Names) and not policy.patterns:
        raise NoLayersError(f"policy=[] names no layer; the boundary layers are {', '.join(known[:20])}.")
    for pattern in _patterns(policy):
        if not any(name_pattern(pattern).fullmatch(name) for name in known):
            raise NoLayersError(f"policy: {pattern!r} matches no boundary layer; they are {', '.join(known[:20])}.")
    return {layer.name: ask(policy, layer) for layer in layers}


def _patterns(policy: Policy) -> tuple[str, ...]:
    """The name patterns in a policy, also in one that combines others."""
    if isinstance(policy, Either):
        return tuple(pattern for part in policy.policies for pattern in _patterns(part))
    return policy.patterns if isinstance(policy, Names) else ()
