"""Inline SVG of a trunk's depth graph, laid out by networkx: columns from the input to the output."""

from __future__ import annotations

import dataclasses
from html import escape
from typing import TYPE_CHECKING, Any

from rewire.reporting.drawings import every, svg

if TYPE_CHECKING:
    from rewire.diagnostics.depth_graph import DepthGraph

_APART = 40  # pixels between the nodes of a column
_LIFT = {"read": 0.6, "unit": 1.2}  # rows above the states
_MOST = 3000  # edges that are drawn
_LEAST = 0.01  # share of the largest weight below which edges are not drawn


@dataclasses.dataclass(frozen=True)
class _Placed:
    """The position of a node, and the number of its column."""

    x: float
    y: float
    column: int


def depth(part: DepthGraph) -> str:
    """States (circles), reads (dots) and units (boxes) from left to right, with the edges between them."""
    places = _layout(part)
    edges = [_edge(part, source, target, places) for source, target in _strongest(part)]
    nodes = [_node(part, node, place) for node, place in places.items()]
    low, bent = max(place.y for place in places.values()), max((below for _, below in edges), default=0.0)
    labels = _labels(part, places, max(low, bent) + 22)
    top = min(place.y for place in places.values()) - 16
    width, height = max(place.x for place in places.values()) + 40, max(low, bent) + 30 - top
    (trunk,) = part.trunks
    parts = [*(drawn for drawn, _ in edges), *nodes, *labels]
    return svg("depth", f"Depth graph of {trunk}", parts, width, height, left=-20, top=top)


def _layout(part: DepthGraph) -> dict[str, _Placed]:
    """Lay out units and their reads in one column, above the row of states, and the next state in the next column."""
    import networkx as nx

    columns: dict[int, list[str]] = {}
    for node, data in part.nodes(data=True):
        columns.setdefault(2 * data["at"] + (data["role"] == "state"), []).append(node)
    number = {node: n for n, column in enumerate(sorted(columns)) for node in columns[column]}
    found = nx.multipartite_layout(part, subset_key=columns)
    left, right = (end(float(x) for x, _ in found.values()) for end in (min, max))
    unit = (right - left) / max(1, len(columns) - 1) or 1.0  # in both directions, before networkx scaled them
    step = max(9.0, min(52.0, 1100 / len(columns)))
    rows = {node: float(y) / unit for node, (_, y) in found.items()}
    above = min(rows[node] for node, role in part.nodes(data="role") if role == "state")
    lifted = rows | {node: above - _LIFT[role] for node, role in part.nodes(data="role") if role in _LIFT}
    return {
        node: _Placed((float(x) - left) / unit * step, lifted[node] * _APART, number[node])
        for node, (x, _) in found.items()
    }


def _strongest(part: DepthGraph) -> list[tuple[str, str]]:
    """The edges to draw; the strongest come last, on top."""
    sizes = [
        (1.0 if weight is None else abs(weight), source, target) for source, target, weight in part.edges(data="weight")
    ]
    least = _LEAST * max((size for size, *_ in sizes), default=0.0)
    return [(source, target) for size, source, target in sorted(sizes) if size and size >= least][-_MOST:]


def _edge(part: DepthGraph, source: str, target: str, places: dict[str, _Placed]) -> tuple[str, float]:
    """An edge, and its lowest point."""
    data, a, b = part.edges[source, target], places[source], places[target]
    weight = data["weight"]
    strength = min(1.0, 1.0 if weight is None else abs(weight))
    span = b.column - a.column
    kind = "negative" if weight is not None and weight < 0 else "longer" if data["learned"] and span > 2 else "previous"
    style = f'stroke-width="{0.6 + 2 * strength:.2f}" stroke-opacity="{0.15 + 0.8 * strength:.2f}"'
    low, path = max(a.y, b.y), f"M{a.x:.1f} {a.y:.1f}L{b.x:.1f} {b.y:.1f}"
    if span > 2:
        low += 14 * span**0.6
        path = f"M{a.x:.1f} {a.y:.1f}C{a.x:.1f} {low:.1f} {b.x:.1f} {low:.1f} {b.x:.1f} {b.y:.1f}"
        low = 0.25 * max(a.y, b.y) + 0.75 * low  # the lowest point of such a curve
    return f'<path class="edge {kind}" d="{path}" {style} data-tip="{escape(_said(part, source, target))}"/>', low


def _said(part: DepthGraph, source: str, target: str) -> str:
    data = part.edges[source, target]
    text = f"{part.nodes[source]['value']} into {part.nodes[target]['value']}"
    text += "" if data["weight"] is None else f": {data['weight']:.4g}"
    return text + (f" ± {data['spread']:.2g} over tokens" if data["spread"] else "") + _lost(data)


def _lost(data: dict[str, Any]) -> str:
    return f"; without it the loss rises by {data['without']:.3g}" if "without" in data else ""


def _node(part: DepthGraph, node: str, place: _Placed) -> str:
    data = part.nodes[node]
    x, y = place.x, place.y
    if data["role"] == "unit":
        tip = escape(f"unit {data['at']}: {data['path']} ({data['kind']}){_lost(data)}")
        return (
            f'<rect class="unit" x="{x - 5:.1f}" y="{y - 5:.1f}" width="10" height="10" rx="2" '
            f'data-kind="{escape(data["kind"])}" data-tip="{tip}"/>'
        )
    tip = escape(f"{data['value']}{', the output' if data['output'] else ''}{_lost(data)}")
    radius = 4 if data["role"] == "state" else 2.5
    return f'<circle class="{data["role"]}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}" data-tip="{tip}"/>'


def _labels(part: DepthGraph, places: dict[str, _Placed], y: float) -> list[str]:
    """Numbers of the units, below them."""
    units = part.units()
    shown = units[:: every(len(units) + 1)]
    return [f'<text x="{places[unit].x:.1f}" y="{y:.1f}">{part.nodes[unit]["at"]}</text>' for unit in shown]
