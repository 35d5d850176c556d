"""Inline SVG: a residual stream with its adds, connection weights as a heat map and as arcs.

Colours are classes of the page's style, so that they follow its light or dark scheme. What the pointer shows is in
``data-tip``. Texts from the model pass `escape`.
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

#: Pixels between two states, and between the stream and its branches.
_STEP, _RISE = 112, 62
_SMALLEST = -10.0  # natural logarithm of the smallest part of a row's largest weight that is told from 0


def stream(trunk: Trunk) -> str:
    """The residual stream from left to right: states as dots, adds as circles with a plus, branches above."""
    sites = trunk.sites
    states = [(22 + _STEP * number, 40 + _RISE) for number in range(len(sites) + 1)]
    branches = [(x + _STEP / 2, 40) for x, _ in states[:-1]]
    parts = [_band(trunk, states)]
    for here, branch, there in zip(states, branches, states[1:], strict=False):
        parts += [_edge(here, there, "shortcut"), _edge(here, branch, "way"), _edge(branch, there, "way")]
    parts += [_branch(place, site) for place, site in zip(branches, sites, strict=True)]
    parts += [_state(place, number, trunk) for number, place in enumerate(states)]
    return _svg("stream", f"Residual stream {trunk.name}", parts, states[-1][0] + 24, _RISE + 92)


def _band(trunk: Trunk, states: Sequence[Place]) -> str:
    """A bar below the adds of each block, with its number."""
    parts = []
    y = states[0][1] + 22
    for unit in dict.fromkeys(trunk.units):
        numbers = [n for n, own in enumerate(trunk.units) if own == unit]
        left, right = states[numbers[0]][0] + 12, states[numbers[-1] + 1][0] + 8
        block = escape(trunk.sites[numbers[0]].block)
        parts.append(
            f'<g data-tip="block {unit}: {block}"><rect class="band" x="{left:g}" y="{y:g}" width="{right - left:g}" '
            f'height="16" rx="3"/><text x="{(left + right) / 2:g}" y="{y + 12:g}">{unit}</text></g>'
        )
    return "".join(parts)


def _edge(source: Place, target: Place, kind: str) -> str:
    (a, b), (c, d) = source, target
    if d < b:  # up to a branch
        way = f"C{a:g} {d:g} {a:g} {d:g} {c:g} {d:g}"
    elif d > b:  # down to an add
        way = f"C{c:g} {b:g} {c:g} {b:g} {c:g} {d - 9:g}"
    else:
        way = f"H{c:g}"
    return f'<path class="{kind}" d="M{a:g} {b:g}{way}"/>'


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


def _state(place: Place, number: int, trunk: Trunk) -> str:
    x, y = place
    if number == 0:
        return f'<circle class="state" cx="{x:g}" cy="{y:g}" r="5" data-tip="state 0: the input of the stream"/>'
    tip = escape(f"residual add {number} of {len(trunk.sites)}, in {trunk.sites[number - 1].block or '(the model)'}")
    return (
        f'<g class="add" data-tip="{tip}"><circle cx="{x:g}" cy="{y:g}" r="8"/>'
        f'<path d="M{x - 4:g} {y:g}h8M{x:g} {y - 4:g}v8"/></g>'
    )


def heatmap(name: str, matrix: Tensor) -> str:
    """Weights as a matrix: shade by the logarithm of the part of the row's largest, as in ANCRe's Figure 6."""
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
    each = _every(columns)
    cells += [f'<text x="{(c + 0.5) * size:g}" y="{height + 14:g}">{c}</text>' for c in range(0, columns, each)]
    cells += [f'<text x="-12" y="{(r + 0.5) * size + 4:g}">{r + 1}</text>' for r in range(0, rows, each)]
    cells.append(f'<text x="{width / 2:g}" y="{height + 32:g}">from state</text>')
    cells.append(f'<text transform="translate(-32 {height / 2:g}) rotate(-90)">into state</text>')
    title = f"Connection weights of {name} as a matrix"
    return _svg("heatmap", title, cells, width + 50, max(height, 60) + 40, left=-44, top=-1)


def _cell(row: int, column: int, value: float, shade: float, size: float) -> str:
    sign = "negative" if value < 0 else "positive"
    tip = f"from state {column} into state {row + 1}: {value:.4g}"
    return (
        f'<rect class="{sign}" x="{column * size:g}" y="{row * size:g}" width="{size - 0.6:g}" '
        f'height="{size - 0.6:g}" fill-opacity="{shade:.3f}" data-tip="{tip}"/>'
    )


def _every(count: int) -> int:
    return max(1, 2 ** math.ceil(math.log2(count / 12))) if count > 12 else 1


def arcs(name: str, matrix: Tensor) -> str:
    """States on a line, and an arc for each weight of at least a hundredth of the largest (and of 1)."""
    weights = matrix.detach().double().cpu()
    depth = weights.shape[0]
    most = max(1.0, float(weights.abs().max()))
    found = sorted(
        (abs(value) / most, source, row + 1, value)
        for row, values in enumerate(weights.tolist())
        for source, value in enumerate(values[: weights.shape[1] - depth + row + 1])
        if abs(value) / most >= 0.01
    )
    step = max(9.0, min(80.0, 600 / depth))
    longest = max((to - source for _, source, to, _ in found), default=1)
    ground = _height(longest, step) + 14
    ink = min(1.0, 12 / depth)  # where arcs are many, each is fainter
    lines = [_arc(*arc, step, ground, ink) for arc in found]
    for n in range(depth + 1):
        lines.append(f'<circle class="state" cx="{n * step:g}" cy="{ground:g}" r="3" data-tip="state {n}"/>')
        if n % _every(depth + 1) == 0:
            lines.append(f'<text x="{n * step:g}" y="{ground + 18:g}">{n}</text>')
    return _svg("arcs", f"Connection weights of {name} as arcs", lines, depth * step + 40, ground + 26, left=-20)


def _arc(strength: float, source: int, target: int, value: float, step: float, ground: float, ink: float) -> str:
    a, b = source * step, target * step
    kind = ("negative" if value < 0 else "longer") if target - source > 1 or value < 0 else "previous"
    style = f'stroke-width="{0.6 + 2.6 * strength:.2f}" stroke-opacity="{(0.12 + 0.83 * strength) * ink:.2f}"'
    tip = f'data-tip="from state {source} into state {target}: {value:.4g}"'
    if source >= target:  # a state's weight on itself (DenseFormer)
        return f'<circle class="arc {kind}" cx="{a:g}" cy="{ground:g}" r="7" {style} {tip}/>'
    height = _height(target - source, step)
    return (
        f'<path class="arc {kind}" d="M{a:g} {ground:g}A{(b - a) / 2:g} {height:g} 0 0 1 {b:g} {ground:g}" '
        f"{style} {tip}/>"
    )


def _height(span: int, step: float) -> float:
    """Height of an arc over ``span`` states: less than proportional, so that short arcs stay visible."""
    return 0.55 * step * span**0.7


def _svg(
    kind: str, title: str, parts: Sequence[str], width: float, height: float, left: float = 0, top: float = 0
) -> str:
    return (
        f'<svg class="{kind}" role="img" aria-label="{escape(title)}" width="{width:g}" height="{height:g}" '
        f'viewBox="{left:g} {top:g} {width:g} {height:g}">{"".join(parts)}</svg>'
    )
