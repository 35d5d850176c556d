from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from regression import task

from rewire.errors import RewireError
from rewire.studies.contenders import PLAIN, Scales, parse
from rewire.studies.search import Result, Search, Trials, best, next_setting, open_storage
from rewire.studies.task import Budget
from rewire.studies.training import Point

HERE = Path(__file__).parent.parent


def result(loss: float, **setting: float) -> Result:
    return Result(setting, [Point(1, 1.0, loss)])


def climb(start: dict[str, float], loss: object, limit: int = 100) -> list[Result]:
    """A search on a function instead of runs."""
    results: list[Result] = []
    while len(results) < limit and (setting := next_setting(start, results, [])):
        results.append(result(loss(setting), **setting))  # type: ignore[operator]
    return results


def test_a_rate_is_climbed_until_both_neighbours_are_worse() -> None:
    results = climb({"rate": 0.001}, lambda setting: abs(math.log(setting["rate"] / 0.009)))
    assert [round(each.setting["rate"], 6) for each in results] == [0.001, 0.002, 0.004, 0.008, 0.016]
    assert best(results).setting == {"rate": 0.008}


def test_scales_are_searched_along_each_axis() -> None:
    wanted = {"rate": 0.002, "embedding": 16.0, "branch": 0.25}
    results = climb(
        {"rate": 0.001, "embedding": 1.0, "branch": 1.0},
        lambda setting: sum(abs(math.log(setting[name] / value)) for name, value in wanted.items()),
    )
    assert best(results).setting == pytest.approx(wanted)


def test_lower_rates_are_tried_while_all_diverge() -> None:
    results = climb({"rate": 0.16}, lambda setting: 1.0 if setting["rate"] < 0.02 else math.inf, limit=6)
    assert [each.setting["rate"] for each in results] == [0.16, 0.04, 0.01, 0.02, 0.005]
    assert best(results[:2]) is None


def test_what_another_process_is_at_is_not_taken() -> None:
    assert next_setting({"rate": 1.0}, [], [{"rate": 1.0}]) == {"rate": 0.25}
    assert next_setting({"rate": 1.0}, [result(2.0, rate=1.0)], [{"rate": 2.0}]) == {"rate": 0.5}


def search(folder: Path, **changes: object) -> Search:
    settings = {"trials": 2, "seeds": 2, "device": torch.device("cpu")} | changes
    return Search(task, Budget(steps=20), open_storage(str(folder / "journal.log")), **settings)  # type: ignore[arg-type]


def ignore(name: str) -> object:
    return lambda spent: None


def test_what_is_in_the_storage_is_not_run_again(tmp_path: Path) -> None:
    first = search(tmp_path).repeat(PLAIN, {"rate": 0.01}, Scales(), ignore)
    names: list[str] = []

    def note(name: str) -> object:
        names.append(name)
        return ignore(name)

    again = search(tmp_path, seeds=3).repeat(PLAIN, {"rate": 0.01}, Scales(), note)
    assert names == ["residual, seed 3"]
    assert again[:2] == first
    assert len({run.loss for run in again}) == 3


def test_what_is_known_is_not_run_again(tmp_path: Path) -> None:
    known = [result(0.5, rate=0.01), result(0.4, rate=0.02)]
    runs = search(tmp_path).tune(PLAIN, {"rate": 0.01}, Scales(), ignore, known)
    assert runs[:2] == known
    assert runs[2].setting == {"rate": 0.04}


def test_an_error_leaves_no_run_behind(tmp_path: Path) -> None:
    runs = Trials("some", search(tmp_path).storage)

    def points() -> object:
        yield Point(0, 0.0, 1.0)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runs.run({"rate": 1.0}, points(), may_stop=False)  # type: ignore[arg-type]
    assert runs.results() == runs.running() == []


def test_a_run_that_diverges_has_an_infinite_loss(tmp_path: Path) -> None:
    runs = search(tmp_path).tune(PLAIN, {"rate": 1e30}, Scales(), ignore)
    assert [run.loss for run in runs] == [math.inf] * 2 and best(runs) is None


def test_a_bad_run_is_stopped_after_two_that_were_better(tmp_path: Path) -> None:
    runs = Trials("some", search(tmp_path).storage)
    losses = [1.0, 1.0, 5.0]
    ended = [
        runs.run({"rate": float(n)}, (Point(k, 0.0, loss) for k in range(21)), may_stop=True)
        for n, loss in enumerate(losses)
    ]
    assert [each.stopped for each in ended] == [False, False, True]
    assert len(ended[2].curve) == 14 and ended[2].loss == math.inf
    assert [each.stopped for each in runs.results()] == [False, False, True]


@pytest.mark.slow
def test_a_study_goes_on_after_a_kill(tmp_path: Path) -> None:
    """A process is killed in a run; what it was at counts as free, what it had ended stays."""
    code = (
        "import rewire, regression, sys\n"
        "rewire.study(regression.task, ['laurel-rw'], steps=100, trials=2, seeds=1, out=sys.argv[1], progress=False)"
    )
    environment = {**os.environ, "PYTHONPATH": f"{HERE}{os.pathsep}{Path.cwd()}"}
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], env=environment)
    plain = "residual | search"
    deadline = time.time() + 100
    while time.time() < deadline and not _ended(tmp_path, plain):
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = _ended(tmp_path, plain)
    assert kept
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environment, check=True)
    assert _ended(tmp_path, plain)[: len(kept)] == kept
    assert len(_ended(tmp_path, "laurel-rw | seeds")) == 1
    assert (tmp_path / "study.html").exists()


def _ended(folder: Path, name: str) -> list[Result]:
    if not (folder / "journal.log").exists():
        return []
    return Trials(name, open_storage(str(folder / "journal.log"))).results()


@pytest.mark.slow
def test_two_processes_share_the_work(tmp_path: Path) -> None:
    code = (
        "import rewire, regression, sys\n"
        "rewire.study(regression.task, ['laurel-rw'], steps=60, trials=1, seeds=3, out=sys.argv[1],\n"
        "             storage=sys.argv[2], progress=False)"
    )
    environment = {**os.environ, "PYTHONPATH": f"{HERE}{os.pathsep}{Path.cwd()}"}
    storage = tmp_path / "journal.log"
    both = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path / name), str(storage)], env=environment)
        for name in "ab"
    ]
    assert [process.wait(timeout=200) for process in both] == [0, 0]
    runs = _ended(tmp_path, "laurel-rw | seeds")
    assert {run.setting["seed"] for run in runs} == {1, 2, 3}
    assert len(runs) <= 4  # two may begin the same in the same moment, not more
    a, b = (json.loads((tmp_path / name / "study.json").read_text())["rows"] for name in "ab")
    assert [(row["name"], row["losses"]) for row in a] == [(row["name"], row["losses"]) for row in b]


def test_a_file_that_is_no_journal(tmp_path: Path) -> None:
    (tmp_path / "journal.log").write_text("not a journal\n")
    with pytest.raises(RewireError, match="no journal"):
        search(tmp_path)


def test_contenders_are_parsed() -> None:
    contender = parse("ancre-ingoing:start=paper:temperature=0.5:cascade=keep")
    assert contender.settings == {
        "topology": "ancre-ingoing",
        "start": "paper",
        "temperature": 0.5,
        "cascade": "keep",
    }
    assert contender.control.held == "frozen" and contender.control.control is None
    assert parse("muddformer").control.held == "still" and parse("muddformer").control.control is None
    with pytest.raises(ValueError, match="name=value"):
        parse("muddformer:scaled")
