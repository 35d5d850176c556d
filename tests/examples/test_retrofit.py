"""The retrofit example, with a few steps."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from typer.testing import CliRunner

import rewire

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.syspath_prepend(EXAMPLES)  # it imports train_lm
        spec = importlib.util.spec_from_file_location("retrofit_example", EXAMPLES / "retrofit.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)  # its dataclasses look their module up
        spec.loader.exec_module(module)

        @dataclasses.dataclass(frozen=True)
        class Config(module.Config):  # type: ignore[name-defined, misc]
            batch: int = 2
            validation_batch: int = 8

        monkeypatch.setattr(module, "Config", Config)
        yield module
        sys.modules.pop("train_lm", None)


@pytest.fixture(scope="module")
def out(example: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("retrofit") / "not there yet"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        example.main(steps=3, extra=7, topologies="dca,ancre-ingoing", layers=2, seed=0, out=out)
    finally:
        torch.set_num_threads(threads)
    return out


@pytest.fixture(scope="module")
def results(out: Path) -> dict[str, Any]:
    return json.loads((out / "results.json").read_text())


def test_everything_is_written(out: Path) -> None:
    assert {path.name for path in out.iterdir()} == {"checkpoint", "dca", "ancre-ingoing", "loss.png", "results.json"}
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_all_runs_start_as_the_checkpoint_and_then_differ(results: dict[str, Any]) -> None:
    runs = {name: run["validation"] for name, run in results["runs"].items()}
    assert list(runs) == ["plain", "dca", "ancre-ingoing"]
    for points in runs.values():
        assert [number for number, _ in points] == [0, 2, 3, 4, 5, 6, 7]
        assert points[0][1] == pytest.approx(runs["plain"][0][1], abs=1e-5)
        assert points[-1][1] < points[0][1] and all(math.isfinite(loss) for _, loss in points)
    assert runs["dca"][-1] != runs["plain"][-1]
    assert [run["connection_weights"] for run in results["runs"].values()][::2] == [0, 3]


def test_what_was_saved_gives_the_reported_loss(example: ModuleType, out: Path, results: dict[str, Any]) -> None:
    text = example.Text(example.Config(steps=3, seed=0, layers=2))
    plain = transformers.AutoModelForCausalLM.from_pretrained(out / "checkpoint")
    assert text.loss(plain) == pytest.approx(results["runs"]["plain"]["validation"][0][1], abs=1e-5)
    loaded = rewire.load(out / "dca", plain)
    assert text.loss(loaded) == pytest.approx(results["runs"]["dca"]["validation"][-1][1], abs=1e-5)


def test_the_table_shows_perplexities(example: ModuleType) -> None:
    run = {"validation": [(0, math.log(4.0)), (2, math.log(3.0))], "median_step_seconds": 0.01, "connection_weights": 5}
    better = run | {"validation": [(0, math.log(4.0)), (2, math.log(2.5))]}
    table = example.table_of({"plain": run, "dca": better}, 3)
    cells = [list(column.cells) for column in table.columns]
    assert cells[0] == ["3 + 0", "3 + 2", "step", "weights"]
    assert cells[1][:2] == ["4.0000", "3.0000"]
    assert cells[2][:2] == ["4.0000 (+0.0000)", "2.5000 (-0.5000)"]


def test_an_unknown_topology(example: ModuleType, tmp_path: Path) -> None:
    app = example.typer.Typer()
    app.command()(example.main)
    result = CliRunner().invoke(app, ["--topologies", "ancre", "--out", str(tmp_path)])
    assert result.exit_code == 2 and "no topology 'ancre'" in result.output
