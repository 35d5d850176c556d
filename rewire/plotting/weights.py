"""Connection weights as pictures: a matrix, and arcs between states."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rewire.plotting.style import BLUE, FAINT, GREY, INK, RED, Path, open_axes, saved_figure, ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMNS = 4  # panels in a row of a heatmap figure
_SIGNED = r"$p_{ij}\,/\,\max_i\,|p_{ij}|$, red: negative"


def plot_heatmap(
    matrices: dict[str, Tensor], path: Path, floor: float = -10.0, scales: Mapping[str, Tensor] | None = None
) -> None:
    """Write a heatmap of connection weights like ANCRe's Figure 6: one panel per trunk.

    A panel shows ``log(|p_ij| / max_i |p_ij|)`` for destination j (vertical) and source i (horizontal), so
    the largest weight into each destination is 0. Connections that cannot exist stay blank; existing ones
    below ``floor``, exact zeros included, have the floor's colour. If any weight is negative, the panels show
    ``p_ij / max_i |p_ij|`` instead, from red over white, 0, to blue; colours go by the square root, so that a hundredth
    is still seen, and connections that cannot exist are grey. In each row a dot
    marks the newest source: column j - 1, or j where a destination mixes what its own unit left (MUDDFormer).

    Args:
        matrices: by trunk, float [destinations, sources] as `Topology.matrix` returns them: row j - 1 is
            destination j, column i is source i. Of T rows and S columns, row j - 1 can use the first
            ``S - T + j`` columns.
        path: file to write; its suffix selects the format (.png, .pdf, .svg).
        floor: natural logarithm at which the colours end; below 0.
        scales: of panels whose weights are parts of another matrix's largest into each destination, that matrix.

    Raises:
        ValueError: no matrices, one that is not 2-D with 1 or more entries, or a floor of 0 or more.
    """
    if floor >= 0:
        raise ValueError(f"floor={floor}: it has to be below 0, for example -10.")
    panels = _checked(matrices)
    signed = _signed(panels)
    columns = min(len(panels), _COLUMNS)
    rows = math.ceil(len(panels) / columns)
    with saved_figure(path, 2.9 * columns + 0.9, 2.9 * rows + 0.2) as figure:
        axes = figure.subplots(rows, columns, squeeze=False).flatten()
        for ax, (title, matrix) in zip(axes, panels.items(), strict=False):
            image = _heatmap(ax, matrix, floor, signed, (scales or {}).get(title, matrix))
            ax.set_title(title, color=INK)
        for ax in axes[len(panels) :]:
            ax.remove()
        used = list(axes[: len(panels)])
        extend = "neither" if signed else "min"
        bar = figure.colorbar(image, ax=used, extend=extend, fraction=0.05, pad=0.02, aspect=24)
        if signed:
            bar.set_ticks([-1, -0.5, -0.2, -0.05, 0, 0.05, 0.2, 0.5, 1])
        bar.set_label(_SIGNED if signed else r"$\log\,(p_{ij}\,/\,\max_i\,p_{ij})$")
        bar.outline.set_visible(False)


def plot_arcs(matrices: dict[str, Tensor], path: Path) -> None:
    """Write a drawing of each trunk's topology: states on a line, and an arc from source i to destination j.

    Width and opacity of an arc are its weight, ``|p_ij| / max(1, max |p|)``; those under 1% are left out.
    Arcs from the previous state are grey, longer ones red. If any weight is negative, negative ones are red and
    longer ones blue. A state's weight on itself (DenseFormer's ``a_tt``) is a ring.

    Args:
        matrices: by trunk, float [destinations, sources], as for `plot_heatmap`.
        path: file to write; its suffix selects the format (.png, .pdf, .svg).

    Raises:
        ValueError: no matrices, or one that is not 2-D with 1 or more entries.
    """
    panels = _checked(matrices)
    signed = _signed(panels)
    widest = max(matrix.shape[0] for matrix in panels.values())
    with saved_figure(path, min(max(0.42 * widest + 1.5, 5.0), 12.0), 2.5 * len(panels) + 0.4) as figure:
        axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
        for ax, (title, matrix) in zip(axes, panels.items(), strict=True):
            _arcs(ax, matrix, signed)
            ax.set_title(title, color=INK, loc="left")
        _arc_legend(figure, any(matrix.shape[0] < matrix.shape[1] for matrix in panels.values()), signed)


def _checked(matrices: dict[str, Tensor]) -> dict[str, Tensor]:
    """The matrices in float64 on the CPU."""
    if not matrices:
        raise ValueError("there is nothing to plot: the dict of matrices is empty.")
    for name, matrix in matrices.items():
        if matrix.dim() != 2 or not matrix.numel():
            shape = tuple(matrix.shape)
            raise ValueError(f"matrix '{name}' has shape {shape}; it has to be [destinations, sources].")
    return {name: matrix.detach().to("cpu", torch.float64) for name, matrix in matrices.items()}


def _signed(panels: dict[str, Tensor]) -> bool:
    """Whether colours have to show signs."""
    return any(bool((matrix < 0).any()) for matrix in panels.values())


def _existing(matrix: Tensor) -> Tensor:
    """bool [destinations, sources]: the connections that exist; source i comes before destination j."""
    return torch.ones_like(matrix, dtype=torch.bool).tril(matrix.shape[1] - matrix.shape[0])


def _heatmap(ax: Axes, matrix: Tensor, floor: float, signed: bool, scale: Tensor) -> Any:
    from matplotlib import colormaps
    from matplotlib.colors import FuncNorm, Normalize

    destinations, sources = matrix.shape
    largest = scale.abs().amax(dim=1, keepdim=True).to(matrix).clamp(min=torch.finfo(matrix.dtype).tiny)
    parts = matrix / largest
    norm: Normalize
    if signed:
        norm, colors = FuncNorm((_root, _square), vmin=-1, vmax=1), colormaps["RdBu"].with_extremes(bad=FAINT)
    else:
        parts = parts.log().clamp(min=floor)  # log 0 = -inf becomes the floor
        norm, colors = Normalize(floor, 0), colormaps["viridis"]
    shown = torch.where(_existing(matrix), parts, math.nan)  # nan is blank
    edges = (-0.5, sources - 0.5, destinations + 0.5, 0.5)  # centres source i at x = i, destination j at y = j
    image = ax.imshow(shown.numpy(), colors, norm, extent=edges, interpolation="nearest")
    if destinations <= 32:  # thin gaps between the cells
        ax.set_xticks([i + 0.5 for i in range(sources - 1)], minor=True)
        ax.set_yticks([j + 0.5 for j in range(1, destinations)], minor=True)
        ax.grid(which="minor", color="white", linewidth=0.4)
        ax.tick_params(which="minor", length=0)
    ax.set_xticks(ticks(0, sources - 1))
    ax.set_yticks(ticks(1, destinations))
    ax.set_xlabel("source $i$, dot: the newest")
    ax.set_ylabel("destination $j$")
    # Some matrices have as many sources as destinations, others one more: the newest is next to the blank part.
    ax.plot(range(sources - destinations, sources), range(1, destinations + 1), ".", color=GREY, markersize=4, zorder=3)
    open_axes(ax)
    ax.tick_params(length=2)
    return image


def _root(x: Any) -> Any:
    """The square root, with the sign of x."""
    return x / (abs(x) + (x == 0)) ** 0.5


def _square(x: Any) -> Any:
    return x * abs(x)


def _arcs(ax: Axes, matrix: Tensor, signed: bool) -> None:
    from matplotlib.collections import LineCollection

    depth = matrix.shape[0]
    strengths = matrix / matrix.abs().max().clamp(min=1)
    found = (_existing(matrix) & (strengths.abs() >= 0.01)).nonzero().tolist()
    # The strongest come last, on top.
    weighted = sorted(((float(strengths[row, i]), i, row + 1) for row, i in found), key=lambda arc: abs(arc[0]))
    arcs = [arc for arc in weighted if arc[1] < arc[2]]
    rings = [arc for arc in weighted if arc[1] == arc[2]]
    lines = [_arc(source, destination) for _, source, destination in arcs]
    widths = [_width(strength) for strength, _, _ in arcs]
    ax.add_collection(LineCollection(lines, colors=[_color(*arc, signed) for arc in arcs], linewidths=widths))
    size = min(18.0, 500.0 / (depth + 1))
    ax.scatter(range(depth + 1), [0] * (depth + 1), s=size, color=INK, zorder=3, linewidths=0, clip_on=False)
    ax.scatter(
        [source for _, source, _ in rings],
        [0] * len(rings),
        s=6 * size,
        facecolors="none",
        edgecolors=[_color(*ring, signed) for ring in rings],
        linewidths=[_width(strength) for strength, _, _ in rings],
        clip_on=False,
    )
    longest = max((destination - source for _, source, destination in arcs), default=1)
    top = 1.06 * max(_height(longest), 0.5 * _height(depth))
    ax.set_ylim(-0.08 * top, top)
    ax.set_xlim(-0.5, depth + 0.5)
    ax.set_yticks([])
    ax.set_xticks(ticks(0, depth))
    ax.set_xlabel("state")
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)


def _width(strength: float) -> float:
    return 0.3 + 2.4 * abs(strength)


def _color(strength: float, source: int, destination: int, signed: bool) -> tuple[float, float, float, float]:
    from matplotlib.colors import to_rgb

    longer = BLUE if signed else RED
    red, green, blue = to_rgb(RED if strength < 0 else longer if destination - source > 1 else GREY)
    return red, green, blue, 0.08 + 0.87 * abs(strength)


def _arc(source: int, destination: int) -> list[tuple[float, float]]:
    """Points of the half ellipse over the line from source to destination."""
    middle, radius = (source + destination) / 2, (destination - source) / 2
    height = _height(destination - source)
    turn = [math.pi * k / 48 for k in range(49)]
    return [(middle - radius * math.cos(a), height * math.sin(a)) for a in turn]


def _height(span: int) -> float:
    """Height of an arc over ``span`` states: less than proportional, so that short arcs stay visible."""
    return span**0.7


def _arc_legend(figure: Figure, rings: bool, signed: bool) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=GREY, linewidth=2, label="from the previous state"),
        Line2D([], [], color=BLUE if signed else RED, linewidth=2, label="longer shortcut"),
    ]
    if signed:
        handles.append(Line2D([], [], color=RED, linewidth=2, label="negative"))
    if rings:
        ring = {"marker": "o", "markerfacecolor": "none", "markeredgecolor": GREY, "markeredgewidth": 2}
        handles.append(Line2D([], [], linestyle="", **ring, label="the state itself"))  # type: ignore[arg-type]
    columns = 2 if len(handles) > 3 else 4  # fits the width of a shallow network
    figure.legend(handles=handles, loc="outside upper right", ncols=columns, frameon=False, fontsize=8)
