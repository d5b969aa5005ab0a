"""The Pareto frontier of points with two costs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def pareto(points: Mapping[str, tuple[float, float]]) -> tuple[str, ...]:
    """Names of the points that no other point is at least as low as in both, and lower in one; sorted by the first."""

    def beaten(own: tuple[float, float], others: Iterable[tuple[float, float]]) -> bool:
        return any(o[0] <= own[0] and o[1] <= own[1] and o != own for o in others)

    kept = [name for name, point in points.items() if not beaten(point, points.values())]
    return tuple(sorted(kept, key=lambda name: points[name]))
