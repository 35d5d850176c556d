"""Charts of benchmarks and training runs."""

from __future__ import annotations

import math
import statistics
from typing import Any

from rewire.plotting.style import BLUE, FAINT, INK, MUTED, Path, open_axes, saved_figure


def plot_times(seconds: dict[str, tuple[float, ...]], path: Path) -> None:
    """Write a chart of times side by side: a bar up to each median, a line over its quartiles, a dot for each round.

    Args:
        seconds: by name, one entry for each round; at least one.
        path: file to write; its suffix selects the format (.png, .pdf, .svg).

    Raises:
        ValueError: nothing was measured.
    """
    if not seconds or not all(seconds.values()):
        raise ValueError("there is nothing to plot: no rounds were measured.")
    with saved_figure(path, 6.5, 0.45 * len(seconds) + 0.9) as figure:
        ax = figure.subplots()
        for row, rounds in enumerate(seconds.values()):
            times = [1e3 * value for value in rounds]
            ax.barh(row, statistics.median(times), height=0.62, color=FAINT, zorder=1)
            if len(times) > 1:
                low, _, high = statistics.quantiles(times, n=4, method="inclusive")
                ax.plot([low, high], [row, row], color=INK, linewidth=1.5, zorder=2)
            ax.plot(times, [row] * len(times), linestyle="", marker="o", markersize=2.5, color=INK, zorder=3)
        ax.set_yticks(range(len(seconds)), labels=list(seconds))
        ax.invert_yaxis()
        ax.set_xlabel("milliseconds per training step (bar: median, line: quartiles, dots: rounds)")
        ax.set_xlim(left=0)
        open_axes(ax)


def plot_curves(
    curves: dict[str, list[tuple[float, float]]], path: Path, xlabel: str, ylabel: str, log: str = ""
) -> None:
    """Write one line per name through its points (x, y), with a legend.

    Args:
        curves: points by name, in the order in which they are joined.
        path: file to write; its suffix selects the format (.png, .pdf, .svg).
        xlabel: what x is.
        ylabel: what y is.
        log: axes with logarithmic scales: "", "x", "y" or "xy".

    Raises:
        ValueError: no curves, or one without points.
    """
    empty = [name for name, points in curves.items() if not points]
    if not curves or empty:
        raise ValueError(f"there is nothing to plot in {', '.join(map(repr, empty)) or 'an empty dict'}.")
    with saved_figure(path, 6.0, 3.8) as figure:
        ax = figure.subplots()
        for name, points in curves.items():
            marker = "o" if len(points) <= 30 else ""
            ax.plot(*zip(*points, strict=True), label=name, linewidth=1.5, marker=marker, markersize=3)
        ax.set_xlabel(xlabel)
        ax.set_ylabel(ylabel)
        for name in log:
            axis = ax.xaxis if name == "x" else ax.yaxis
            ax.set(**{f"{name}scale": "log"})
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter(_some_minor())
        open_axes(ax, "both")
        outside = len(curves) > 6  # beside the axes, to cover no lines
        place: dict[str, Any] = {"loc": "outside right upper"} if outside else {"loc": "best"}
        (figure if outside else ax).legend(frameon=False, fontsize=8, **place)


def _some_minor() -> Any:
    """Labels between powers of ten, as far as matplotlib finds room for them."""
    from matplotlib.ticker import LogFormatter

    class Plain(LogFormatter):
        def __call__(self, x: float, pos: int | None = None) -> str:
            return f"{x:g}" if super().__call__(x, pos) else ""

    return Plain()


def plot_differences(
    differences: dict[str, list[float]], path: Path, xlabel: str, intervals: dict[str, tuple[float, float]]
) -> None:
    """Plot differences from a reference at 0: a row for each name, a dot for each value, a tick at their mean.

    Values far from most others would squeeze these into one spot: they are arrows at the edge.

    Args:
        differences: by name, at least one of them finite; others are left out.
        path: file to write; its suffix selects the format (.png, .pdf, .svg).
        xlabel: what the differences are.
        intervals: of their means, by name, drawn as lines; cut off at the edge.

    Raises:
        ValueError: there is nothing finite to plot.
    """
    shown = {name: [value for value in values if math.isfinite(value)] for name, values in differences.items()}
    ordered = sorted(abs(value) for values in shown.values() for value in values)
    if not ordered:
        raise ValueError("there is nothing to plot: no difference is finite.")
    limit = min(ordered[-1], 2 * ordered[len(ordered) * 9 // 10]) or 1.0
    with saved_figure(path, 6.5, 0.28 * len(shown) + 0.9) as figure:
        ax = figure.subplots()
        ax.axvline(0, color=MUTED, linewidth=1, zorder=1)
        for row, (name, values) in enumerate(shown.items()):
            if name in intervals:
                ends = [max(-limit, min(end, limit)) for end in intervals[name]]
                ax.plot(ends, [row, row], color=INK, linewidth=1.5, zorder=2)
            dots: dict[str, Any] = {"linestyle": "", "markersize": 4, "alpha": 0.6, "color": BLUE}
            for value in values:
                marker = "o" if abs(value) <= limit else "<" if value < 0 else ">"
                ax.plot([max(-limit, min(value, limit))], [row], marker=marker, **dots)
            if values:
                ax.plot([statistics.fmean(values)], [row], marker="|", markersize=12, color=INK)
        ax.set_yticks(range(len(shown)), labels=list(shown))
        ax.set_ylim(-0.5, len(shown) - 0.5)
        ax.invert_yaxis()
        ax.set_xlim(-1.05 * limit, 1.05 * limit)
        ax.set_xlabel(xlabel)
        open_axes(ax, "x")
