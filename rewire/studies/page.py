"""Files of a study: JSON, pictures, and one page that needs no other file."""

from __future__ import annotations

import base64
import json
from html import escape
from pathlib import Path

from rewire.files import staged
from rewire.plotting import plot_curves, plot_differences
from rewire.studies.report import TITLES, Study

_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.9rem; }
th, td { padding: 0.25rem 0.7rem; text-align: right; border-bottom: 1px solid #8884; }
th { vertical-align: bottom; } th:first-child, td:first-child { text-align: left; }
tr.baseline { font-weight: 600; }
div.wide { overflow-x: auto; }
img { max-width: 100%; background: white; }
"""


_PICTURES = {
    "differences.png": "Every run's final loss beside the best plain model's of the same seed; arrows lie further out.",
    "curves.png": "Validation loss of the best five and of the plain models; not from the start, which is steep.",
}


def write(study: Study, folder: Path) -> None:
    """Write `study.json`, `curves.png`, `differences.png` and `study.html`."""
    with staged(folder) as stage:
        (stage / "study.json").write_text(json.dumps(study.as_json(), indent=1))
        draw(study, stage)
        (stage / "study.html").write_text(html(study, stage))


def draw(study: Study, folder: Path) -> None:
    """The curves of the plain models and of the best five, and the differences of all."""
    ran = [row for row in study.rows if row.runs and not row.contender.held]
    shown = [row for row in ran if row.contender.settings][:5] + [row for row in ran if not row.contender.settings]
    # From an eighth of the budget on: the steep start would squeeze the rest into a line.
    curves = {row.name: [(float(p.step), p.loss) for p in row.curve() if p.loss < float("inf")] for row in shown}
    late = {name: points[-max(2, len(points) * 7 // 8) :] for name, points in curves.items() if points}
    plot_curves(late, folder / "curves.png", "step", "validation loss, mean over seeds", log=True)
    differences = {row.name: [-gain for gain in study.gains(row)] for row in study.rows if row.runs}
    xlabel = "final validation loss minus the best plain model's, same seed"
    plot_differences(differences, folder / "differences.png", xlabel)


def html(study: Study, folder: Path) -> str:
    """The page; pictures are taken from ``folder``."""
    head = "".join(f"<th>{escape(title)}</th>" for title in ("", *TITLES))
    rows = "".join(
        f"<tr{' class=baseline' if row is study.baseline else ''}><td>{escape(row.name)}</td>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in study.cells(row))
        + "</tr>\n"
        for row in study.rows
    )
    pictures = "".join(
        f'<p><img alt="{text}" src="data:image/png;base64,{_base64(folder / name)}"><br>{text}</p>'
        for name, text in _PICTURES.items()
    )
    findings = "".join(f"<li>{escape(sentence)}</li>" for sentence in study.findings())
    budget = " or ".join(f"{study.about[unit]} {unit}" for unit in ("steps", "seconds") if study.about[unit])
    scales = study.scales
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>rewire study</title><style>{_STYLE}</style></head><body>
<h1>Which residual connections?</h1>
<p>Runs of {budget}; {study.about["seeds"]} seeds of each, at the best of up to {study.about["trials"]} rates of its
own. All but the row "residual" have embeddings multiplied by {scales.embedding:g} and the ends of branches by
{scales.branch:g}, the best that was found for the plain model. The baseline is the row in bold.</p>
<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>
{rows}</tbody></table></div>
{pictures}
<ul>{findings}</ul>
<p>{escape(study.limits())}</p>
<details><summary>Machine and versions</summary><pre>{escape(json.dumps(study.about, indent=1))}</pre></details>
</body></html>
"""


def _base64(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()
