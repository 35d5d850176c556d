from __future__ import annotations

import copy
import dataclasses
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import regression
import torch
from optuna.storages import InMemoryStorage
from regression import task
from torch import Tensor, nn
from typer.testing import CliRunner

import rewire
from rewire import cli
from rewire.errors import RewireError
from rewire.studies import report
from rewire.studies.contenders import PLAIN, Contender, parse
from rewire.studies.report import Study
from rewire.studies.run import _Plan
from rewire.studies.runs import Runs
from rewire.studies.task import Budget
from rewire.studies.training import Cost, Point, Result, Trial

TOPOLOGIES = ["skipinit", "ancre-ingoing:start=paper", "laurel-rw", "dca"]


def scaled_task() -> rewire.Task:
    """A task that skipinit is made for: a net of which only the scale of each branch is not known."""
    torch.manual_seed(5)
    plain = regression.model()
    true = rewire.compile(plain, "skipinit", validate=False)
    (connection,) = rewire.connections(true).values()
    connection.set_values({"scales": torch.tensor([4.0, 0.2, 2.0])})

    def model() -> nn.Module:
        student = copy.deepcopy(plain)
        for weight in student.parameters():
            weight.data += 0.02 * torch.randn_like(weight)
        return student

    def batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        return ((x, true(x).detach()) for x, _ in regression.batches(seed))

    validation = [(x, true(x).detach()) for x, _ in task.validation]
    return rewire.Task(model, batches, validation, regression.loss, learning_rate=1e-2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("study")


@pytest.fixture(scope="module")
def found(folder: Path) -> Iterator[Study]:
    """A study to which a difference of any size and p counts, of 2 seeds: so little is shown in 20 steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "LEVEL", 1.0)
        patch.setattr(report, "SMALLEST", 0.0)
        patch.setattr(report, "FEWEST", 2)
        options: dict[str, Any] = {"trials": 2, "seeds": 2, "finalists": 2, "device": "cpu", "progress": False}
        yield rewire.study(scaled_task(), TOPOLOGIES, steps=20, out=folder, **options)


def test_rows_are_ranked_and_compared_seed_by_seed(found: Study) -> None:
    names = [row.name for row in found.rows]
    assert set(names) >= {"residual", *TOPOLOGIES}
    compared = [row for row in found.rows if row.results]
    assert [row.mean for row in compared] == sorted(row.mean for row in compared)
    assert [[result.trial.seed for result in row.results] for row in compared] == [[2, 3]] * len(compared)
    assert sum(not row.is_plain for row in compared) == 2
    searches = {(row.is_plain, r.trial.seed, r.trial.length) for row in found.rows for r in row.searched}
    assert searches == {(plain, seed, 1.0) for plain in (True, False) for seed in (0, 1)}  # whole runs
    assert (
        names[-1] == "dca" and "attention" in found.row("dca").reason and found.verdict(found.row("dca")) == "not run"
    )
    assert [found.verdict(row) for row in found.rows].count("dropped") == 1
    assert found.verdict(found.baseline) == "baseline"
    row = next(row for row in compared if not row.is_plain)
    assert found.gain(row).values == [a - b for a, b in zip(found.baseline.losses, row.losses, strict=True)]


def test_rows_that_are_better_have_controls(found: Study) -> None:
    better = [row for row in found.rows if found.verdict(row) == "better"]
    assert better
    for row in better:
        assert {"start", "end"} <= set(row.controls) and len(row.longer) == 2
        assert found.in_its_time(row) is not None and found.learned(row) is not None
    assert all(not row.controls for row in found.rows if row not in better)
    (rate,) = {result.trial.setting.rate for result in better[0].longer}
    assert found.baseline.setting is not None and rate == found.baseline.setting.rate


def test_a_sentence_on_each_topology_and_scale(found: Study) -> None:
    findings = "\n".join(found.findings())
    for name in TOPOLOGIES:
        assert findings.count(f"{name}: ") == 1
    assert "Frozen where another run's ended, the model trained anew" in findings
    assert "Its weights moved by up to" in findings
    assert re.search(r"Scale of branch: best \S+ of .*\.", findings) and "Scale of embedding: " in findings


def test_what_was_found_is_an_initialiser(found: Study) -> None:
    model = rewire.compile(regression.model(), "laurel-rw", init=found.scales, validate=False)
    assert rewire.connections(model)


def test_the_files(found: Study, folder: Path) -> None:
    data = json.loads((folder / "study.json").read_text())
    assert [row["name"] for row in data["rows"]] == [row.name for row in found.rows]
    assert data["rows"][0]["losses"]["2"] == found.rows[0].losses[0]
    assert data["findings"] == found.findings() and data["about"]["steps"] == 20
    assert data["headline"] == found.headline()
    for name in ("curves.png", "differences.png", "rates.png", "weights.png"):
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
    assert len(sources) == 4 and all(source.startswith("data:image/png;base64,") for source in sources)
    assert not [tag for tag, attributes in seen if tag in ("script", "link") or "href" in attributes]
    for row in found.rows:
        assert row.name in texts
    assert texts.index(found.headline()) < texts.index("loss")  # first of all, the answer


def test_more_seeds_go_on_with_what_is_there(found: Study, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = next(row.name for row in found.rows if row.results and not row.is_plain)
    more = rewire.study(scaled_task(), [name], steps=20, trials=2, seeds=3, out=folder, device="cpu")
    assert more.row(name).losses[:2] == found.row(name).losses
    assert more.earlier == sorted({*TOPOLOGIES} - {name, "dca"})  # which fitted the model
    assert more.row(name).cost == found.row(name).cost
    printed = capsys.readouterr().err
    assert re.match(
        r"About \d+ runs, \d+ s on one process; controls .*, up to \d+ s more; seeds 0 to 1 for searches, 2 to", printed
    )
    assert len(re.findall(f"\n{name}, rate.*, seed 4: ", printed)) == 1
    assert not re.findall(f"\n{name}, rate.*, seed [0-3]: ", printed)


def test_another_budget_is_refused(found: Study, folder: Path) -> None:
    with pytest.raises(RewireError, match="this storage holds a study with"):
        rewire.study(scaled_task(), ["laurel-rw"], steps=21, out=folder, progress=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"clip": 2.0}, "'clip': 1.0"),
        ({"validation": [(torch.ones(8, 4), torch.ones(8, 1))]}, "a study of another task"),
        ({"batches": lambda seed: regression.batches(seed + 1)}, "a study of another task"),
    ],
)
def test_another_task_is_refused(found: Study, folder: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(RewireError, match=message):
        rewire.study(dataclasses.replace(scaled_task(), **change), ["laurel-rw"], steps=20, out=folder, progress=False)


def test_a_plain_model_that_never_trains(tmp_path: Path) -> None:
    broken = dataclasses.replace(task, loss=lambda model, batch: model(batch[0]).mean() * torch.nan)
    with pytest.raises(RewireError, match="no learning rate gave the plain model a finite loss"):
        rewire.study(broken, ["laurel-rw"], steps=5, trials=1, seeds=1, out=tmp_path, progress=False)


class Told(Runs):
    """Runs whose losses are told by a function in place of training."""

    def __init__(self, loss: Callable[[Contender, Trial], float]) -> None:
        super().__init__(task, Budget(20), InMemoryStorage(), torch.device("cpu"))
        self.loss = loss

    def cost(self, contender: Contender) -> Cost:
        return Cost(0.01, 1.5, 0, 0 if contender == PLAIN else 3)

    def results(self, contender: Contender, trials: Sequence[Trial], values: object = None) -> list[Result]:
        return [Result(t, [Point(0, 0.0, 2.0), Point(20, 1.0, self.loss(contender, t))]) for t in trials]


def planned(loss: Callable[[Contender, Trial], float]) -> Study:
    plan = _Plan(Told(loss), trials=7, seeds=5, finalists=2)
    return plan.run([plan.entry(parse("laurel-rw"))])


def test_one_plain_model_may_diverge() -> None:
    """On a seed that is compared; with other scales it does not, and is the baseline."""

    def loss(contender: Contender, trial: Trial) -> float:
        plain = trial.setting.branch == 1
        if plain and trial.seed == 3:
            return math.inf
        return 1 + 0.1 * plain + abs(math.log(trial.setting.rate / 0.02)) + abs(math.log(trial.setting.branch / 4)) / 9

    found = planned(loss)
    assert found.baseline.name == "residual, scaled" and found.verdict(found.row("residual")) == "diverged"
    with pytest.raises(RewireError, match="give the task a lower `clip`"):
        planned(lambda contender, trial: math.inf if trial.seed == 3 else abs(math.log(trial.setting.rate / 0.02)))


def test_a_topology_that_diverges_on_all_seeds_that_are_compared() -> None:
    def loss(contender: Contender, trial: Trial) -> float:
        if contender != PLAIN and trial.seed > 1:
            return math.inf
        return abs(math.log(trial.setting.rate / 0.02)) + abs(math.log(trial.setting.connections / 64))

    found = planned(loss)
    assert found.findings()[0].startswith("laurel-rw diverged on 5 of 5 seeds. Its search was cut short")
    assert found.best is None and found.lengths == {1.0: found.baseline.mean}


@pytest.mark.parametrize("numbers", [{"trials": 0}, {"seeds": 0}, {"finalists": 0}])
def test_numbers_that_make_no_sense(tmp_path: Path, numbers: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="1 or more"):
        rewire.study(task, steps=5, out=tmp_path, **numbers)  # type: ignore[arg-type]


@pytest.mark.slow
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
        *("regression:make_task", "--topologies", "laurel-rw", "--steps", "5", "--trials", "1", "--seeds", "1"),
        *("--out", str(tmp_path), "--device", "cpu"),
    )
    assert code == 0, output
    assert f"laurel-rw: nothing is shown by fewer than {report.FEWEST} seeds" in output
    assert "No difference shown" in output and "no evidence for larger ones" in output
    assert (tmp_path / "study.html").exists()
    # In a pipe, a line for each run.
    assert re.search(r"\nresidual, rate \S+, seed 0: loss \d\.\d{4} after 5 steps\n", output)
    assert re.search(r"\nlaurel-rw, rate .*, seed 2: loss \d\.\d{4} after 5 steps\n", output) and "\x1b" not in output


def test_what_was_found_as_json(tmp_path: Path) -> None:
    options = ("--topologies", "laurel-rw", "--steps", "5", "--trials", "1", "--seeds", "2", "--device", "cpu")
    result = CliRunner().invoke(cli.app, ["study", "regression:make_task", *options, "--out", str(tmp_path), "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == json.loads((tmp_path / "study.json").read_text())


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("regression:task",), "give the length of each run: --steps or --seconds"),
        (("regression", "--steps", "5"), "does not name a task"),
        (("regression:model", "--steps", "5"), "not a rewire.Task"),
        (("regression:task", "--steps", "5", "--topologies", "laurel-rw:total"), "name=value"),
        (("regression:task", "--steps", "5", "--seconds", "-1"), "positive number"),
        (("regression:task", "--steps", "5", "--topologies", "laurel-rx"), "no topology 'laurel-rx'. Did you mean"),
        (("regression:task", "--steps", "5", "--topologies", "laurel-rw:totl=1"), "has no option 'totl': it takes"),
        (("regression:task", "--steps", "5", "--topologies", "laurel-rw:start=papr"), "start must be 'preserve' or"),
        (("regression:task", "--steps", "5", "--topologies", "laurel-rw:init=idini"), "no initialiser 'idini'"),
        (("regression:task", "--steps", "5", "--out", "/dev/null/study"), "/dev/null/study"),
    ],
)
def test_commands_that_name_nothing(args: tuple[str, ...], message: str, tmp_path: Path) -> None:
    code, output = run(*(() if "--out" in args else ("--out", str(tmp_path))), *args)
    assert code == 1 and message in output and "loss" not in output  # before anything runs


@pytest.mark.slow
def test_the_task_of_the_guide_trains(tmp_path: Path) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "studies.md").read_text()
    code = guide.split("```python\n")[1].split("```")[0]
    file = tmp_path / "my_module.py"  # a file: the source of its forwards is edited
    file.write_text(code)
    names: dict[str, Any] = {}
    exec(compile(code, str(file), "exec"), names)
    found = rewire.study(names["task"], ["laurel-rw"], steps=10, trials=1, seeds=1, out=tmp_path, progress=False)
    assert found.row("laurel-rw").losses


def test_a_single_name_and_the_plain_model_that_always_runs(tmp_path: Path) -> None:
    found = rewire.study(task, "residual", steps=2, trials=1, seeds=1, out=tmp_path, progress=False)
    assert all(row.is_plain for row in found.rows) and len({row.name for row in found.rows}) == len(found.rows)
