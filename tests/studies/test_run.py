from __future__ import annotations

import dataclasses
import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from regression import task
from typer.testing import CliRunner

import rewire
from rewire import cli
from rewire.errors import RewireError
from rewire.studies.report import Study

TOPOLOGIES = ["laurel-rw", "ancre-ingoing:start=paper", "dca"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("study")


@pytest.fixture(scope="module")
def found(folder: Path) -> Study:
    return rewire.study(task, TOPOLOGIES, steps=40, trials=2, seeds=2, out=folder, device="cpu", progress=False)


def test_rows_are_ranked_and_have_their_controls(found: Study) -> None:
    names = [row.name for row in found.rows]
    assert set(names) >= {"residual", *TOPOLOGIES, "ancre-ingoing:start=paper, frozen", "laurel-rw, still"}
    means = [row.mean for row in found.rows]
    assert means == sorted(means)
    assert names[-1] == "dca" and "attention" in found.row("dca").reason
    assert {row.name: len(row.runs) for row in found.rows if len(row.runs) != 2} == {"dca": 0, "laurel-rw, still": 1}
    (gain,) = found.gains(found.row("laurel-rw, still"))
    assert abs(gain) < 1e-3 * found.baseline.mean
    assert found.baseline.mean == min(row.mean for row in found.rows if row.name.startswith("residual"))


def test_gains_are_by_seed(found: Study) -> None:
    row = found.row("laurel-rw")
    assert found.gains(row) == [a - b for a, b in zip(found.baseline.losses, row.losses, strict=True)]
    assert found.gains(found.baseline) == [0, 0]


def test_a_sentence_on_each_topology(found: Study) -> None:
    findings = "\n".join(found.findings())
    for name in TOPOLOGIES:
        assert findings.count(f"{name} ") + findings.count(f"{name}:") >= 1
    assert "With its weights frozen it ends at" in findings
    assert re.search(r"stand still, where it is the plain model, it ends [+-]0\.000\d from that", findings)


def test_learned_and_frozen_runs_differ(found: Study) -> None:
    name = "ancre-ingoing:start=paper"
    assert found.row(name).losses != found.row(f"{name}, frozen").losses
    assert [run.curve[0] for run in found.row(name).runs] == [run.curve[0] for run in found.row(f"{name}, frozen").runs]


def test_the_files(found: Study, folder: Path) -> None:
    data = json.loads((folder / "study.json").read_text())
    assert [row["name"] for row in data["rows"]] == [row.name for row in found.rows]
    assert data["rows"][0]["losses"]["1"] == found.rows[0].losses[0]
    assert data["findings"] == found.findings() and data["about"]["steps"] == 40
    for name in ("curves.png", "differences.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")


def test_the_page_stands_alone(found: Study, folder: Path) -> None:
    seen: list[tuple[str, dict[str, str | None]]] = []
    texts: list[str] = []

    class Parser(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            seen.append((tag, dict(attrs)))

        def handle_data(self, data: str) -> None:
            texts.append(data)

    Parser().feed((folder / "study.html").read_text())
    sources = [attributes["src"] for tag, attributes in seen if tag == "img"]
    assert len(sources) == 2 and all(source.startswith("data:image/png;base64,") for source in sources)
    assert not [tag for tag, attributes in seen if tag in ("script", "link") or "href" in attributes]
    for row in found.rows:
        assert row.name in texts


def test_another_topology_goes_on_with_what_is_there(found: Study, folder: Path) -> None:
    more = rewire.study(
        task, ["laurel-rw", "layerscale"], steps=40, trials=2, seeds=2, out=folder, device="cpu", progress=False
    )
    assert more.row("laurel-rw").losses == found.row("laurel-rw").losses
    assert more.row("laurel-rw").cost == found.row("laurel-rw").cost
    assert len(more.row("layerscale").runs) == 2


def test_another_budget_is_refused(found: Study, folder: Path) -> None:
    with pytest.raises(RewireError, match="this storage holds a study with"):
        rewire.study(task, ["laurel-rw"], steps=41, out=folder, progress=False)


def test_a_plain_model_that_never_trains(tmp_path: Path) -> None:
    broken = dataclasses.replace(task, loss=lambda model, batch: model(batch[0]).mean() * torch.nan)
    with pytest.raises(RewireError, match="no learning rate gave the plain model a finite loss"):
        rewire.study(broken, ["laurel-rw"], steps=5, trials=1, seeds=1, out=tmp_path, progress=False)


@pytest.mark.parametrize("numbers", [{"trials": 0}, {"seeds": 0}])
def test_numbers_that_make_no_sense(tmp_path: Path, numbers: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="1 or more"):
        rewire.study(task, steps=5, out=tmp_path, **numbers)  # type: ignore[arg-type]


def test_a_database(tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path / 'study.db'}"
    found = rewire.study(
        task, [], steps=20, trials=1, seeds=1, out=tmp_path / "out", storage=storage, device="cpu", progress=False
    )
    assert found.baseline.losses and (tmp_path / "study.db").exists()
    files = [os.path.realpath(file) for file in Path("/proc/self/fd").glob("*")]
    assert str(tmp_path / "study.db") not in files  # closed


def run(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, ["study", *args])
    return result.exit_code, result.output


def test_the_command(tmp_path: Path) -> None:
    code, output = run(
        *("regression:make_task", "--topologies", "laurel-rw", "--steps", "20", "--trials", "1", "--seeds", "1"),
        *("--out", str(tmp_path), "--device", "cpu"),
    )
    assert code == 0, output
    assert "laurel-rw ends" in output and "no evidence for larger ones" in output
    assert (tmp_path / "study.html").exists()
    # In a pipe, a line for each run.
    assert re.search(r"^residual, rate \S+: loss \d\.\d{4} after 20 steps\n", output)
    assert re.search(r"\nlaurel-rw, seed 1: loss \d\.\d{4} after 20 steps\n", output) and "\x1b" not in output


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("regression:task",), "Give --steps or --seconds"),
        (("regression", "--steps", "5"), "names no task"),
        (("regression:model", "--steps", "5"), "not a rewire.Task"),
        (("regression:task", "--steps", "5", "--topologies", "laurel-rw:total"), "name=value"),
        (("regression:task", "--steps", "5", "--seconds", "-1"), "positive number"),
    ],
)
def test_commands_that_name_nothing(args: tuple[str, ...], message: str, tmp_path: Path) -> None:
    code, output = run(*args, "--out", str(tmp_path))
    assert code == 1 and message in output


def test_the_task_of_the_guide_trains(tmp_path: Path) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "studies.md").read_text()
    code = guide.split("```python\n")[1].split("```")[0]
    file = tmp_path / "my_module.py"  # a file: the source of its forwards is edited
    file.write_text(code)
    names: dict[str, Any] = {}
    exec(compile(code, str(file), "exec"), names)
    found = rewire.study(names["task"], ["laurel-rw"], steps=10, trials=1, seeds=1, out=tmp_path, progress=False)
    assert found.row("laurel-rw").losses
