"""The notebook: it is its script, it runs in a kernel of its own, and what it shows renders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def stored() -> Any:
    import nbformat

    return nbformat.read(EXAMPLES / "tour.ipynb", as_version=4)


def check_outputs(notebook: Any) -> None:
    """Tables, as HTML, and a picture; nothing on stderr. Bars, on slow machines, are gone."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    shown = [output for output in outputs if output.get("data") != {"text/html": ""}]
    assert {output.output_type for output in shown} == {"execute_result", "stream"}
    assert {output.name for output in shown if output.output_type == "stream"} == {"stdout"}
    kinds = [output.data for output in shown if output.output_type == "execute_result"]
    tables = [data["text/html"] for data in kinds if "text/html" in data]
    assert ["12 residual adds in 6 blocks" in tables[0], "chi" in tables[1], "Frozen" in tables[2]] == [True] * 3
    assert [data for data in kinds if "image/png" in data]
    assert kinds[-1]["text/plain"] == "True"  # what was saved is what is loaded


def test_it_is_its_script_executed() -> None:
    import jupytext

    script, notebook = jupytext.read(EXAMPLES / "tour.py"), stored()
    assert [cell.source for cell in script.cells] == [cell.source for cell in notebook.cells], "run `make notebook`"
    check_outputs(notebook)


@pytest.mark.slow
def test_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES.parent))
    notebook = stored()
    for cell in notebook.cells:
        cell.source = cell.source.replace("STEPS, LENGTH, WIDTH, DEPTH = 200", "STEPS, LENGTH, WIDTH, DEPTH = 2")
        cell.pop("outputs", None)
    done = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    check_outputs(done)
    assert {"weights.png", "rewired"} <= {path.name for path in tmp_path.iterdir()}
