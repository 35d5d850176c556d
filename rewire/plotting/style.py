"""Common style of all pictures: colours, fonts, axes, ticks, and matplotlib without its global state."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import IO, TYPE_CHECKING, Any, Literal

from rewire.files import whole
from rewire.version import how_to_install

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Path = str | os.PathLike[str] | IO[bytes]

INK, MUTED, FAINT = "#222222", "#8a8a8a", "#d9d9d9"
GREY, RED, BLUE, TEAL = "#6b7280", "#d1495b", "#30638e", "#2a9d8f"
_STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.labelsize": 9,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
}


@contextlib.contextmanager
def saved_figure(path: Path, width: float, height: float) -> Iterator[Figure]:
    """A figure of this size in inches, which is written to ``path`` when the context ends.

    It does not use pyplot, so it needs no window system and no global state, and works in any thread.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"plots need matplotlib: {how_to_install('viz')}") from error
    with rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        with whole(path) if isinstance(path, (str, os.PathLike)) else contextlib.nullcontext(path) as file:
            figure.savefig(file, dpi=200)


def open_axes(ax: Axes, grid: Literal["both", "x", "y"] | None = None) -> None:
    """Remove the lines at the top and the right of axes; add a faint grid behind the plot."""
    ax.spines[["top", "right"]].set_visible(False)
    if grid:
        ax.grid(axis=grid, color=FAINT, linewidth=0.5)
        ax.set_axisbelow(True)


def ticks(first: int, last: int) -> Sequence[int]:
    """About eight whole numbers from first to last, at a round distance, first included."""
    step = next(s for s in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024) if (last - first) / s <= 8)
    return [first] * (first % step > 0) + list(range(-(-first // step) * step, last + 1, step))
