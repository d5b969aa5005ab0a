"""Memory against time, one labelled dot for each variant, with the Pareto frontier."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxckpt.bench.result import BenchResult, VariantResult
from fxckpt.bench.table import title
from fxckpt.errors import SettingsError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".png", ".svg", ".pdf")
OURS, PEERS = "#c0392b", "#2c5f8a"
DISTANCES = (9, 16, 26, 38)
"""Of a label from its dot, in points; the first at which it meets nothing is taken."""
DIRECTIONS = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, 1), (1, -1), (-1, -1))


def check_plot(path: Path) -> None:
    """Refuse a picture that could not be drawn, before anything is measured.

    Raises:
        SettingsError: matplotlib is missing, or there is no such format or folder.
    """
    if path.suffix.lower() not in FORMATS:
        raise SettingsError(f"--plot {path}: the name must end in one of {', '.join(FORMATS)}.")
    if not path.resolve().parent.is_dir():
        raise SettingsError(f"--plot {path}: there is no such folder.")
    new_figure()


def new_figure(width: float = 9, height: float = 6) -> Any:
    """An empty figure, in inches.

    Raises:
        SettingsError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SettingsError(f"--plot needs matplotlib ({error}): pip install 'fxckpt[plot]'.") from error
    return Figure(figsize=(width, height), layout="constrained")


def plot(result: BenchResult, path: Path) -> None:
    """Draw `result` into a file; its name's ending says the format.

    Raises:
        SettingsError: matplotlib is missing, or there is no such format or folder.
    """
    check_plot(path)
    figure = new_figure()
    axes = figure.add_subplot()
    shown = [v for v in result.variants if v.error is None and v.peak_bytes is not None and v.round_seconds]
    frontier = result.frontier
    places = {v.variant: _place(v) for v in shown}
    line = [places[name] for name in frontier]
    axes.plot([x for x, _ in line], [y for _, y in line], color="0.6", linewidth=1, zorder=1, label="Pareto frontier")
    for ours, colour, name in ((True, OURS, "fxckpt"), (False, PEERS, "others")):
        for on in (True, False):
            dots = [places[v.variant] for v in shown if v.ours is ours and (v.variant in frontier) is on]
            if dots:
                x, y = zip(*dots, strict=True)
                label = name if on else f"{name}, not on it"
                axes.scatter(x, y, color=colour, alpha=1.0 if on else 0.35, s=42, zorder=2, linewidths=0, label=label)
    axes.set_xlabel("peak memory of a step, gradients included (MiB)")
    axes.set_ylabel("time of a step (s), median; quartiles are the bars")
    for v in shown:
        low, high = v.spread or (0.0, 0.0)
        alpha = 0.5 if v.variant in frontier else 0.2
        axes.vlines(places[v.variant][0], low, high, color=OURS if v.ours else PEERS, alpha=alpha, zorder=1)
    axes.set_title(title(result), fontsize=9, loc="left")
    axes.margins(0.15)
    axes.grid(alpha=0.2)
    axes.legend(fontsize=8, loc="best", frameon=False)
    _label(axes, [(v.variant, places[v.variant], v.variant in frontier) for v in shown])
    figure.savefig(path, dpi=150)


def _place(result: VariantResult) -> tuple[float, float]:
    """Coordinates of a variant's dot: MiB and seconds."""
    assert result.peak_bytes is not None and result.seconds is not None
    return result.peak_bytes / 2**20, result.seconds


def _label(axes: Axes, labels: Sequence[tuple[str, tuple[float, float], bool]]) -> None:
    """Write each name beside its dot, where it meets no other dot and no other name if there is such a place."""
    from matplotlib.transforms import Bbox

    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()  # places and sizes are known only then
    dots = [axes.transData.transform(place) for _, place, _ in labels]
    taken = [Bbox.from_bounds(x - 7, y - 7, 14, 14) for x, y in dots]
    legend = axes.get_legend()
    if legend is not None:
        taken.append(legend.get_window_extent())
    inside = axes.get_window_extent()
    for text, place, on in labels:
        best: tuple[float, Any, Any] | None = None
        for distance in DISTANCES:
            for dx, dy in DIRECTIONS:
                note = axes.annotate(
                    text,
                    place,
                    (dx * distance, dy * distance),
                    textcoords="offset points",
                    fontsize=8,
                    alpha=1.0 if on else 0.6,
                    ha={1: "left", 0: "center", -1: "right"}[dx],
                    va={1: "bottom", 0: "center", -1: "top"}[dy],
                    arrowprops={"arrowstyle": "-", "alpha": 0.3, "linewidth": 0.6} if distance > DISTANCES[0] else None,
                )
                box = Bbox(note.get_window_extent())
                cost = _overlap(box, taken) + 10 * (box.width * box.height - _overlap(box, [inside])) + distance / 100
                if best is None or cost < best[0]:
                    if best is not None:
                        best[1].remove()
                    best = cost, note, box
                else:
                    note.remove()
        assert best is not None
        taken.append(best[2])


def _overlap(box: Any, others: Sequence[Any]) -> float:
    """The area, in square pixels, that `box` shares with the others."""
    shared = (type(box).intersection(box, other) for other in others)
    return float(sum(s.width * s.height for s in shared if s is not None))
