"""The figures of a benchmark, as data."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fxckpt.decide.pareto import pareto
from fxckpt.models.spec import ModelSpec


@dataclass
class VariantResult:
    """What was measured of one variant. Bytes are those of one step, on the device; None is not known."""

    variant: str
    """Its text, such as ``"fxckpt@2+offload"``."""
    ours: bool
    """Whether fxckpt rewrites the step."""
    error: str | None = None
    """Why it failed, or None. What was measured before stands."""
    peak_bytes: int | None = None
    """The peak over what was allocated before the step, gradients included."""
    held_bytes: int | None = None
    """Held after the forward, for the backward."""
    offloaded_bytes: int | None = None
    """Held in host memory or on a disk for the backward, by fxckpt's count."""
    round_seconds: list[float] = field(default_factory=list)
    """The time of a step in each round, in seconds."""
    ratio: float | None = None
    """The time relative to the first variant: the median of the rounds' ratios."""
    first_step_seconds: float | None = None
    """The first step, with an empty compile cache: capture, compilation and the step itself."""
    graphs: int | None = None
    """Captured graphs; None where nothing is captured."""
    recomputed_flops: int | None = None
    """Floating point operations that recomputing adds to a step."""
    pass_seconds: float | None = None
    """Time of fxckpt's own passes in the first step, without PyTorch's partitioner."""
    partition_seconds: float | None = None
    """Time of PyTorch's partitioner, as one of the passes."""
    loss: float | None = None
    """The loss of the first step."""
    gradient_difference: float | None = None
    """The largest relative difference of a parameter's gradient from eager's."""
    gradient_worst: str | None = None
    """The parameter of that difference."""
    transfers: dict[str, float] | None = None
    """Figures of the last timed step's transfers, as ``fxckpt.stats`` gives them; None where there are none."""
    saved_bytes: int | None = None
    """Held on the device for the backward, by fxckpt's count."""

    @property
    def seconds(self) -> float | None:
        """The time of a step: the median of the rounds."""
        return statistics.median(self.round_seconds) if self.round_seconds else None

    @property
    def spread(self) -> tuple[float, float] | None:
        """First and third quartile of the rounds' times, in seconds."""
        if len(self.round_seconds) < 2:
            return (self.round_seconds[0],) * 2 if self.round_seconds else None
        low, _, high = statistics.quantiles(self.round_seconds, n=4, method="inclusive")
        return low, high

    @property
    def stall_share(self) -> float | None:
        """The part of a step that the computation waited for a copy."""
        return self.transfers["stall_seconds"] / self.seconds if self.transfers and self.seconds else None

    @property
    def pass_share(self) -> float | None:
        """The part of the first step that fxckpt's own passes take."""
        if self.pass_seconds is None or not self.first_step_seconds:
            return None
        return self.pass_seconds / self.first_step_seconds

    def to_dict(self) -> dict[str, Any]:
        """All figures, those that follow from others included."""
        derived = {name: getattr(self, name) for name in ("seconds", "spread", "stall_share", "pass_share")}
        return {**dataclasses.asdict(self), **derived}


@dataclass(frozen=True)
class BenchResult:
    """A finished benchmark."""

    spec: ModelSpec
    variants: tuple[VariantResult, ...]
    """In the order in which they were given."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """The model's class, its parameters (count and bytes), and the shapes of the batch."""
    machine: Mapping[str, Any] = field(default_factory=dict)
    """What the figures depend on beside the code: versions, device, threads."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Steps, rounds, warm-up steps, the date, and how the peak was read."""

    @property
    def baseline(self) -> VariantResult | None:
        """The variant that ratios are relative to: the first that has a time."""
        return next((v for v in self.variants if v.round_seconds), None)

    @property
    def failed(self) -> tuple[VariantResult, ...]:
        """The variants that failed."""
        return tuple(v for v in self.variants if v.error is not None)

    @property
    def frontier(self) -> tuple[str, ...]:
        """The variants that no other one beats in memory and time, by memory."""
        points = {v.variant: (v.peak_bytes, v.seconds) for v in self.variants if v.error is None}
        return pareto({name: (p, s) for name, (p, s) in points.items() if p is not None and s is not None})

    def to_dict(self) -> dict[str, Any]:
        """Everything, for JSON; raw times included."""
        return {
            "spec": self.spec.to_dict(),
            "model": dict(self.model),
            "machine": dict(self.machine),
            "settings": dict(self.settings),
            "baseline": self.baseline.variant if self.baseline else None,
            "frontier": list(self.frontier),
            "variants": [v.to_dict() for v in self.variants],
        }


def median_ratio(times: Sequence[float], baseline: Sequence[float]) -> float | None:
    """The median of the rounds' ratios, over the rounds that both have; None without any."""
    ratios = [t / b for t, b in zip(times, baseline, strict=False)]
    return statistics.median(ratios) if ratios else None
