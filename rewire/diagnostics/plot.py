"""Signals along the depth of a trunk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rewire.plotting.style import BLUE, GREY, INK, RED, TEAL, Path, open_axes, saved_figure, ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from rewire.diagnostics.signals import SiteSignals, TrunkSignals

_COLORS = {
    **{"attention": BLUE, "linear-attention": BLUE, "conv": BLUE, "ffn": RED},
    **{"cross-attention": TEAL, "parallel": TEAL, "branch": GREY},
}
_DOTTED = (0, (1, 1.5))
_MARKED = 30  # sites; with more of them, lines have no markers


def plot_signals(trunks: Sequence[TrunkSignals], path: Path) -> None:
    """Write a figure of what `rewire.diagnose` measured, one row for each trunk.

    Left: norms of the stream, of what branches add (lines) and of updates (dotted), by kind of branch. Middle: norms
    of gradients, in branch outputs (lines) and in the branches' weights (dotted). Both have logarithmic axes; zeros
    are left out. Right: how much each block changes the hidden state, 1 - cosine of its input and output.

    Args:
        trunks: ``Diagnosis.trunks``.
        path: file to write; its suffix selects the format (.png, .pdf, .svg).

    Raises:
        ValueError: there are no trunks.
    """
    if not trunks:
        raise ValueError("there is nothing to plot: no trunks were measured.")
    with saved_figure(path, 11.0, 2.7 * len(trunks) + 0.5) as figure:
        for row, trunk in zip(figure.subplots(len(trunks), 3, squeeze=False), trunks, strict=True):
            _norms(row[0], trunk)
            _gradients(row[1], trunk)
            _influences(row[2], trunk)
        _legend(figure, trunks)


def _norms(ax: Axes, trunk: TrunkSignals) -> None:
    streams = [*(site.stream for site in trunk.sites), trunk.output]
    sites = range(1, len(streams) + 1)
    _line(ax, sites, streams, color=INK, linewidth=1.5)
    _by_kind(ax, trunk, lambda site: site.branch, marked=True)
    _by_kind(ax, trunk, lambda site: site.update, linestyle=_DOTTED)
    _finish(ax, f"{trunk.name}\nnorms of hidden states", len(streams), "residual add; last: the trunk's output")
    _log_scale(ax)


def _gradients(ax: Axes, trunk: TrunkSignals) -> None:
    _by_kind(ax, trunk, lambda site: site.gradient, marked=True)
    _by_kind(ax, trunk, lambda site: site.weight_gradient, linestyle=_DOTTED)
    chi = f"chi {trunk.chi}" if trunk.chi else " "
    _finish(ax, f"{chi}\nnorms of gradients", len(trunk.sites), "residual add")
    _log_scale(ax)


def _influences(ax: Axes, trunk: TrunkSignals) -> None:
    blocks = range(1, len(trunk.blocks) + 1)
    ax.bar(blocks, [block.influence for block in trunk.blocks], width=0.8, color=GREY)
    depth = f"effective depth {trunk.effective_depth:.1f} of {len(trunk.blocks)} blocks"
    _finish(ax, f"{depth}\n1 − cosine of a block's input and output", len(trunk.blocks), "block")


def _by_kind(
    ax: Axes, trunk: TrunkSignals, value: Callable[[SiteSignals], float | None], marked: bool = False, **style: Any
) -> None:
    for kind in dict.fromkeys(site.kind for site in trunk.sites):
        points = [(n, value(site)) for n, site in enumerate(trunk.sites, start=1) if site.kind == kind]
        marker = "o" if marked and len(trunk.sites) <= _MARKED else ""
        _line(ax, *zip(*points, strict=True), color=_color(kind), marker=marker, markersize=3, linewidth=1.2, **style)


def _line(ax: Axes, x: Sequence[int], y: Sequence[float | None], **style: Any) -> None:
    points = [(a, b) for a, b in zip(x, y, strict=True) if b]
    if points:
        ax.plot(*zip(*points, strict=True), **style)


def _color(kind: str) -> str:
    return _COLORS.get(kind, GREY)


def _finish(ax: Axes, title: str, count: int, xlabel: str) -> None:
    ax.set_title(title, color=INK, loc="left")
    ax.set_xlabel(xlabel)
    ax.set_xlim(0.4, count + 0.6)
    ax.set_xticks(ticks(1, count))
    open_axes(ax, "y")


def _log_scale(ax: Axes) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    if not ax.lines:
        return
    ax.set_yscale("log")
    low, high = ax.get_ylim()
    if high < 100 * low:
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high > 5 * low else range(1, 10)))
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_formatter(NullFormatter())


def _legend(figure: Figure, trunks: Sequence[TrunkSignals]) -> None:
    from matplotlib.lines import Line2D

    kinds = dict.fromkeys(site.kind for trunk in trunks for site in trunk.sites)
    handles = [
        Line2D([], [], color=INK, linewidth=1.5, label="stream"),
        *(Line2D([], [], color=_color(kind), linewidth=2, label=kind) for kind in kinds),
        Line2D([], [], color=GREY, linewidth=1.2, label="branch output"),
        Line2D([], [], color=GREY, linewidth=1.2, linestyle=_DOTTED, label="update; gradient of weights"),
    ]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), frameon=False, fontsize=8)
