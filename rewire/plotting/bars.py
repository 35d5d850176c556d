"""Connection weights as bars, one panel for each place that reads the stream."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rewire.plotting.style import BLUE, INK, MUTED, RED, TEAL, Path, saved_figure, ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

_COLORS = (BLUE, RED, TEAL)
_WAYS = ("queries", "keys", "values")
_MOST_BARS = 16  # sources, if there are ways or channels
_MOST_COLUMNS = 8


def plot_bars(weights: dict[str, dict[str, Tensor]], path: Path) -> None:
    """Write charts of connection weights like DCA's Figure 10: one panel for each destination, a bar per source.

    A bar goes up to the median over the channels; where there are weights per channel, a line over it spans from the
    5th to the 95th percentile. Where that would be too dense, with more than 16 sources, the medians are a line and
    the percentiles a shaded area, as in the paper. Destinations that have separate q/k/v inputs have three
    bars or lines. The panels of a trunk share their axes.

    Args:
        weights: by trunk and destination, float [ways, sources] or, per channel, [ways, sources, D]; ways is 1 or 3
            (q, k, v), source 0 the trunk's input.
        path: file to write; its suffix selects the format (.png, .pdf, .svg).

    Raises:
        ValueError: no weights, or some of another shape.
    """
    trunks = _checked(weights)
    columns = [_columns(len(panels)) for panels in trunks.values()]
    rows = [math.ceil(len(panels) / n) for panels, n in zip(trunks.values(), columns, strict=True)]
    heights = [1.25 * n + 0.75 for n in rows]
    with saved_figure(path, 1.7 * max(columns) + 0.7, sum(heights)) as figure:
        parts = figure.subfigures(len(rows), 1, squeeze=False, height_ratios=heights)[:, 0]
        for part, (trunk, panels), n in zip(parts, trunks.items(), columns, strict=True):
            _panels(part, trunk, panels, n)
        if any(len(values) > 1 for panels in trunks.values() for values in panels.values()):
            _legend(figure)


def _checked(weights: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    """The weights as float64 [ways, sources, D] on the CPU."""
    if not any(weights.values()):
        raise ValueError("there is nothing to plot: the dict of weights is empty.")
    for trunk, panels in weights.items():
        for name, values in panels.items():
            if values.dim() not in (2, 3) or values.shape[0] not in (1, 3) or not values.numel():
                raise ValueError(
                    f"the weights of '{name}' in '{trunk}' have shape {tuple(values.shape)}; they have to be "
                    "[ways, sources] or [ways, sources, D], with 1 or 3 ways."
                )
    return {
        trunk: {name: v.detach().to("cpu", torch.float64).reshape(*v.shape[:2], -1) for name, v in panels.items()}
        for trunk, panels in weights.items()
        if panels
    }


def _columns(panels: int) -> int:
    return math.ceil(panels / math.ceil(panels / _MOST_COLUMNS))


def _panels(part: SubFigure, trunk: str, panels: dict[str, Tensor], columns: int) -> None:
    axes = part.subplots(math.ceil(len(panels) / columns), columns, sharex=True, sharey=True, squeeze=False).flatten()
    sources = max(values.shape[1] for values in panels.values())
    single = all(values.shape[0] == values.shape[2] == 1 for values in panels.values())
    draw = _bars if single or sources <= _MOST_BARS else _lines
    for ax, (name, values) in zip(axes, panels.items(), strict=False):
        draw(ax, values)
        ax.set_title(name, color=INK, fontsize=8, pad=3)
        ax.axhline(0, color=MUTED, linewidth=0.6)
        ax.spines[["top", "right", "bottom"]].set_visible(False)
        ax.tick_params(length=2)
        ax.tick_params(axis="x", length=0)
    for ax in axes[len(panels) :]:
        ax.remove()
    axes[0].set_xlim(-0.7, sources - 0.3)
    axes[0].set_xticks(ticks(0, sources - 1)[:: 2 if sources > 5 else 1])
    for ax in axes[max(0, len(panels) - columns) : len(panels)]:  # the lowest panel of each column
        ax.tick_params(labelbottom=True)
    part.suptitle(trunk, color=INK, fontsize=10)
    part.supxlabel("source (0: the trunk's input)", color=INK, fontsize=9)
    part.supylabel("weight", color=INK, fontsize=9)


def _bars(ax: Axes, values: Tensor) -> None:
    """Bars of [ways, sources, D]."""
    ways, sources, channels = values.shape
    width = 0.8 / ways
    for way, (low, middle, high) in enumerate(_percentiles(values)):
        places = [source + (way - (ways - 1) / 2) * width for source in range(sources)]
        ax.bar(places, middle, width=width, color=_COLORS[way], linewidth=0)
        if channels > 1:
            ax.vlines(places, low, high, color=INK, linewidth=0.8)


def _lines(ax: Axes, values: Tensor) -> None:
    """Lines of [ways, sources, D]; a dot for a single source."""
    _, sources, channels = values.shape
    marker = "o" if sources == 1 else ""
    for way, (low, middle, high) in enumerate(_percentiles(values)):
        ax.plot(range(sources), middle, color=_COLORS[way], linewidth=0.9, marker=marker, markersize=2)
        if channels > 1:
            ax.fill_between(range(sources), low, high, color=_COLORS[way], alpha=0.2, linewidth=0)


def _percentiles(values: Tensor) -> list[list[list[float]]]:
    """The 5th, 50th and 95th percentile over the channels, for each way and source."""
    percentiles = values.quantile(torch.tensor([0.05, 0.5, 0.95], dtype=values.dtype), dim=-1)
    return percentiles.transpose(0, 1).tolist()


def _legend(figure: Figure) -> None:
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(color=color, label=way) for color, way in zip(_COLORS, _WAYS, strict=True)]
    figure.legend(handles=handles, loc="outside upper right", ncols=3, frameon=False, fontsize=8)
