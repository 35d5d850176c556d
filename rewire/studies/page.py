"""Files of a study: JSON, pictures, and a page that needs no other file."""

from __future__ import annotations

import base64
import json
import math
import statistics
from html import escape
from pathlib import Path

import torch

from rewire.files import staged, to_json
from rewire.plotting import plot_curves, plot_differences, plot_heatmap
from rewire.studies.report import TITLES, Row, Study

_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; }
p.answer { font-size: 1.4rem; line-height: 1.35; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.9rem; }
th, td { padding: 0.25rem 0.7rem; text-align: right; border-bottom: 1px solid #8884; white-space: pre-line; }
th { vertical-align: bottom; } th:first-child, td:first-child { text-align: left; }
tr.baseline { font-weight: 600; } tr.better td { background: #3a31; } tr.worse td { background: #a331; }
div.wide { overflow-x: auto; }
img { max-width: 100%; background: white; }
"""

_PICTURES = {
    "differences.png": "Final losses minus the baseline's of the same seed: dots are seeds, lines 95% t intervals of "
    "their mean; arrows lie further out. Left of the line is better.",
    "rates.png": "The search: loss by learning rate, at the best of the other numbers; what diverged is left out. How "
    "wide the valley is, is a result, too.",
    "curves.png": "Validation loss of the topologies that were compared and of the plain models, mean over the seeds; "
    "not from the start, which is steep.",
    "weights.png": "Effective connection weights [destination, source] at the end of a run, of the best row.",
}


def write(study: Study, folder: Path) -> None:
    """Write `study.json`, pictures and `study.html`."""
    with staged(folder) as stage:
        (stage / "study.json").write_text(to_json(study.as_json()))
        draw(study, stage)
        (stage / "study.html").write_text(html(study, stage))


def draw(study: Study, folder: Path) -> None:
    """Draw the pictures for which there is data."""
    ran = [row for row in study.rows if math.isfinite(row.mean)]
    # From an eighth of the budget on: the steep start would flatten the rest.
    curves = {row.name: [(float(p.step), p.loss) for p in row.curve() if p.loss < math.inf] for row in ran}
    late = {name: points[-max(2, len(points) * 7 // 8) :] for name, points in curves.items() if points}
    plot_curves(late, folder / "curves.png", "step", "validation loss, mean over seeds", log=_log(late))
    gains = {row.name: study.gain(row) for row in study.rows if row.results}
    intervals = {name: (-gain.high, -gain.low) for name, gain in gains.items() if math.isfinite(gain.low)}
    xlabel = "final validation loss minus the baseline's, same seed"
    values = {name: [-value for value in gain.values] for name, gain in gains.items()}
    plot_differences(values, folder / "differences.png", xlabel, intervals)
    rates = {row.name: points for row in study.rows if (points := _by_rate(row))}
    plot_curves(rates, folder / "rates.png", "learning rate", "validation loss in the search", log="x" + _log(rates))
    first = next((row for row in ran if row.results[0].matrix), None)
    if first is not None:
        plot_heatmap({first.name: torch.tensor(first.results[0].matrix)}, folder / "weights.png")


def _log(curves: dict[str, list[tuple[float, float]]]) -> str:
    """The scale of an axis: losses of densities may be negative, and have no logarithm."""
    return "y" if all(loss > 0 for points in curves.values() for _, loss in points) else ""


def _by_rate(row: Row) -> list[tuple[float, float]]:
    """The lowest loss of each learning rate."""
    losses: dict[float, float] = {}
    for setting, loss in row.tried.items():
        losses[setting.rate] = min(loss, losses.get(setting.rate, math.inf))
    return sorted((rate, loss) for rate, loss in losses.items() if loss < math.inf)


def html(study: Study, folder: Path) -> str:
    """The page, with the pictures in ``folder``."""
    rows = "".join(
        f'<tr class="{study.verdict(row)}"><td>{escape(row.name)}</td>{_cells(study.cells(row))}</tr>\n'
        for row in study.rows
    )
    pictures = "".join(
        f'<p><img alt="{text}" src="data:image/png;base64,{_base64(folder / name)}"><br>{text}</p>'
        for name, text in _PICTURES.items()
        if (folder / name).exists()
    )
    findings = "".join(f"<li>{escape(sentence)}</li>" for sentence in study.findings())
    budget = " or ".join(f"{study.about[unit]} {unit}" for unit in ("steps", "seconds") if study.about[unit])
    scales = study.scales
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>rewire study</title><style>{_STYLE}</style></head><body>
<h1>Which residual connections?</h1>
<p class="answer">{escape(study.headline())}</p>
<div class="wide"><table><thead><tr>{_head(TITLES)}</tr></thead><tbody>
{rows}</tbody></table></div>
<p>Runs of {budget}, {study.about["seeds"]} seeds of each. Topologies start with embeddings multiplied by
{scales.embedding:g} and the ends of branches by {scales.branch:g}, the best that was found for the plain model.
"in its time": below the plain model when that trains for as long. "speed-up": time that the plain model would need for
this loss, over the time that this took. "step": its time, as a multiple of the plain model's. "conn.": factor on the
rates of the connection weights.</p>
{pictures}
<h2>In words</h2>
<ul>{findings}</ul>
<p>{escape(study.limits())}</p>
<h2>All settings that were tried</h2>
<div class="wide"><table><thead><tr>{_head(_SEARCH)}</tr></thead><tbody>
{_searches(study)}</tbody></table></div>
<h2>Where weights went</h2>
<div class="wide"><table><thead><tr>{_head(_MOVES)}</tr></thead><tbody>
{_moves(study)}</tbody></table></div>
<details><summary>Machine and versions</summary><pre>{escape(json.dumps(study.about, indent=1))}</pre></details>
</body></html>
"""


_SEARCH = (
    "rate",
    "connections ×",
    "embedding ×",
    "branch ×",
    "loss",
    "spikes of the training loss",
    "runs that diverged",
)
_MOVES = ("moved, at natural scales", "95% of the way by step", "gradient at the end, of its largest")


def _searches(study: Study) -> str:
    lines = []
    for row in study.rows:
        for setting, loss in sorted(row.tried.items(), key=lambda item: item[0].rate):
            runs = [result for result in row.searched if result.trial.setting == setting]
            cells = [f"{x:.3g}" for x in (setting.rate, setting.connections, setting.embedding, setting.branch)]
            cells += [f"{loss:.4g}", str(sum(r.spikes for r in runs)), str(sum(r.loss == math.inf for r in runs))]
            lines.append(f"<tr><td>{escape(row.name)}</td>{_cells(cells)}</tr>\n")
    return "".join(lines)


def _moves(study: Study) -> str:
    lines = []
    for row in study.rows:
        moves = [result.moves for result in row.results if result.moves]
        if moves:
            cells = [
                f"{statistics.fmean(m.moved for m in moves):.2g}",
                f"{statistics.fmean(m.settled for m in moves):.0f}",
            ]
            cells.append(f"{statistics.fmean(m.gradient for m in moves):.1%}")
            lines.append(f"<tr><td>{escape(row.name)}</td>{_cells(cells)}</tr>\n")
    return "".join(lines)


def _head(titles: tuple[str, ...]) -> str:
    return "".join(f"<th>{escape(title)}</th>" for title in ("", *titles))


def _cells(cells: list[str]) -> str:
    return "".join(f"<td>{escape(cell)}</td>" for cell in cells)


def _base64(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()
