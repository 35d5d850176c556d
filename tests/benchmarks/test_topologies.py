"""The scripts that measure topologies on a CPU, on a small model: what is counted is what the formulas move."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    topologies = importlib.import_module("topologies")
    for name, value in {"LAYERS": 3, "WIDTH": 32, "BATCH": 2, "LENGTH": 8, "TOKENS": 16}.items():
        monkeypatch.setattr(topologies, name, value)
    return topologies


@pytest.mark.parametrize(
    ("name", "held", "eager", "floor"),
    [
        ("residual", 1, 18, 18),  # 6 adds
        # unit t reads t states and two branches, and writes one; one operator for each state and further branch
        ("ancre-ingoing", 3, 3 * (2 + 3 + 4), 1 + 2 + 3 + 6 + 3),
        ("rezero", 1, 18, 18),  # product and sum are one operator
        # each unit and the output read all increments before them; two branches make an increment
        ("grn-v1", 3, None, 1 + 2 + 3 + 4 + 4 + 9),
        ("hc-static", 6, None, None),  # streams in one tensor with the next read, and a copy of that, as it is small
    ],
)
def test_what_is_counted(script: Any, name: str, held: float, eager: float | None, floor: float | None) -> None:
    row = script.measure(name, {}, script.llama(), torch.randint(1000, (2, 8)), repeats=1)
    assert row["states held"] == pytest.approx(held, abs=0.2)
    assert eager is None or row["eager"] == pytest.approx(eager, rel=0.02)
    assert floor is None or row["floor"] == pytest.approx(floor, rel=0.02)
    assert row["eager"] >= row["floor"] > 0 and row["step"] > 0


def test_a_training_step_on_a_cpu(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_step = importlib.import_module("cpu_step")
    monkeypatch.setattr(cpu_step, "BATCH", 1)
    monkeypatch.setattr(cpu_step, "LENGTH", 8)
    out = tmp_path / "step.json"
    monkeypatch.setattr(
        sys, "argv", ["cpu_step.py", "dca", "--vocabulary", "50", "--threads", "1", "--rounds", "2", "--out", str(out)]
    )
    cpu_step.main()
    rows = {row["model"]: row for row in json.loads(out.read_text())["results"]}
    assert list(rows) == ["plain", "dca", "plain, again", "dca, in place"]
    assert rows["plain"]["over plain"] == [1, 1, 1] and rows["dca"]["over plain"][1] > 0
    assert all(len(row["seconds"]) == 2 for row in rows.values())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # which Dynamo itself hides
def test_two_ways_to_compile(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = importlib.import_module("backend")
    monkeypatch.setattr(script, "LAYERS", 1)
    monkeypatch.setattr(backend, "LENGTH", 8)
    out = tmp_path / "backend.json"
    monkeypatch.setattr(sys, "argv", ["backend.py", "dca", "--rounds", "1", "--out", str(out)])
    backend.main()
    rows = {row["way"]: row for row in json.loads(out.read_text())["results"]}
    assert list(rows) == ["plain", "source", "graph"] and rows["plain"]["over plain"] == 1
    assert all(row["first step"] > 0 and row["over plain"] > 0 for row in rows.values())
