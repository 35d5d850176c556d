"""The runs of a study, each made once: Optuna studies in a storage that outlives the process and can be shared."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rewire.diagnostics.moves import Moves
from rewire.errors import RewireError
from rewire.runtime.connection import connections
from rewire.studies.contenders import PLAIN, Contender, Held, Values
from rewire.studies.rules import fixed_rule
from rewire.studies.task import Budget, Task
from rewire.studies.training import Cost, Point, Result, Setting, Trial, cost, make, train
from rewire.version import how_to_install

if TYPE_CHECKING:
    import optuna

#: Seconds without a sign of life after which a run on another machine counts as dead.
_SILENT = 600.0

Tick = Callable[[float], object]


@dataclasses.dataclass
class Runs:
    """Makes the runs that are not in the storage yet.

    Several processes may share a storage. A run that another process works on is not started a second time, unless that
    process was killed, or has been silent for ten minutes.

    Attributes:
        say: called with a line about each run that ended.
        bar: makes a progress bar for a run, from its description.
    """

    task: Task
    budget: Budget
    storage: optuna.storages.BaseStorage
    device: torch.device
    say: Callable[[str], object] = lambda line: None
    bar: Callable[[str], Tick] = lambda name: lambda spent: None

    def __post_init__(self) -> None:
        self._ends: dict[str, nn.Module] = {}

    def results(
        self, contender: Contender, trials: Sequence[Trial], values: Callable[[], Values | None] = lambda: None
    ) -> list[Result]:
        """The results of the runs ``trials``, in that order.

        Args:
            values: called before a run is made: its connection weights at the start, or None for the topology's own.
        """
        kept = Kept(contender.name, self.storage)
        while True:
            done = {result.trial: result for result in kept.results()}
            missing = [trial for trial in trials if trial not in done]
            if not missing:
                return [done[trial] for trial in trials]
            busy = kept.running()
            free = next((trial for trial in missing if trial not in busy), None)
            if free is None:
                time.sleep(1)  # other processes work on all of them
            else:
                name = f"{contender.name}, {free.setting}, seed {free.seed}"
                name += f", {free.length:.3g} x as long" if free.length != 1 else ""
                self.say(f"{name}: {self._run(kept, contender, free, values(), name)}")

    def control(self, contender: Contender, held: Held, trials: Sequence[Trial], donor: Trial) -> list[Result] | None:
        """The runs with connection weights that are held; None for a fixed rule if none is known.

        The donor's final weights are not stored, as they may be large: it is trained again, once.
        """
        if held == "rule" and self._rule(make(self.task, contender, donor, self.device)) is None:
            return None

        def values() -> Values | None:
            if held == "start":
                return None
            if contender.name not in self._ends:
                tick = _rare(self.bar(f"{contender.name}, seed {donor.seed} again, for its weights"))
                _, ended = train(self.task, contender, donor, self.budget, self.device, tick=tick)
                self._ends[contender.name] = ended
            model = self._ends[contender.name]
            found = {trunk: connection.values() for trunk, connection in connections(model).items()}
            return found if held == "end" else self._rule(model)

        return self.results(contender.holding(held), trials, values)

    def cost(self, contender: Contender) -> Cost:
        """The cost of a step, measured once and then kept with the runs."""
        kept = Kept(contender.name, self.storage)
        if "cost" not in kept.notes:
            kept.note("cost", cost(self.task, contender, self.device))
        return Cost(*kept.notes["cost"])

    def entered(self) -> set[str]:
        """The topologies in this storage, also from earlier calls: those for which a step's cost was measured."""
        import optuna

        names = optuna.get_all_study_names(self.storage)
        return {name for name in names if name != PLAIN.name and "cost" in Kept(name, self.storage).notes}

    def _rule(self, model: nn.Module) -> Values | None:
        rules = {trunk: fixed_rule(connection) for trunk, connection in connections(model).items()}
        known = {trunk: rule for trunk, rule in rules.items() if rule is not None}
        return known if len(known) == len(rules) else None

    def _run(self, kept: Kept, contender: Contender, trial: Trial, values: Values | None, name: str) -> Result:
        tick = self.bar(name)
        with kept.recorded(trial) as record:

            def heard(spent: float) -> None:
                record.hear()
                tick(spent)

            result, _ = train(self.task, contender, trial, self.budget, self.device, values, _rare(heard))
            record.end(result)
        return result


def _rare(tick: Tick) -> Tick:
    """``tick``, called no more often than a person can see."""
    last = 0.0

    def called(spent: float) -> None:
        nonlocal last
        if (now := time.perf_counter()) - last > 0.2:
            last = now
            tick(spent)

    return called


class Kept:
    """The runs of one contender, and notes on it, in a storage."""

    def __init__(self, name: str, storage: optuna.storages.BaseStorage) -> None:
        import optuna

        self._study = optuna.create_study(storage=storage, study_name=name, load_if_exists=True)

    @property
    def notes(self) -> dict[str, Any]:
        return self._study.user_attrs

    def note(self, name: str, value: object) -> None:
        self._study.set_user_attr(name, value)

    def results(self) -> list[Result]:
        """The runs that ended, in the order of their starts."""
        return [_result(trial) for trial in self._trials() if trial.state.name == "COMPLETE"]

    def running(self) -> list[Trial]:
        """The runs that a living process works on."""
        return [_trial(trial) for trial in self._trials() if trial.state.name == "RUNNING" and _alive(trial)]

    def _trials(self) -> list[optuna.trial.FrozenTrial]:
        return self._study.get_trials(deepcopy=False)

    @contextlib.contextmanager
    def recorded(self, trial: Trial) -> Iterator[_Record]:
        """Record a run; on Ctrl-C or an error it does not count."""
        import optuna

        numbers = {**dataclasses.asdict(trial.setting), "seed": trial.seed, "length": trial.length}
        fixed: dict[str, optuna.distributions.BaseDistribution] = {
            name: optuna.distributions.FloatDistribution(value, value) for name, value in numbers.items()
        }
        asked = self._study.ask(fixed)
        try:
            yield _Record(self._study, asked)
        except BaseException:
            self._study.tell(asked, state=optuna.trial.TrialState.FAIL)
            raise


class _Record:
    def __init__(self, study: optuna.Study, trial: optuna.trial.Trial) -> None:
        self._study, self._trial, self._last = study, trial, 0.0
        self.hear()

    def hear(self) -> None:
        """Record a sign of life of this process."""
        if time.time() - self._last > _SILENT / 20:
            self._last = time.time()
            self._trial.set_user_attr("process", [socket.gethostname(), os.getpid(), self._last])

    def end(self, result: Result) -> None:
        moves = result.moves and dataclasses.astuple(result.moves)
        self._trial.set_user_attr("result", [result.curve, result.spikes, moves, result.matrix])
        self._study.tell(self._trial, result.loss)


def _trial(trial: optuna.trial.FrozenTrial) -> Trial:
    numbers = dict(trial.params)
    seed, length = int(numbers.pop("seed")), numbers.pop("length")
    return Trial(Setting(**numbers), seed, length)


def _result(trial: optuna.trial.FrozenTrial) -> Result:
    curve, spikes, moves, matrix = trial.user_attrs["result"]
    return Result(_trial(trial), [Point(*p) for p in curve], spikes, moves and Moves(*moves), matrix)


def _alive(trial: optuna.trial.FrozenTrial) -> bool:
    """Whether the process of an unfinished run still works on it, as far as this machine can tell."""
    host, process, heard = trial.user_attrs.get("process", ("", 0, 0.0))
    if host == socket.gethostname() and os.name == "posix" and (process == os.getpid() or not _exists(process)):
        return False
    return time.time() - heard < _SILENT  # the process id may be reused by now


def _exists(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def open_storage(storage: str) -> optuna.storages.BaseStorage:
    """The storage at a URL (``sqlite:///study.db``), or the journal in a file of that path.

    Raises:
        ImportError: Optuna is missing.
        RewireError: it cannot be opened, or the file is no journal.
    """
    try:
        import optuna
        from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
    except ImportError as error:
        raise ImportError(f"studies need Optuna: {how_to_install('study')}.") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # the progress bars show each trial
    if "://" in storage:
        try:
            return optuna.storages.RDBStorage(storage)
        except Exception as error:  # from the database's own library
            raise RewireError(
                f"'{storage}' cannot be opened as a database ({type(error).__name__}: {error})."
            ) from error

    class Lock(JournalFileSymlinkLock):
        """A lock for writing. It removes the incomplete line of a process that was killed or found the disk full."""

        def acquire(self) -> bool:
            return super().acquire() and _whole(Path(storage))

    try:
        Path(storage).parent.mkdir(parents=True, exist_ok=True)
        if Path(storage).exists():
            with open(storage, "rb") as file:
                if not b'{"op_code"'.startswith(file.read(10)):
                    raise RewireError(f"'{storage}' is a file, and no journal of a study: give another storage.")
        return optuna.storages.JournalStorage(JournalFileBackend(storage, Lock(storage)))
    except OSError as error:
        raise RewireError(f"'{storage}' cannot be opened as a journal ({error}).") from error


def _whole(journal: Path) -> bool:
    """Remove a last line that does not end."""
    with open(journal, "rb+") as file:
        size = end = file.seek(0, os.SEEK_END)
        while end:
            file.seek(end - 1)
            if file.read(1) == b"\n":
                break
            end -= 1
        if end < size:
            file.truncate(end)
    return True


@contextlib.contextmanager
def opened(storage: str) -> Iterator[optuna.storages.BaseStorage]:
    """The storage that `open_storage` opens; its connections to a database are closed at the end."""
    found = open_storage(storage)
    try:
        yield found
    finally:
        engine = getattr(found, "engine", None)  # for a database
        if engine is not None:
            found.remove_session()
            engine.dispose()
