"""Inline SVG: a residual stream with its adds, and connection weights as a heat map.

Colours are classes of the page's style, so that they follow its light or dark scheme. Tooltips are in ``data-tip``.
Texts from the model pass through `escape`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import TypeAlias

import torch
from torch import Tensor

from rewire.trunk import Site, Trunk

#: Pixels from the left and from the top.
Place: TypeAlias = tuple[float, float]

#: Pixels: width of an add with its branch; height of the branches above the stream.
_STEP, _RISE = 124, 62
_BRANCH, _STREAM = 18, 18 + _RISE  # pixels from the top
_SMALLEST = -10.0  # natural logarithm of the smallest share of a row's largest weight that differs from 0


def stream(trunk: Trunk) -> str:
    """The residual stream from left to right: adds as circles with a plus, branches above, blocks as bars below.

    Each add is a drawing of its own, so that the page can break the row.
    """
    start = f'{_line(10, 24)}<circle class="state" cx="10" cy="{_STREAM}" r="5" data-tip="the input of the stream"/>'
    adds = [_add(trunk, number) for number in range(len(trunk.sites))]
    drawn = [f'<svg width="24" height="{_STREAM + 52}">{start}</svg>']
    drawn += [f'<svg width="{_STEP}" height="{_STREAM + 52}">{add}</svg>' for add in adds]
    title = escape(f"Residual stream {trunk.name}")
    return f'<div class="stream" tabindex="0" role="img" aria-label="{title}">{"".join(drawn)}</div>'


def _line(left: float, right: float) -> str:
    return f'<path class="shortcut" d="M{left:g} {_STREAM}H{right:g}"/>'


def _add(trunk: Trunk, number: int) -> str:
    fork, branch, add = (2, _STREAM), (_STEP / 2 - 3, _BRANCH), (_STEP - 12, _STREAM)
    ways = _line(0, _STEP) + _edge(fork, branch) + _edge(branch, add)
    return ways + _band(trunk, number) + _branch(branch, trunk.sites[number]) + _plus(add, number, trunk)


def _band(trunk: Trunk, number: int) -> str:
    """The part of a block's bar below one of its adds; the first has the block's number."""
    unit = trunk.units[number]
    first = number == 0 or trunk.units[number - 1] != unit
    last = number + 1 == len(trunk.units) or trunk.units[number + 1] != unit
    left, right, y = 2 * first, _STEP - 2 * last, _STREAM + 22
    text = f'<text x="{_STEP / 2 - 3:g}" y="{y + 12:g}">{unit}</text>' if first else ""
    tip = escape(f"block {unit}: {trunk.sites[number].block}")
    return (
        f'<g data-tip="{tip}"><rect class="band" x="{left}" y="{y:g}" width="{right - left:g}" height="16"/>{text}</g>'
    )


def _edge(source: Place, target: Place) -> str:
    (a, b), (c, d) = source, target
    up, down = f"C{a:g} {d:g} {a:g} {d:g} {c:g} {d:g}", f"C{c:g} {b:g} {c:g} {b:g} {c:g} {d - 9:g}"
    return f'<path class="way" d="M{a:g} {b:g}{up if d < b else down}"/>'


def _branch(place: Place, site: Site) -> str:
    x, y = place
    post = f"; then {', '.join(site.post)}" if site.post else ""
    tip = escape(f"{site.name} ({site.kind}){post}")
    label = escape(_shortened(site.branch, 15))
    kind = escape(site.kind)
    return (
        f'<g class="branch" data-kind="{kind}" data-tip="{tip}"><rect x="{x - 50:g}" y="{y - 13:g}" width="100" '
        f'height="26" rx="4"/><text x="{x:g}" y="{y + 4:g}">{label}</text></g>'
    )


def _shortened(text: str, length: int) -> str:
    text = " ".join(text.split())
    last = text.rpartition(".")[2] if len(text) > length else text
    return last if len(last) <= length else f"{last[: length - 1]}…"


def _plus(place: Place, number: int, trunk: Trunk) -> str:
    x, y = place
    tip = escape(f"residual add {number + 1} of {len(trunk.sites)}, in {trunk.sites[number].block or '(the model)'}")
    return (
        f'<g class="add" data-tip="{tip}"><circle cx="{x:g}" cy="{y:g}" r="8"/>'
        f'<path d="M{x - 4:g} {y:g}h8M{x:g} {y - 4:g}v8"/></g>'
    )


def heatmap(name: str, matrix: Tensor) -> str:
    """Weights as a matrix: shaded by the logarithm of the share of the row's largest, as in ANCRe's Figure 6."""
    weights = matrix.detach().double().cpu()
    rows, columns = weights.shape
    size = max(3.0, min(26.0, 380 / columns))  # of a cell
    largest = weights.abs().amax(1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
    shades = (1 - (weights.abs() / largest).log() / _SMALLEST).clamp(0, 1).tolist()
    cells = []
    for row, values in enumerate(weights.tolist()):
        for column in range(columns - rows + row + 1):
            cells.append(_cell(row, column, values[column], shades[row][column], size))
    width, height = columns * size, rows * size
    each = every(columns)
    cells += [f'<text x="{(c + 0.5) * size:g}" y="{height + 14:g}">{c}</text>' for c in range(0, columns, each)]
    cells += [f'<text x="-12" y="{(r + 0.5) * size + 4:g}">{r + 1}</text>' for r in range(0, rows, each)]
    cells.append(f'<text x="{width / 2:g}" y="{height + 32:g}">from state</text>')
    cells.append(f'<text transform="translate(-32 {height / 2:g}) rotate(-90)">into state</text>')
    title = f"Connection weights of {name} as a matrix"
    return svg("heatmap", title, cells, width + 50, max(height, 60) + 40, left=-44, top=-1)


def _cell(row: int, column: int, value: float, shade: float, size: float) -> str:
    sign = "negative" if value < 0 else "positive"
    tip = f"from state {column} into state {row + 1}: {value:.4g}"
    return (
        f'<rect class="{sign}" x="{column * size:g}" y="{row * size:g}" width="{size - 0.6:g}" '
        f'height="{size - 0.6:g}" fill-opacity="{shade:.3f}" data-tip="{tip}"/>'
    )


def every(count: int) -> int:
    """The distance between labels on an axis of ``count`` numbers."""
    return max(1, 2 ** math.ceil(math.log2(count / 12))) if count > 12 else 1


def svg(
    kind: str, title: str, parts: Sequence[str], width: float, height: float, left: float = 0, top: float = 0
) -> str:
    """A picture; ``left`` and ``top`` are the coordinates of its corner."""
    return (
        f'<svg class="{kind}" role="img" aria-label="{escape(title)}" width="{width:g}" height="{height:g}" '
        f'viewBox="{left:g} {top:g} {width:g} {height:g}">{"".join(parts)}</svg>'
    )
