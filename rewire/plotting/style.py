"""What all pictures share: colours, fonts, ticks, and matplotlib without its global state."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Path = str | os.PathLike[str] | IO[bytes]

INK, MUTED, FAINT = "#222222", "#8a8a8a", "#d9d9d9"
GREY, RED, BLUE, TEAL = "#6b7280", "#d1495b", "#30638e", "#2a9d8f"
STYLE = {
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


def matplotlib_parts() -> tuple[Any, type[Figure]]:
    """``rc_context`` and ``Figure``. No pyplot: no window system, no global state, any thread."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'rewire[viz]'") from error
    return rc_context, Figure


def ticks(first: int, last: int) -> Sequence[int]:
    """About eight whole numbers from first to last, at a round distance, first included."""
    step = next(s for s in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024) if (last - first) / s <= 8)
    return [first] * (first % step > 0) + list(range(-(-first // step) * step, last + 1, step))
