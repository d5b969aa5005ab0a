"""Policies: small functions that say what becomes of a boundary layer's calls.

A policy is any callable ``policy(layer) -> Treatment`` (or ``True`` for recompute, ``False`` for keep). It only
decides; the rewrite obeys. Policies combine: :func:`either` recomputes what any of several would. What a treatment
leaves open, the settings of ``transform`` say (:func:`decide_layers`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from fxckpt.capture.regions import BoundaryLayer
from fxckpt.config import Settings, check_whole, parse_save
from fxckpt.decide.layers import name_pattern
from fxckpt.errors import NoLayersError, SettingsError


@dataclass(frozen=True)
class Treatment:
    """What becomes of the values of a layer's calls.

    Attributes:
        recompute: True: interior values are recomputed in the backward from the call's boundary activations. False: the
            partitioner saves what it would save without fxckpt.
        save: interior values that are saved all the same, where the layer is recomputed: as for ``transform(save=)``,
            which is asked where this is None.
        offload: whether what a call holds for backward leaves device memory. None: as ``transform(offload=)`` says,
            of recomputed layers alone but with ``Offload(kept=True)``.

    Raises:
        SettingsError: `save` names nothing, or the layer is kept, so that there is nothing to save beside.
    """

    recompute: bool = True
    save: tuple[str, ...] | None = None
    offload: bool | None = None

    KEEP: ClassVar[Treatment]
    RECOMPUTE: ClassVar[Treatment]

    def __post_init__(self) -> None:
        if self.save is not None:
            object.__setattr__(self, "save", parse_save(self.save))
        if self.save and not self.recompute:
            raise SettingsError(
                f"Treatment(recompute=False, save={self.save!r}): a kept layer saves its values anyway."
            )

    @property
    def kind(self) -> str:
        """``"recompute"`` or ``"keep"``."""
        return "recompute" if self.recompute else "keep"

    @property
    def text(self) -> str:
        """In words, such as ``recompute, save attention, offload``."""
        parts = [self.kind]
        parts += [f"save {', '.join(self.save)}"] if self.save else []
        return ", ".join([*parts, "offload"] if self.offload else parts)


Treatment.KEEP = Treatment(recompute=False)
Treatment.RECOMPUTE = Treatment()

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
    """What was decided for each boundary layer, by name; layers that are not among them are kept.

    Attributes:
        treatments: the layers' names, and what becomes of their calls.
        checked: whether it is a plan's, which may say to save what some of its layers have and others have not.
    """

    treatments: tuple[tuple[str, Treatment], ...]
    checked: bool = False

    def __call__(self, layer: BoundaryLayer) -> Treatment:
        """What becomes of the calls of `layer`."""
        return dict(self.treatments).get(layer.name, Treatment.KEEP)


@dataclass(frozen=True)
class Either:
    """Recompute what any of several policies would, as the first of those says."""

    policies: tuple[Policy, ...]

    def __call__(self, layer: BoundaryLayer) -> Treatment:
        """What becomes of the calls of `layer`."""
        chosen = [ask(p, layer) for p in self.policies]
        return next((t for t in chosen if t.recompute), chosen[0] if chosen else Treatment.KEEP)


def every_n(n: int) -> EveryN:
    """Recompute boundary layers 0, n, 2n, ... in the order of ``model.modules()``."""
    return EveryN(n)


def names(*patterns: str) -> Names:
    """Recompute the boundary layers whose names match, such as ``names("model.layers.0", "decoder.*")``."""
    return Names(patterns)


def either(*policies: Policy) -> Either:
    """Recompute what any of `policies` would, as the first of those says."""
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
    """What becomes of each boundary layer, by name, in order; nothing is left open.

    Raises:
        NoLayersError: a name pattern of the policy matches no boundary layer, or it is an empty list of names.
        SettingsError: a layer is to be offloaded, and there is no place for it.
    """
    policy, layers = policy_of(settings), list(layers)
    known = [layer.name for layer in layers]
    if isinstance(policy, Names) and not policy.patterns:
        raise NoLayersError(f"policy=[] names no layer; the boundary layers are {', '.join(known[:20])}.")
    for pattern in _patterns(policy):
        if not any(name_pattern(pattern).fullmatch(name) for name in known):
            raise NoLayersError(f"policy: {pattern!r} matches no boundary layer; they are {', '.join(known[:20])}.")
    return {layer.name: _settled(ask(policy, layer), layer, settings) for layer in layers}


def _settled(treatment: Treatment, layer: BoundaryLayer, settings: Settings) -> Treatment:
    """The treatment with what the settings say of what it leaves open."""
    save, place = treatment.save, settings.offload
    if treatment.offload and place is None:
        raise SettingsError(f"policy: {layer.name!r} is to be offloaded, and nobody says where: give offload=, too.")
    if not treatment.recompute:
        save = ()
    elif save is None:
        save = settings.save
    offload = treatment.offload
    if offload is None:
        offload = place is not None and (treatment.recompute or place.kept)
    return Treatment(treatment.recompute, save, offload)


def _patterns(policy: Policy) -> tuple[str, ...]:
    """The name patterns in a policy, also in one that combines others."""
    if isinstance(policy, Either):
        return tuple(pattern for part in policy.policies for pattern in _patterns(part))
    return policy.patterns if isinstance(policy, Names) else ()
