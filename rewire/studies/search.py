"""The search for each contender's learning rate, and its runs with several seeds: Optuna studies in one storage."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rewire.errors import RewireError
from rewire.studies.contenders import Contender, Scales
from rewire.studies.task import Budget, Task
from rewire.studies.training import EVALUATIONS, Point, train
from rewire.version import how_to_install

if TYPE_CHECKING:
    import optuna

#: Neighbours that are tried of the best setting so far: factors on each of its values.
STEPS = {"rate": 2.0, "embedding": 4.0, "branch": 4.0}
#: Seconds after which a run on another machine that says nothing counts as dead.
_SILENT = 600.0

Setting = dict[str, float]
Tick = Callable[[float], object]


@dataclasses.dataclass(frozen=True)
class Result:
    """A run that ended: its setting, its curve, and whether the search stopped it early."""

    setting: Setting
    curve: list[Point]
    stopped: bool = False

    @property
    def loss(self) -> float:
        return math.inf if self.stopped else self.curve[-1].loss

    def __str__(self) -> str:
        last = self.curve[-1]
        return f"loss {last.loss:.4f} after {last.step} steps" + (", stopped early" if self.stopped else "")


class Trials:
    """The runs of one contender for one purpose, in a storage that outlives the process and may be shared.

    Several processes may work at it: a setting that another one is at is not taken a second time, unless that one was
    killed (on another machine: has been silent for ten minutes).
    """

    def __init__(self, name: str, storage: optuna.storages.BaseStorage) -> None:
        import optuna

        # Two runs to the end, and two thirds of this one, before it may be stopped: high rates look bad until late.
        pruner = optuna.pruners.MedianPruner(n_startup_trials=2, n_warmup_steps=2 * EVALUATIONS // 3)
        self._study = optuna.create_study(storage=storage, study_name=name, load_if_exists=True, pruner=pruner)

    @property
    def notes(self) -> dict[str, Any]:
        return self._study.user_attrs

    def note(self, name: str, value: Any) -> None:
        self._study.set_user_attr(name, value)

    def results(self) -> list[Result]:
        """The runs that ended, in the order in which they began."""
        return [
            Result(_setting(trial), [Point(*p) for p in trial.user_attrs["curve"]], trial.state.name == "PRUNED")
            for trial in self._study.trials
            if trial.state.name in ("COMPLETE", "PRUNED")
        ]

    def running(self) -> list[Setting]:
        """Settings that a living process is at."""
        return [_setting(trial) for trial in self._study.trials if trial.state.name == "RUNNING" and _alive(trial)]

    def run(self, setting: Setting, points: Iterator[Point], may_stop: bool) -> Result:
        """Record a run; on Ctrl-C or an error it does not count."""
        import optuna

        fixed: dict[str, optuna.distributions.BaseDistribution] = {
            name: optuna.distributions.FloatDistribution(value, value) for name, value in setting.items()
        }
        trial = self._study.ask(fixed)
        trial.set_user_attr("process", [socket.gethostname(), os.getpid()])
        curve, stopped = list[Point](), False
        try:
            for point in points:
                trial.set_user_attr("heard", time.time())
                curve.append(point)
                trial.report(point.loss, len(curve) - 1)
                if stopped := may_stop and trial.should_prune():
                    break
        except BaseException:
            self._study.tell(trial, state=optuna.trial.TrialState.FAIL)
            raise
        trial.set_user_attr("curve", curve)
        if stopped:
            self._study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        else:
            self._study.tell(trial, curve[-1].loss)
        return Result(setting, curve, stopped)


def _setting(trial: optuna.trial.FrozenTrial) -> Setting:
    return dict(trial.params)


def _alive(trial: optuna.trial.FrozenTrial) -> bool:
    """Whether the process of a run that did not end still works at it, as far as can be told from here."""
    host, process = trial.user_attrs.get("process", ("", 0))
    if host == socket.gethostname() and os.name == "posix":
        return process == os.getpid() or _exists(process)
    return time.time() - trial.user_attrs.get("heard", 0.0) < _SILENT


def _exists(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def best(results: Sequence[Result]) -> Result | None:
    """The run with the lowest loss, if one has a finite loss."""
    found = min(results, key=lambda result: result.loss, default=None)
    return found if found and found.loss < math.inf else None


def next_setting(start: Setting, results: Sequence[Result], busy: Sequence[Setting]) -> Setting | None:
    """What to try next; None where nothing is left to try.

    That is ``start``, then all neighbours of the best so far: with one value it climbs until both are worse. Where all
    runs diverged, it is a lower rate. A function of what is in the storage, so that a search goes on where it was.

    Args:
        busy: settings that other processes are at.
    """
    tried = [*(result.setting for result in results), *busy]
    centre = best(results)
    if centre:
        candidates = list(neighbours(centre.setting))
    else:
        lowest = min((setting["rate"] for setting in tried), default=start["rate"])
        candidates = [start, {**start, "rate": lowest / STEPS["rate"] ** 2}]
    return next((setting for setting in candidates if not any(_equal(setting, other) for other in tried)), None)


def neighbours(setting: Setting) -> Iterator[Setting]:
    for name, value in setting.items():
        for factor in (STEPS[name], 1 / STEPS[name]):
            yield {**setting, name: value * factor}


def _equal(a: Mapping[str, float], b: Mapping[str, float]) -> bool:
    return a.keys() == b.keys() and all(math.isclose(a[name], b[name], rel_tol=1e-6) for name in a)


@dataclasses.dataclass(frozen=True)
class Search:
    """How contenders are searched and run.

    Attributes:
        trials: runs at most in a search; a second one for each of the scales, where these are searched.
        seeds: how many runs are compared, with seeds 1, 2, ...; searches take seed 0.
        say: is called with a line about each run that ended.
    """

    task: Task
    budget: Budget
    storage: optuna.storages.BaseStorage
    trials: int
    seeds: int
    device: torch.device
    say: Callable[[str], object] = lambda line: None

    def tune(
        self,
        contender: Contender,
        start: Setting,
        scales: Scales,
        ticks: Callable[[str], Tick],
        known: Sequence[Result] = (),
    ) -> list[Result]:
        """All runs of the search; `best` tells the one that counts.

        Args:
            start: the setting that is tried first; its names are what is searched.
            scales: of the weights, where ``start`` has none of its own.
            ticks: a progress bar for a run, by what the run is.
            known: runs of the same model with such settings, which need not be repeated.
        """
        runs = Trials(f"{contender.name} | search", self.storage)
        while len(runs.results()) + len(runs.running()) < self.trials * len(start):
            setting = next_setting(start, [*known, *runs.results()], runs.running())
            if setting is None:
                break
            name = f"{contender.name}, {describe(setting)}"
            points = self._points(contender, setting, scales, 0, ticks(name))
            self.say(f"{name}: {runs.run(setting, points, may_stop=True)}")
        _wait(runs)
        return [*known, *runs.results()]

    def repeat(
        self, contender: Contender, setting: Setting, scales: Scales, ticks: Callable[[str], Tick]
    ) -> list[Result]:
        """Runs with that setting and seeds 1, 2, ..., in that order."""
        runs = Trials(f"{contender.name} | seeds", self.storage)
        for seed in range(1, self.seeds + 1):
            if not any(_equal(key, {"seed": seed}) for key in [*(r.setting for r in runs.results()), *runs.running()]):
                name = f"{contender.name}, seed {seed}"
                points = self._points(contender, setting, scales, seed, ticks(name))
                self.say(f"{name}: {runs.run({'seed': float(seed)}, points, may_stop=False)}")
        _wait(runs)
        by_seed = {result.setting["seed"]: result for result in runs.results()}
        return [by_seed[seed] for seed in sorted(by_seed)]

    def _points(self, contender: Contender, setting: Setting, scales: Scales, seed: int, tick: Tick) -> Iterator[Point]:
        found = dataclasses.replace(scales, **{name: value for name, value in setting.items() if name != "rate"})
        return train(self.task, contender, setting["rate"], found, seed, self.budget, self.device, tick)


def describe(setting: Setting) -> str:
    return ", ".join(f"{name} {value:.3g}" for name, value in setting.items())


def _wait(runs: Trials) -> None:
    """Until other processes have ended their runs."""
    while runs.running():
        time.sleep(1)


def open_storage(storage: str) -> optuna.storages.BaseStorage:
    """The storage at a URL (``sqlite:///study.db``), or the journal in a file of that path.

    Raises:
        ImportError: Optuna is missing.
        RewireError: the file is no journal.
    """
    try:
        import optuna
        from optuna.storages.journal import JournalFileBackend
    except ImportError as error:
        raise ImportError(f"studies need Optuna: {how_to_install('study')}.") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # what it says of each trial, the progress bars show
    if "://" in storage:
        return optuna.storages.RDBStorage(storage)
    if Path(storage).exists():
        with open(storage, "rb") as file:
            if not b'{"op_code"'.startswith(file.read(10)):
                raise RewireError(f"'{storage}' is a file, and no journal of a study: give another storage.")
    return optuna.storages.JournalStorage(JournalFileBackend(storage))


@contextlib.contextmanager
def opened(storage: str) -> Iterator[optuna.storages.BaseStorage]:
    """The storage that `open_storage` opens. Its connections to a database are closed at the end."""
    found = open_storage(storage)
    try:
        yield found
    finally:
        engine = getattr(found, "engine", None)  # of a database
        if engine is not None:
            found.remove_session()
            engine.dispose()
