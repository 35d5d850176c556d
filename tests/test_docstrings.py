"""What the public docstrings show runs as it stands."""

from __future__ import annotations

import copy
import doctest
from pathlib import Path

import pytest
import regression
import torch
from models import PreNorm
from torch import nn

import rewire

PUBLIC = [
    name
    for name in rewire.__all__
    if not (isinstance(value := getattr(rewire, name), type) and issubclass(value, Exception))
]

#: Those whose examples take long: they compile kernels, and train models.
LONG = {"precompile", "study"}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(PreNorm(), PreNorm(), PreNorm())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.blocks(x)
        return y


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in LONG else ()) for name in PUBLIC]
)
def test_its_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model, x = Net().eval(), torch.randn(2, 5, 32)
    rewired = rewire.compile(model, "ancre-ingoing", granularity="sublayer", validate=False)
    given = {"rewire": rewire, "copy": copy, "torch": torch, "nn": nn, "model": model, "rewired": rewired, "x": x}
    given |= {"Block": regression.Block, "task": regression.task}
    tests = doctest.DocTestFinder(recurse=False).find(getattr(rewire, name), name, globs=given)
    assert tests and tests[0].examples, f"rewire.{name} has no example"
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    said: list[str] = []
    for test in tests:
        runner.run(test, out=said.append)
    assert runner.failures == 0, "".join(said)
