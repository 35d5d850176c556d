from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from regression import task

import rewire
from rewire.errors import RewireError
from rewire.studies.contenders import PLAIN, parse
from rewire.studies.runs import Kept, Runs, open_storage
from rewire.studies.task import Budget
from rewire.studies.training import Result, Setting, Trial

HERE = Path(__file__).parent.parent
TRIAL = Trial(Setting(0.01), 3)


def runs(folder: Path, **more: object) -> Runs:
    storage = open_storage(str(folder / "journal.log"))
    return Runs(task, Budget(steps=20), storage, torch.device("cpu"), **more)  # type: ignore[arg-type]


def test_what_is_in_the_storage_is_not_run_again(tmp_path: Path) -> None:
    first = runs(tmp_path).results(parse("laurel-rw"), [TRIAL])
    said: list[str] = []
    other = Trial(Setting(0.01, connections=4.0), 3)
    again = runs(tmp_path, say=said.append).results(parse("laurel-rw"), [other, TRIAL])
    assert again[1] == first[0] and again[1].moves and again[1].matrix
    assert again[0].trial == other and again[0].loss != again[1].loss
    assert len(said) == 1 and said[0].startswith("laurel-rw, rate 0.01, connections x 4, seed 3: loss ")


def test_a_longer_run_is_another_one(tmp_path: Path) -> None:
    one, two = runs(tmp_path).results(PLAIN, [TRIAL, Trial(TRIAL.setting, TRIAL.seed, 1.5)])
    assert (one.curve[-1].step, two.curve[-1].step) == (20, 30)
    assert one.curve[0] == two.curve[0]


def test_an_error_leaves_no_run_behind(tmp_path: Path) -> None:
    def interrupted(spent: float) -> None:
        raise KeyboardInterrupt

    some = runs(tmp_path, bar=lambda name: interrupted)
    with pytest.raises(KeyboardInterrupt):
        some.results(PLAIN, [TRIAL])
    kept = Kept("residual", some.storage)
    assert kept.results() == kept.running() == []


def test_what_another_process_is_at_is_not_begun(tmp_path: Path) -> None:
    kept = Kept("residual", open_storage(str(tmp_path / "journal.log")))
    with kept.recorded(TRIAL):
        number, storage = kept._study.trials[0]._trial_id, kept._study._storage
        storage.set_trial_user_attr(number, "process", ["elsewhere", 1, time.time()])
        assert kept.running() == [TRIAL]
        for host in ("elsewhere", socket.gethostname()):  # here, the number is another process's by now
            storage.set_trial_user_attr(number, "process", [host, os.getppid(), time.time() - 601])
            assert kept.running() == []
        storage.set_trial_user_attr(number, "process", [socket.gethostname(), os.getppid(), time.time()])
        assert kept.running() == [TRIAL]


def test_a_run_that_diverges_has_an_infinite_loss(tmp_path: Path) -> None:
    (found,) = runs(tmp_path).results(PLAIN, [Trial(Setting(1e30), 0)])
    assert found.loss == math.inf


def test_weights_are_held_where_the_donor_ended(tmp_path: Path) -> None:
    some, contender, donor = runs(tmp_path), parse("ancre-ingoing"), Trial(Setting(0.01, connections=4.0), 0)
    trials = [Trial(donor.setting, seed) for seed in (1, 2)]
    start, end, rule = (some.control(contender, held, trials, donor) for held in ("start", "end", "rule"))  # type: ignore[arg-type]
    assert start and end and rule
    plain, learned = some.results(PLAIN, trials), some.results(contender, [*trials, donor])
    assert [run.loss for run in start] == pytest.approx([run.loss for run in plain], rel=1e-4)
    losses = [[run.loss for run in each] for each in (start, end, rule, learned[:2])]
    assert all(a != b for n, a in enumerate(losses) for b in losses[:n])
    assert end[0].moves is None
    # The donor was trained anew, and got to where it was.
    (matrix,) = rewire.coefficients(some._ends["ancre-ingoing"]).values()
    assert matrix.tolist() == learned[2].matrix
    assert some.control(parse("denseformer"), "rule", trials, donor) is None


def test_a_file_that_is_no_journal(tmp_path: Path) -> None:
    (tmp_path / "journal.log").write_text("not a journal\n")
    with pytest.raises(RewireError, match="no journal"):
        runs(tmp_path)


def test_a_line_that_was_cut_off_is_lost_alone(tmp_path: Path) -> None:
    """As by a disk that was full; what was written next was glued to it, and nothing could be read any more."""
    first = runs(tmp_path).results(PLAIN, [TRIAL])
    with open(tmp_path / "journal.log", "a") as journal:
        journal.write('{"op_code":6,"wor')
    other = dataclasses.replace(TRIAL, seed=4)
    runs(tmp_path).results(PLAIN, [other])
    said: list[str] = []
    assert runs(tmp_path, say=said.append).results(PLAIN, [TRIAL, other])[0] == first[0] and not said


def test_storages_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(RewireError, match="cannot be opened as a journal"):
        open_storage(str(tmp_path))
    with pytest.raises(RewireError, match="cannot be opened as a database"):
        open_storage("nonsense://study")
    open_storage(str(tmp_path / "new" / "journal.log"))


@pytest.mark.slow
def test_a_study_goes_on_after_a_kill(tmp_path: Path) -> None:
    """A process is killed in a run; what it was at counts as free, what it had ended stays."""
    code = (
        "import rewire, regression, sys\n"
        "rewire.study(regression.task, ['laurel-rw'], steps=100, trials=2, seeds=2, out=sys.argv[1], progress=False)"
    )
    environment = {**os.environ, "PYTHONPATH": f"{HERE}{os.pathsep}{Path.cwd()}"}
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], env=environment)
    deadline = time.time() + 100
    while time.time() < deadline and not _ended(tmp_path, "residual"):
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = _ended(tmp_path, "residual")
    assert kept
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environment, check=True)
    assert _ended(tmp_path, "residual")[: len(kept)] == kept
    assert {run.trial.seed for run in _ended(tmp_path, "laurel-rw")} == {0, 1, 2, 3}
    assert (tmp_path / "study.html").exists()


def _ended(folder: Path, name: str) -> list[Result]:
    if not (folder / "journal.log").exists():
        return []
    return Kept(name, open_storage(str(folder / "journal.log"))).results()


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
    ended = [run.trial for run in _ended(tmp_path, "laurel-rw")]
    assert {trial.seed for trial in ended} == {0, 1, 2, 3, 4}
    assert len(ended) <= len(set(ended)) + 2  # two may begin the same in the same moment, not more
    a, b = (json.loads((tmp_path / name / "study.json").read_text())["rows"] for name in "ab")
    assert [(row["name"], row["losses"]) for row in a] == [(row["name"], row["losses"]) for row in b]


def test_contenders_are_parsed() -> None:
    contender = parse("ancre-ingoing:start=paper:temperature=0.5:cascade=keep")
    assert contender.settings == {
        "topology": "ancre-ingoing",
        "start": "paper",
        "temperature": 0.5,
        "cascade": "keep",
    }
    assert not contender.starts_plain and parse("muddformer").starts_plain
    assert contender.holding("end").name.endswith(", held at the end of another run")
    with pytest.raises(ValueError, match="name=value"):
        parse("muddformer:scaled")
