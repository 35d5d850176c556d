"""rewire.report: the page."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

import torch
from torch import nn

from rewire.bench.harness import Timing, quartiles
from rewire.compiler import inspect
from rewire.diagnostics.averages import averages
from rewire.diagnostics.connectivity import graph
from rewire.diagnostics.effects import Ablation, Effect, check_ablation
from rewire.diffs import diff
from rewire.errors import UnsupportedTopology
from rewire.files import whole
from rewire.reporting.costs import Measured, measured, states_held
from rewire.reporting.depth import depth
from rewire.reporting.drawings import heatmap, stream
from rewire.reporting.style import SCRIPT, STYLE
from rewire.runtime.connection import Connection, coefficients, connections
from rewire.trunk import LeftAlone, Trunk, told

if TYPE_CHECKING:
    from rewire.diagnostics.depth_graph import DepthGraph

_MOST_EDGES = 100  # of an ablation
_LARGEST = 128  # states of a trunk whose weights are drawn as a matrix


def report(
    model: nn.Module, path: str | os.PathLike[str], example_inputs: object = None, ablation: Ablation | None = None
) -> None:
    """Write an HTML page about a model: its residual streams, what rewiring changed and learned, and what it costs.

    The page is one file: it loads nothing, and follows the reader's light or dark scheme. Module names and source text
    of the model are shown as text, whatever they contain.

    Args:
        model: a rewired model; for a plain one, the page shows the streams and what would be left alone. It stays as it
            is.
        path: file to write.
        example_inputs: if given, as for `rewire.compile`, training steps (forward and backward) on them are timed, of
            copies of the plain and the rewired model in turn; and weights that depend on the input are averaged over
            them.
        ablation: the result of `rewire.ablate` for this model, to be shown beside the weights.

    Raises:
        RewireError: a file has changed since the model was rewired.
        BadExampleInputs: ``example_inputs`` are none.
        TypeError: ``ablation`` is none.

    Example:
        >>> rewire.report(rewired, "report.html", example_inputs=(x,))
    """
    text = page(model, example_inputs, ablation)
    with whole(path) as file:
        file.write_text(text, encoding="utf-8")


def page(model: nn.Module, example_inputs: object = None, ablation: Ablation | None = None) -> str:
    """The text of the page."""
    check_ablation(ablation)
    found, own = inspect(model), connections(model)
    known = {name: connection.trunk for name, connection in own.items() if connection.trunk is not None}
    trunks = list(({trunk.name: trunk for trunk in found.trunks} | known).values())  # a run knows more about trunks
    streams = "".join(_trunk(trunk, not own or trunk.name in own) for trunk in trunks)
    sections = [("streams", "Streams", streams or "<p>No residual stream was found.</p>")]
    if own:
        sections.append(("weights", "Learned weights", "".join(_weights(model, example_inputs, ablation))))
        if ablation is not None:
            sections.append(("ablation", "What counts", _ablated(ablation)))
        sections.append(("changes", "What was changed", _changes(model)))
        times = measured(model, example_inputs) if example_inputs is not None else None
        sections.append(("cost", "What it costs", _costs(own, times)))
    sections.append(("left", "What was left alone", _left(found.left)))
    body = "".join(f'<section id="{name}"><h2>{title}</h2>{text}</section>' for name, title, text in sections)
    links = "".join(f'<a href="#{name}">{title}</a>' for name, title, _ in sections)
    script = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    name = escape(type(model).__name__)
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" \
content="default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{script}'">
<title>{name}: rewire report</title><link rel="icon" href="data:,"><style>{STYLE}</style></head><body>
<header><h1>{name}</h1><p class="about">{_about(model, trunks, own)}</p><nav>{links}</nav></header>
<main>{body}</main><div id="tip" role="tooltip" hidden></div>
<script>{SCRIPT}</script></body></html>
"""


def _about(model: nn.Module, trunks: Sequence[Trunk], own: dict[str, Connection]) -> str:
    learned = sum(p.numel() for connection in own.values() for p in connection.parameters())
    total = sum(p.numel() for p in model.parameters()) - learned
    adds = sum(len(trunk.sites) for trunk in trunks)
    text = f"{_count(total, 'parameter')}, {_count(adds, 'residual add')} in {_count(len(trunks), 'stream')}"
    if not own:
        return f"{text}. It is not rewired."
    made = ", ".join(dict.fromkeys(str(connection.layout.topology) for connection in own.values()))
    return f"{text}; {_count(learned, 'learned connection weight')}.<br><code>{escape(made)}</code>"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def _trunk(trunk: Trunk, rewired: bool) -> str:
    width, norm = trunk.width or "unknown", "post-norm" if trunk.post_norm else "pre-norm"
    rows = [(n, site.block, site.branch, site.kind, ", ".join(site.post)) for n, site in enumerate(trunk.sites, 1)]
    return (
        f"<h3><code>{escape(trunk.name)}</code></h3><p>{_count(len(trunk.sites), 'residual add')} in "
        f"{_count(trunk.blocks, 'block')}, width {width}, {norm}{'' if rewired else '; left as it was'}.</p>"
        f"{stream(trunk)}<details><summary>All residual adds</summary>"
        f"{_table(('#', 'block', 'branch', 'kind', 'then'), rows)}</details>"
    )


def _table(titles: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """A table that scrolls if it is wide."""
    head = "".join(f"<th>{title}" for title in titles)
    lines = ("".join(f"<td>{escape(str(cell))}</td>" for cell in row) for row in rows)
    text = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead>{text}</table></div>'


def _weights(model: nn.Module, example_inputs: object, ablation: Ablation | None) -> Iterator[str]:
    yield (
        "<p>How much of each state (0 is the input of the stream) goes into each later one, as a matrix; of weights "
        "per token the mean over the inputs, or what does not depend on these if there are none. Shades follow "
        "the logarithm of a weight's part of the largest in its row. Below it the depth graph: units are boxes, states "
        "circles, and what a unit reads is a dot where it is a sum; edges under 1% are left out. Point at one for its "
        'value.</p><p class="legend"><span class="positive">positive</span>'
        '<span class="negative">negative</span><span class="previous">edge from the previous state</span>'
        '<span class="longer">from an earlier one</span></p>'
    )
    try:
        found, why = graph(model, example_inputs, ablation), ""
    except UnsupportedTopology as error:
        found, why = None, str(error)
    shown = coefficients(model) if example_inputs is None else averages(model, example_inputs)[0]
    for name, matrix in shown.items():
        text = f"<p>{escape(why)}</p>"
        if found is not None:
            part = found.of(name)
            text = f"<p>{_depth_of(part)}</p>{_drawn(part)}"
        drawn = f'<div class="wide" tabindex="0">{heatmap(name, matrix)}</div>' if len(matrix) <= _LARGEST else ""
        yield f'<h3><code>{escape(name)}</code></h3><div class="pictures">{drawn}</div>{text}'


def _drawn(part: DepthGraph) -> str:
    try:
        return f'<div class="wide" tabindex="0">{depth(part)}</div>'
    except ImportError:  # networkx needs NumPy to lay out graphs, which torch does not require
        return "<p>The depth graph is drawn where NumPy is installed.</p>"


def _depth_of(part: DepthGraph) -> str:
    (trunk,), unused = part.trunks, [part.nodes[node]["value"] for node in part.unused()]
    text = f"Effective depth {part.effective_depth(trunk):.1f} of {_count(len(part.units()), 'unit')}"
    return f"{text}; nothing comes to the output of {', '.join(unused)}." if unused else f"{text}."


def _ablated(found: Ablation) -> str:
    correlation = found.correlation()
    told = "" if correlation is None else f" Rank correlation of |weight| and rise over the edges: {correlation:.2f}."
    shown = min(_MOST_EDGES, len(found.edges))
    effects = [*found.units, *found.sources, *(found.strongest(shown) if shown else [])]
    titles = ("", "stream", "what", "into", "weight", "without", "as in the plain network")
    return (
        f"<p>Loss {found.loss:.4f}, and how much it rises without a part, or with the weight that it has in the plain "
        f"network, each alone; {len(found.effects)} of {found.asked} measured.{told}</p>"
        "<details open><summary>Units, sources, and the edges that count most</summary>"
        f"{_table(titles, map(_row, effects))}</details>"
    )


def _row(effect: Effect) -> Iterator[str]:
    yield from (effect.what, effect.trunk, effect.path or effect.source, effect.destination)
    yield from map(_number, (effect.weight, effect.without, effect.plain))


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _changes(model: nn.Module) -> str:
    files: list[list[str]] = []
    for line in diff(model).splitlines():
        if line.startswith("--- ") or not files:
            files.append([])
        files[-1].append(line)
    return "".join(map(_file, files)) or "<p>Nothing: the model was rewired as a graph.</p>"


def _file(lines: Sequence[str]) -> str:
    name = lines[0].removeprefix("--- a/").rstrip("\t")
    kinds = {"+": "added", "-": "removed", "@": "hunk"}
    text = "".join(f'<span class="{kinds.get(line[:1], "same")}">{escape(line) or " "}</span>' for line in lines[2:])
    return f"<details open><summary><code>{escape(name)}</code></summary><pre>{text}</pre></details>"


def _costs(own: dict[str, Connection], times: Measured | None) -> str:
    rows = ((name, f"{sum(p.numel() for p in one.parameters()):,}", states_held(one)) for name, one in own.items())
    text = _table(("stream", "learned weights", "hidden states held, at most"), rows)
    text += "<p>Between two units a plain stream holds one hidden state.</p>"
    if times is None:
        return f"{text}<p>Steps were not timed: that takes <code>example_inputs</code>.</p>"
    ratio, (low, high) = times.rewired.ratio(times.plain), quartiles(times.rewired.ratios(times.plain))
    noise = "; <b>that is within the noise of these rounds</b>" if times.noisy else ""
    measured = (
        (name, _step(timing), f"{kept / 2**20:.2f} MiB")
        for name, timing, kept in zip(("plain", "rewired"), (times.plain, times.rewired), times.kept, strict=True)
    )
    return (
        f"{text}{_table(('model', 'training step, median (quartiles)', 'activations kept'), measured)}"
        f"<p>Forward and backward on {escape(str(times.device))} with torch "
        f"{escape(torch.__version__)}, timed in turn {len(times.plain.seconds)} times: the rewired model takes "
        f"<b>{ratio:.2f}</b> times as long (median of the rounds; quartiles {low:.2f} to {high:.2f}){noise}.</p>"
    )


def _step(timing: Timing) -> str:
    low, high = timing.quartiles
    return f"{timing.median * 1e3:.2f} ms ({low * 1e3:.2f} to {high * 1e3:.2f})"


def _left(left: Sequence[LeftAlone]) -> str:
    if not left:
        return "<p>Nothing.</p>"
    return _table(("module", "because", "where"), told(left))
