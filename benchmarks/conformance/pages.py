"""Write the pages of docs/conformance that follow from references, known mistakes and results.

python benchmarks/conformance/pages.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch

from rewire.conformance import list_schemes, reference
from rewire.conformance.cases import KINDS
from rewire.conformance.known import mistakes_of
from rewire.conformance.schemes import Reference

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "conformance"
RESULTS = ROOT / "benchmarks" / "results" / "conformance.json"
_WRITTEN = "<!-- benchmarks/conformance/pages.py writes this page. -->\n"
_T, _D = 3, 5


def results() -> list[dict[str, Any]]:
    return json.loads(RESULTS.read_text())  # type: ignore[no-any-return]


def written(by_hand: list[tuple[str, str, str, str]]) -> dict[str, str]:
    """The text of each page, by its name."""
    pages = {f"{name}.md": scheme(reference(name)) for name in list_schemes()}
    return pages | {"implementations.md": implementations(by_hand), "schemes.md": schemes(), "cases.md": cases()}


def scheme(known: Reference) -> str:
    title, _, formula = known.formula.rstrip().partition("\n\n")
    lines = [_WRITTEN, f"# {known.name}\n", f"{known.title}: {linked(known.source)}.\n"]
    if linked(known.source) not in linked(title):
        lines.append(f"{linked(title)}\n")
    lines += [linked(formula) + "\n", "## Weights\n", *weights(known)]
    if known.options:
        lines += ["## Options\n", "Those that are not given are the paper's.\n", "| option | paper |", "|---|---|"]
        lines += [f"| `{name}` | `{value!r}` |" for name, value in known.options.items()]
        lines.append("")
    lines += ["## Reference\n", "Plain torch, with nothing to import but that: it may be copied.\n"]
    lines += ["```py", f'--8<-- "rewire/conformance/references/{known.file}.py"', "```\n"]
    if mistakes_of(known.file):
        lines += ["## Known mistakes\n", "The checker tries these, alone and two at once, and names those that explain"]
        lines += ["what an implementation computes.\n"]
        lines += [f"- {escaped(mistake.says)}" for mistake in mistakes_of(known.file)]
        lines.append("")
    rows = [row for row in results() if row["scheme"] == known.name]
    lines += ["## Who agrees\n", *table(rows, with_scheme=False)]
    lines += [
        "## Vectors\n",
        f"`rewire conformance {known.name} --vectors FOLDER` writes its [test cases](vectors.md).",
    ]
    return "\n".join(lines) + "\n"


def weights(known: Reference) -> list[str]:
    options = known.with_options({})
    width = _D * (options[known.divides] if known.divides else 1)
    found = known.parameters(_T, width, frozenset({1, 3}) if known.attention else frozenset(), **options)
    if not found:
        return ["None.\n"]
    lines = [f"As tensors of T = {_T} units and D = {width} channels; row t - 1 is that of unit t.\n"]
    lines += ["| name | shape | start |", "|---|---|---|"]
    for name, value in found.items():
        lines.append(f"| `{name}` | {list(value.shape)} | {start(known, name, value)} |")
    return [*lines, ""]


def start(known: Reference, name: str, value: torch.Tensor) -> str:
    if value.isnan().any():
        return known.drawn.get(name) or known.drawn.get(f"{name.removeprefix('last_')}_pre", "drawn")
    return f"{float(value.flatten()[0]):.4g}" if value.unique().numel() == 1 else "as `parameters` below says"


def implementations(by_hand: list[tuple[str, str, str, str]]) -> str:
    lines = [_WRITTEN, "# Who agrees\n", _ABOUT]
    lines += table([row for row in results() if row["project"] != "rewire"], with_scheme=True)
    lines += ["## Of another form\n", "No adapter can hand these the paper's weights; this is what their code says.\n"]
    lines += ["| project | where | scheme | |", "|---|---|---|---|"]
    lines += [f"| {project} | `{what}` | [{name}]({name}.md) | {note} |" for project, what, name, note in by_hand]
    lines += ["", "## rewire\n", "All topologies agree, with all options (`tests/conformance/test_ours.py`):\n"]
    lines += table([row for row in results() if row["project"] == "rewire"], with_scheme=True)
    return "\n".join(lines)


_ABOUT = """Implementations that run on a CPU, compared with the references by `benchmarks/conformance/adapters.py`.
"To 3e-06" is the largest error of all reads, outputs and gradients in float32. A difference is not always a mistake:
read what is said of it. If a row is wrong, or out of date, please open an issue.
"""


def table(rows: list[dict[str, Any]], with_scheme: bool) -> list[str]:
    columns = ["project", *(["scheme"] if with_scheme else []), "result", "where", "options"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in rows:
        options = ", ".join(f"`{name}={value!r}`" for name, value in row["options"].items())
        scheme = [f"[{row['scheme']}]({row['scheme']}.md)"] if with_scheme else []
        where = ", ".join(f"`{name}`" for name in row["what"].split(", "))  # each may have a line of its own
        cells = [f"{row['project']} {row['version']}", *scheme, result(row), where, options]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def result(row: dict[str, Any]) -> str:
    interpreted = " (in Triton's interpreter)" if row["interpreted"] else ""
    if row["agrees"]:
        low = ", and within rounding in bfloat16" if "bfloat16" in row["errors"] else ""
        return f"agrees to {row['errors']['float32']:.0e}{low}{interpreted}"
    names = "; ".join(map(escaped, row["looks_like"])) or "none of the known mistakes"
    where = "" if len(row["cases"]) > 2 else f" in the case {' and '.join(row['cases'])}"
    return f"differs{where}{interpreted}: {names}. {row['note']}".strip()


def schemes() -> str:
    lines = [_WRITTEN, "# Schemes\n", "| scheme | what it is | source |", "|---|---|---|"]
    for name in list_schemes():
        known = reference(name)
        lines.append(f"| [{name}]({name}.md) | {known.title} | {linked(known.source)} |")
    return "\n".join(lines) + "\n"


def cases() -> str:
    lines = [_WRITTEN, "# Test cases\n", "Each scheme is tried on these.\n"]
    lines += ["| case | units | tokens | what it shows |", "|---|---|---|---|"]
    lines += [
        f"| {name} | {kind.depth} | {' x '.join(map(str, kind.tokens))} | {kind.why} |" for name, kind in KINDS.items()
    ]
    low = ", ".join(name for name, kind in KINDS.items() if not kind.low)
    lines += ["", f"In bfloat16, all but {low}, which amplify rounding."]
    return "\n".join(lines) + "\n"


def linked(text: str) -> str:
    """With links for papers."""
    return re.sub(r"arXiv (\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", text)


def escaped(text: str) -> str:
    return text.replace("_", r"\_").replace("*", r"\*").replace("|", r"\|")


if __name__ == "__main__":
    from adapters import BY_HAND

    for page, text in written(BY_HAND).items():
        (PAGES / page).write_text(text)
