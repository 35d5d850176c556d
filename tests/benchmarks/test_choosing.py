"""The tasks of docs/choosing.md train, plain and rewired; of those whose answer is known, a study gives it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torchvision_stub  # noqa: F401

from rewire.studies.contenders import PLAIN, parse
from rewire.studies.task import Budget
from rewire.studies.training import Setting, Trial, train

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "choosing"))

import known
import tasks


@pytest.mark.parametrize(
    "name",
    [
        *("language_model", "deep_mlp"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("vision_transformer", "deep_language_model")),
    ],
)
def test_a_task_trains(name: str) -> None:
    trial = Trial(Setting(1e-3), 1)
    found, _ = train(getattr(tasks, name)(), parse("laurel-rw"), trial, Budget(steps=10), torch.device("cpu"))
    assert found.curve[-1].step == 10 and found.loss < found.curve[0].loss


@pytest.mark.slow
@pytest.mark.parametrize("kind", known.FAMILIES)
def test_a_study_names_the_true_family(kind: str) -> None:
    """Of the first teacher of each kind; `known.py` has twenty."""
    found = known.answer((kind, 0, 100, 6))
    assert found["outcome"] == "right", found


@pytest.mark.parametrize("kind", known.FAMILIES)
def test_only_the_true_connections_give_the_teachers_outputs(kind: str) -> None:
    task = known.task(kind, 1)
    plain, true = known.teacher(kind, 1)
    with torch.no_grad():
        assert task.loss(true, task.validation[0]) < 1e-10
        assert (task.loss(plain, task.validation[0]) < 1e-3) == (kind == "plain")
    trial = Trial(Setting(task.learning_rate), 0)
    found, _ = train(task, PLAIN, trial, Budget(steps=20), torch.device("cpu"))
    assert found.loss < found.curve[0].loss


def test_what_an_answer_is_worth() -> None:
    assert known.outcome("plain", None) == "right" and known.outcome("skips", None) == "no difference"
    assert known.outcome("skips", "ancre-ingoing") == "right"
    assert known.outcome("skips", "attnres") == known.outcome("plain", "attnres") == "wrong"


@pytest.mark.slow
def test_processes_share_the_runs_of_a_grid(tmp_path: Path) -> None:
    """Each has its contender; called again, the script makes no run twice."""
    root = Path(__file__).parents[2]
    command = [sys.executable, str(root / "benchmarks/choosing/grid.py"), "--out", str(tmp_path), "--each", "1"]
    command += ["--steps", "4", "--seeds", "2", "--layers", "2", "--width", "32", "--length", "16", "--batch", "2"]
    command += ["--contenders", "denseformer"]
    first, again = (subprocess.run(command, cwd=root, capture_output=True, text=True) for _ in range(2))
    assert first.returncode == again.returncode == 0, first.stderr + again.stderr
    study = json.loads((tmp_path / "study.json").read_text())
    assert {row["name"] for row in study["rows"]} == {"residual, scaled", "denseformer"}
    assert study["about"]["longer"] == 1.25 and "after 4 steps" in first.stdout and "after" not in again.stdout
