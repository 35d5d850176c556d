"""Pictures of what a topology learned, and of benchmarks. Needs matplotlib: ``pip install 'rewire[viz]'``."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Path = str | os.PathLike[str]

_INK, _MUTED, _FAINT = "#222222", "#8a8a8a", "#d9d9d9"
_CASCADE, _SHORTCUT = "#6b7280", "#d1495b"
_STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.labelsize": 9,
    "axes.edgecolor": _MUTED,
    "axes.labelcolor": _INK,
    "xtick.color": _MUTED,
    "ytick.color": _MUTED,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
}
_PASSES = ("forward", "backward")
_COLUMNS = 4  # panels in a row of a heatmap figure


def plot_heatmap(matrices: dict[str, Tensor], path: Path, floor: float = -10.0) -> None:
    """Write a heatmap of connection weights like ANCRe's Figure 6: one panel per trunk.

    A panel shows ``log(|p_ij| / max_i |p_ij|)`` for destination j (vertical) and source i (horizontal), so
    the largest weight into each destination is 0. Connections that cannot exist stay blank; existing ones
    below ``floor``, exact zeros included, have the floor's colour.

    Args:
        matrices: by trunk, float [destinations, sources] as `Topology.matrix` returns them: row j - 1 is
            destination j, column i is source i. Of T rows and S columns, row j - 1 can use the first
            ``S - T + j`` columns.
        path: file to write; its suffix selects the format (.png, .pdf, .svg).
        floor: natural logarithm at which the colours end; below 0.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: no matrices, one that is not 2-D with 1 or more entries, or a floor of 0 or more.
    """
    if floor >= 0:
        raise ValueError(f"floor={floor}: it has to be below 0, for example -10.")
    panels = _checked(matrices)
    rc_context, new_figure = _matplotlib()
    with rc_context(_STYLE):
        columns = min(len(panels), _COLUMNS)
        rows = math.ceil(len(panels) / columns)
        figure = new_figure(figsize=(2.9 * columns + 0.9, 2.9 * rows + 0.2), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False).flatten()
        for ax, (title, matrix) in zip(axes, panels.items(), strict=False):
            image = _heatmap(ax, matrix, floor)
            ax.set_title(title, color=_INK)
        for ax in axes[len(panels) :]:
            ax.remove()
        used = list(axes[: len(panels)])
        bar = figure.colorbar(image, ax=used, extend="min", fraction=0.05, pad=0.02, aspect=24)
        bar.set_label(r"$\log\,(p_{ij}\,/\,\max_i\,p_{ij})$")
        bar.outline.set_visible(False)
        figure.savefig(path, dpi=200)


def plot_arcs(matrices: dict[str, Tensor], path: Path) -> None:
    """Write a drawing of each trunk's topology: states on a line, and an arc from source i to destination j.

    Width and opacity of an arc are its weight, ``|p_ij| / max(1, max |p|)``; those under 1% are left out.
    Arcs from the previous state are grey, longer ones coloured. A state's weight on itself (DenseFormer's
    ``a_tt``) is a ring.

    Args:
        matrices: by trunk, float [destinations, sources], as for `plot_heatmap`.
        path: file to write; its suffix selects the format (.png, .pdf, .svg).

    Raises:
        ImportError: matplotlib is missing.
        ValueError: no matrices, or one that is not 2-D with 1 or more entries.
    """
    panels = _checked(matrices)
    rc_context, new_figure = _matplotlib()
    with rc_context(_STYLE):
        widest = max(matrix.shape[0] for matrix in panels.values())
        width = min(max(0.42 * widest + 1.5, 5.0), 12.0)
        figure = new_figure(figsize=(width, 2.5 * len(panels) + 0.4), layout="constrained")
        axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
        for ax, (title, matrix) in zip(axes, panels.items(), strict=True):
            _arcs(ax, matrix)
            ax.set_title(title, color=_INK, loc="left")
        _arc_legend(figure, rings=any(matrix.shape[0] < matrix.shape[1] for matrix in panels.values()))
        figure.savefig(path, dpi=200)


def plot_times(seconds: dict[str, tuple[float, ...]], path: Path) -> None:
    """Write a chart of times side by side: a bar up to each median, a line over its quartiles, a dot for each round.

    Args:
        seconds: by name, one entry for each round; at least one.
        path: file to write; its suffix selects the format (.png, .pdf, .svg).

    Raises:
        ImportError: matplotlib is missing.
        ValueError: nothing was measured.
    """
    if not seconds or not all(seconds.values()):
        raise ValueError("there is nothing to plot: no rounds were measured.")
    rc_context, new_figure = _matplotlib()
    with rc_context(_STYLE):
        figure = new_figure(figsize=(6.5, 0.45 * len(seconds) + 0.9), layout="constrained")
        ax = figure.subplots()
        for row, rounds in enumerate(seconds.values()):
            times = [1e3 * value for value in rounds]
            ax.barh(row, statistics.median(times), height=0.62, color=_FAINT, zorder=1)
            if len(times) > 1:
                low, _, high = statistics.quantiles(times, n=4)
                ax.plot([low, high], [row, row], color=_INK, linewidth=1.5, zorder=2)
            ax.plot(times, [row] * len(times), linestyle="", marker="o", markersize=2.5, color=_INK, zorder=3)
        ax.set_yticks(range(len(seconds)), labels=list(seconds))
        ax.invert_yaxis()
        ax.set_xlabel("milliseconds per training step (bar: median, line: quartiles, dots: rounds)")
        ax.set_xlim(left=0)
        ax.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, dpi=200)


def plot_rates(rates: dict[str, dict[str, tuple[float, float]]], limit: float, path: Path) -> None:
    """Write a chart of the bytes per second of forward and backward: a group of bars for each case, a bar for each way.

    Args:
        rates: by case and way, bytes per second of forward and of backward.
        limit: those of a copy, drawn as a line.
        path: file to write; its suffix selects the format (.png, .pdf, .svg).

    Raises:
        ImportError: matplotlib is missing.
        ValueError: nothing was measured.
    """
    if not any(rates.values()):
        raise ValueError("there is nothing to plot: no rates were measured.")
    rc_context, new_figure = _matplotlib()
    with rc_context(_STYLE):
        ways = list(dict.fromkeys(way for case in rates.values() for way in case))
        colors = dict(zip(ways, _way_colors(ways), strict=True))
        bars = sum(len(case) + 1 for case in rates.values())
        figure = new_figure(figsize=(9.0, 0.15 * bars + 1.1), layout="constrained")
        for index, (ax, title) in enumerate(zip(figure.subplots(1, 2, sharey=True), _PASSES, strict=True)):
            _rate_bars(ax, {case: {way: pair[index] for way, pair in of.items()} for case, of in rates.items()}, colors)
            ax.set_xlim(0, 1.05e-9 * max(limit, *(pair[index] for case in rates.values() for pair in case.values())))
            ax.axvline(limit / 1e9, color=_INK, linewidth=0.8, linestyle=(0, (4, 3)))
            ax.set_title(title, color=_INK, loc="left")
            ax.set_xlabel("GB/s")
        _rate_legend(figure, colors)
        figure.savefig(path, dpi=200)


def plot_curves(curves: dict[str, list[tuple[float, float]]], path: Path, xlabel: str, ylabel: str) -> None:
    """Write one line per name through its points (x, y), with a legend.

    Args:
        curves: points by name, in the order in which they are joined.
        path: file to write; its suffix selects the format (.png, .pdf, .svg).
        xlabel: what x is.
        ylabel: what y is.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: no curves, or one without points.
    """
    empty = [name for name, points in curves.items() if not points]
    if not curves or empty:
        raise ValueError(f"there is nothing to plot in {', '.join(map(repr, empty)) or 'an empty dict'}.")
    rc_context, new_figure = _matplotlib()
    with rc_context(_STYLE):
        figure = new_figure(figsize=(6.0, 3.8), layout="constrained")
        ax = figure.subplots()
        for name, points in curves.items():
            marker = "o" if len(points) <= 30 else ""
            ax.plot(*zip(*points, strict=True), label=name, linewidth=1.5, marker=marker, markersize=3)
        ax.set_xlabel(xlabel)
        ax.set_ylabel(ylabel)
        ax.grid(color=_FAINT, linewidth=0.5)
        ax.set_axisbelow(True)
        ax.spines[["top", "right"]].set_visible(False)
        outside = len(curves) > 6  # beside the axes, where it cannot cover lines
        place: dict[str, Any] = {"loc": "outside right upper"} if outside else {"loc": "best"}
        (figure if outside else ax).legend(frameon=False, fontsize=8, **place)
        figure.savefig(path, dpi=200)


def _matplotlib() -> tuple[Any, type[Figure]]:
    """``rc_context`` and ``Figure``. No pyplot: no window system, no global state, any thread."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'rewire[viz]'") from error
    return rc_context, Figure


def _checked(matrices: dict[str, Tensor]) -> dict[str, Tensor]:
    """The matrices as |p|, float64 on the CPU."""
    if not matrices:
        raise ValueError("there is nothing to plot: the dict of matrices is empty.")
    for name, matrix in matrices.items():
        if matrix.dim() != 2 or not matrix.numel():
            shape = tuple(matrix.shape)
            raise ValueError(f"matrix '{name}' has shape {shape}; it has to be [destinations, sources].")
    return {name: matrix.detach().to("cpu", torch.float64).abs() for name, matrix in matrices.items()}


def _existing(matrix: Tensor) -> Tensor:
    """bool [destinations, sources]: the connections that exist; source i comes before destination j."""
    return torch.ones_like(matrix, dtype=torch.bool).tril(matrix.shape[1] - matrix.shape[0])


def _heatmap(ax: Axes, matrix: Tensor, floor: float) -> Any:
    destinations, sources = matrix.shape
    largest = matrix.amax(dim=1, keepdim=True).clamp(min=torch.finfo(matrix.dtype).tiny)
    logs = (matrix / largest).log().clamp(min=floor)  # log 0 = -inf becomes the floor
    shown = torch.where(_existing(matrix), logs, math.nan)  # nan is blank
    edges = (-0.5, sources - 0.5, destinations + 0.5, 0.5)  # source i at x = i, destination j at y = j
    image = ax.imshow(shown.numpy(), "viridis", vmin=floor, vmax=0, extent=edges, interpolation="nearest")
    if destinations <= 32:  # thin gaps between the cells
        ax.set_xticks([i + 0.5 for i in range(sources - 1)], minor=True)
        ax.set_yticks([j + 0.5 for j in range(1, destinations)], minor=True)
        ax.grid(which="minor", color="white", linewidth=0.4)
        ax.tick_params(which="minor", length=0)
    ax.set_xticks(_ticks(0, sources - 1))
    ax.set_yticks(_ticks(1, destinations))
    ax.set_xlabel("source $i$")
    ax.set_ylabel("destination $j$")
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(length=2)
    return image


def _arcs(ax: Axes, matrix: Tensor) -> None:
    from matplotlib.collections import LineCollection

    depth = matrix.shape[0]
    strengths = matrix / matrix.max().clamp(min=1)
    found = (_existing(matrix) & (strengths >= 0.01)).nonzero().tolist()
    # The strongest come last, on top.
    weighted = sorted((float(strengths[row, source]), source, row + 1) for row, source in found)
    arcs = [arc for arc in weighted if arc[1] < arc[2]]
    rings = [arc for arc in weighted if arc[1] == arc[2]]
    lines = [_arc(source, destination) for _, source, destination in arcs]
    widths = [_width(strength) for strength, _, _ in arcs]
    ax.add_collection(LineCollection(lines, colors=[_color(*arc) for arc in arcs], linewidths=widths))
    size = min(18.0, 500.0 / (depth + 1))
    ax.scatter(range(depth + 1), [0] * (depth + 1), s=size, color=_INK, zorder=3, linewidths=0, clip_on=False)
    ax.scatter(
        [source for _, source, _ in rings],
        [0] * len(rings),
        s=6 * size,
        facecolors="none",
        edgecolors=[_color(*ring) for ring in rings],
        linewidths=[_width(strength) for strength, _, _ in rings],
        clip_on=False,
    )
    longest = max((destination - source for _, source, destination in arcs), default=1)
    top = 1.06 * max(_height(longest), 0.5 * _height(depth))
    ax.set_ylim(-0.08 * top, top)
    ax.set_xlim(-0.5, depth + 0.5)
    ax.set_yticks([])
    ax.set_xticks(_ticks(0, depth))
    ax.set_xlabel("state")
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)


def _width(strength: float) -> float:
    return 0.3 + 2.4 * strength


def _color(strength: float, source: int, destination: int) -> tuple[float, float, float, float]:
    from matplotlib.colors import to_rgb

    red, green, blue = to_rgb(_SHORTCUT if destination - source > 1 else _CASCADE)
    return red, green, blue, 0.08 + 0.87 * strength


def _arc(source: int, destination: int) -> list[tuple[float, float]]:
    """Points of the half ellipse over the line from source to destination."""
    middle, radius = (source + destination) / 2, (destination - source) / 2
    height = _height(destination - source)
    turn = [math.pi * k / 48 for k in range(49)]
    return [(middle - radius * math.cos(a), height * math.sin(a)) for a in turn]


def _height(span: int) -> float:
    """Height of an arc over ``span`` states: less than proportional, so that short arcs stay visible."""
    return span**0.7


def _arc_legend(figure: Figure, rings: bool) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=_CASCADE, linewidth=2, label="from the previous state"),
        Line2D([], [], color=_SHORTCUT, linewidth=2, label="longer shortcut"),
    ]
    if rings:
        ring = {"marker": "o", "markerfacecolor": "none", "markeredgecolor": _CASCADE, "markeredgewidth": 2}
        handles.append(Line2D([], [], linestyle="", **ring, label="the state itself"))  # type: ignore[arg-type]
    figure.legend(handles=handles, loc="outside upper right", ncols=3, frameon=False, fontsize=8)


def _way_colors(ways: Sequence[str]) -> list[Any]:
    """Reds for ours, greys for plain torch, blues for peers."""
    from matplotlib import colormaps

    families = [way.startswith("ours") + 2 * (way.split(",")[0] in ("eager", "stack")) for way in ways]
    maps = [colormaps[name] for name in ("Blues", "Reds", "Greys")]
    shades = [(0.75, 0.45, 0.6, 0.9)[families[:index].count(kind) % 4] for index, kind in enumerate(families)]
    return [maps[kind](shade) for kind, shade in zip(families, shades, strict=True)]


def _rate_bars(ax: Axes, rates: dict[str, dict[str, float]], colors: dict[str, Any]) -> None:
    row, middles = 0.0, []
    for case in rates.values():
        for way, rate in case.items():
            ax.barh(row, rate / 1e9, height=0.85, color=colors[way])
            row += 1
        middles.append(row - (len(case) + 1) / 2)
        row += 1
    ax.set_yticks(middles, labels=list(rates))
    ax.set_ylim(row - 1, -1)
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="x", color=_FAINT, linewidth=0.5)
    ax.set_axisbelow(True)
    ax.spines[["top", "right", "left"]].set_visible(False)


def _rate_legend(figure: Figure, colors: dict[str, Any]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(color=color, label=way) for way, color in colors.items()]
    handles.append(Line2D([], [], color=_INK, linewidth=0.8, linestyle=(0, (4, 3)), label="a copy"))
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 5), frameon=False, fontsize=8)


def _ticks(first: int, last: int) -> Sequence[int]:
    """About eight whole numbers from first to last, at a round distance, first included."""
    step = next(s for s in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024) if (last - first) / s <= 8)
    return [first] * (first % step > 0) + list(range(-(-first // step) * step, last + 1, step))
