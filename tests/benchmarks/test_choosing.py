"""The tasks of docs/choosing.md train, plain and rewired."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torchvision_stub  # noqa: F401

from rewire.studies.contenders import Scales, parse
from rewire.studies.task import Budget
from rewire.studies.training import train

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "choosing"))

import tasks


@pytest.mark.parametrize("name", ["language_model", "vision_transformer", "deep_mlp"])
def test_a_task_trains(name: str) -> None:
    points = train(getattr(tasks, name)(), parse("laurel-rw"), 1e-3, Scales(), 1, Budget(steps=10), torch.device("cpu"))
    first, *_, last = points
    assert last.step == 10 and last.loss < first.loss
