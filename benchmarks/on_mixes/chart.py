"""The chart of what mixes move in a second, beside a copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rewire.plotting.style import INK, Path, open_axes, saved_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PASSES = ("forward", "backward")


def plot_rates(rates: dict[str, dict[str, tuple[float, float]]], limit: float, path: Path) -> None:
    """Write a chart of the bytes per second of forward and backward: for each workload a bar for each implementation.

    Args:
        rates: by workload and implementation, bytes per second of forward and of backward.
        limit: those of a copy, drawn as a line.
        path: file to write; its suffix selects the format (.png, .pdf, .svg).

    Raises:
        ImportError: matplotlib is missing.
        ValueError: nothing was measured.
    """
    if not any(rates.values()):
        raise ValueError("there is nothing to plot: no rates were measured.")
    bars = sum(len(workload) + 1 for workload in rates.values())
    with saved_figure(path, 9.0, 0.15 * bars + 1.1) as figure:
        colors = _colors_of([*dict.fromkeys(name for workload in rates.values() for name in workload)])
        for index, (ax, title) in enumerate(zip(figure.subplots(1, 2, sharey=True), _PASSES, strict=True)):
            shown = {workload: {name: pair[index] for name, pair in of.items()} for workload, of in rates.items()}
            _rate_bars(ax, shown, colors)
            ax.set_xlim(0, 1.05e-9 * max(limit, *(rate for of in shown.values() for rate in of.values())))
            ax.axvline(limit / 1e9, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
            ax.set_title(title, color=INK, loc="left")
            ax.set_xlabel("GB/s")
        _rate_legend(figure, colors)


def _colors_of(implementations: Sequence[str]) -> dict[str, Any]:
    """Reds for ours, greys for plain torch, blues for peers."""
    from matplotlib import colormaps

    families = [name.startswith("ours") + 2 * (name.split(",")[0] in ("eager", "stack")) for name in implementations]
    maps = [colormaps[name] for name in ("Blues", "Reds", "Greys")]
    shades = [(0.75, 0.45, 0.6, 0.9)[families[:index].count(kind) % 4] for index, kind in enumerate(families)]
    return {name: maps[kind](shade) for name, kind, shade in zip(implementations, families, shades, strict=True)}


def _rate_bars(ax: Axes, rates: dict[str, dict[str, float]], colors: dict[str, Any]) -> None:
    row, middles = 0.0, []
    for workload in rates.values():
        for implementation, rate in workload.items():
            ax.barh(row, rate / 1e9, height=0.85, color=colors[implementation])
            row += 1
        middles.append(row - (len(workload) + 1) / 2)
        row += 1
    ax.set_yticks(middles, labels=list(rates))
    ax.set_ylim(row - 1, -1)
    ax.tick_params(axis="y", length=0)
    open_axes(ax, "x")
    ax.spines["left"].set_visible(False)


def _rate_legend(figure: Figure, colors: dict[str, Any]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(color=color, label=implementation) for implementation, color in colors.items()]
    handles.append(Line2D([], [], color=INK, linewidth=0.8, linestyle=(0, (4, 3)), label="a copy"))
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 5), frameon=False, fontsize=8)
