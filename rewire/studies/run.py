"""`study`: which residual connections train this model best, with tuned rates, paired seeds and controls."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from rewire.bench.harness import default_device, machine
from rewire.console import bars, drawn, say
from rewire.console import stderr as console
from rewire.errors import RewireError
from rewire.init.roles import roles
from rewire.studies.contenders import DEFAULT, PLAIN, Contender, Held, parse
from rewire.studies.page import write
from rewire.studies.report import Row, Study
from rewire.studies.runs import Kept, Runs, Tick, opened
from rewire.studies.search import Tried, at_edge, best, climb, effects, scaled
from rewire.studies.task import Budget, Task, check_seeded
from rewire.studies.training import EVALUATIONS, Cost, Result, Setting, Trial, evaluate, make

#: Seeds of the search; the compared seeds follow them.
SEARCHED = (0, 1)
#: The longest run of the plain model, as a multiple of the budget.
_LONGEST = 4.0


def study(
    task: Task,
    topologies: Sequence[str] = DEFAULT,
    *,
    steps: int | None = None,
    seconds: float | None = None,
    trials: int = 10,
    seeds: int = 5,
    finalists: int = 4,
    out: str | Path = "study",
    storage: str | None = None,
    device: torch.device | str | None = None,
    progress: bool = True,
) -> Study:
    """Compare residual connections on a task: which one should this model be trained with?

    The plain model is searched first: its learning rate and factors on its embeddings and on the ends of its branches,
    for as long as a neighbour of the best is better. Every topology starts from there, and has its own search of its
    rate and of a factor on the rate of its connection weights. The best few are run with more seeds, and compared with
    the plain model seed by seed. Those that are better get controls: their connection weights frozen at the start, at
    what another run ended with, and at a fixed rule; and the plain model, trained for as long as theirs takes.

    All runs are kept in ``storage``: call it again after a kill, or with more topologies or seeds, and it goes on.
    Several processes, on several machines, can work at one storage. ``study.html``, which shows all that was found,
    ``study.json`` and pictures go to ``out``.

    Args:
        task: what is trained.
        topologies: names, with options as in ``"ancre-ingoing:cascade=keep:start=paper"``.
        steps, seconds: what one run may take; at least one of them. Seconds are those of training alone.
        trials: settings in the search of a topology, at most. That of the plain model goes on until it is done.
        seeds: runs that are compared, of each; nothing is called better by less than 5.
        finalists: topologies that are compared: those with the lowest losses in their searches.
        out: folder for what is written.
        storage: a file for a journal, or a URL of a database (``sqlite:///study.db``); default: a journal in ``out``.
        device: default: an accelerator if there is one.
        progress: whether to say how long it will take, and to show bars on stderr; where that is no terminal, a line
            for each run that ended.

    Returns:
        What was found: `Study.headline()`, `Study.findings()`, `Study.rows`, and a table if printed.

    Raises:
        ImportError: Optuna, SciPy or matplotlib is missing (extra ``study``).
        RewireError: the storage has another budget, or the plain model never had a finite loss.
        UnknownName, TypeError: there is no such topology, or it has no such option.
        ValueError: no budget, or numbers or values of options that make no sense.

    Example:
        >>> found = rewire.study(task, ["layerscale"], steps=5, trials=1, seeds=1, progress=False)
        >>> found.headline()
        'No difference shown: none of 1 topologies is better than residual.'
    """
    names = [topologies] if isinstance(topologies, str) else topologies
    contenders = [parse(name) for name in dict.fromkeys(names) if name != PLAIN.name]  # PLAIN always runs
    if min(trials, seeds, finalists) < 1:
        raise ValueError(f"trials={trials}, seeds={seeds}, finalists={finalists}: each has to be 1 or more.")
    where = torch.device(device) if device else default_device()
    budget, folder = Budget(steps, seconds), Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    with opened(storage or str(folder / "journal.log")) as kept, _bars(progress) as bar:
        _expect(Kept("settings", kept), task, budget, where)
        runs = Runs(task, budget, kept, where, say, bar) if progress else Runs(task, budget, kept, where)
        plan = _Plan(runs, trials, seeds, finalists)
        rows = [plan.entry(contender) for contender in contenders]
        if progress:
            console.print(plan.estimate(rows), highlight=False, soft_wrap=True)
        found = plan.run(rows)
    found.about.update({**dataclasses.asdict(budget), "trials": trials, "seeds": seeds, "machine": machine(where)})
    write(found, folder)
    return found


@dataclasses.dataclass
class _Plan:
    """The steps of a study, in the order in which they run."""

    runs: Runs
    trials: int
    seeds: int
    finalists: int

    def __post_init__(self) -> None:
        self.plain = self.runs.cost(PLAIN)
        self.has = scaled(roles(self.runs.task.model()))
        self.scales = [name for name, there in self.has.items() if there]
        self.compared = range(len(SEARCHED), len(SEARCHED) + self.seeds)

    def entry(self, contender: Contender) -> Row:
        """A row with the costs of a contender, or the reason why it does not fit this model."""
        try:
            return Row(contender.name, contender, cost=self.runs.cost(contender))
        except RewireError as error:  # others may fit
            return Row(contender.name, contender, reason=str(error).split(". ")[0].rstrip("."))
        except torch.OutOfMemoryError:
            return Row(contender.name, contender, reason="out of memory")

    def estimate(self, rows: Sequence[Row]) -> str:
        """The number of runs and their time, from the times of a step and of an evaluation.

        A search is expected to try its start, the neighbours of the start, and two more settings.
        """
        fits = [row.cost for row in rows if row.cost]
        last = sorted(fits, key=lambda cost: cost.seconds)[-self.finalists :]
        plain, each = 5 + 2 * len(self.scales), min(7, self.trials)
        compared = [self.plain] * (3 if self.scales else 2) + last
        count = len(SEARCHED) * (plain + each * len(fits)) + self.seeds * len(compared)
        seconds = plain * self._seconds(self.plain) + each * sum(self._seconds(cost) for cost in fits)
        seconds = len(SEARCHED) * seconds + self.seeds * sum(map(self._seconds, compared))
        controls = [
            self.seeds * (2 * self._seconds(cost) + self._seconds(self.plain, 1 + length_in_time_of(cost)))
            for cost in last
        ]
        more = f"; controls of each that is better, up to {_duration(max(controls))} more" if controls else ""
        seeds = f"seeds {_listed(SEARCHED)} for searches, {_listed(self.compared)} to compare"
        return f"About {count} runs, {_duration(seconds)} on one process{more}; {seeds}."

    def _seconds(self, cost: Cost, length: float = 1.0) -> float:
        """The time of a run, with its evaluations."""
        budget = self.runs.budget.times(length)
        training = min(budget.seconds or math.inf, budget.steps * cost.seconds if budget.steps else math.inf)
        return training + cost.evaluation * (1 + EVALUATIONS * length)

    def run(self, rows: Sequence[Row]) -> Study:
        plain, scaled_row, tried = self._plain()
        plains = [row for row in (plain, scaled_row) if row]
        baseline = min(plains, key=lambda row: row.mean)
        assert baseline.setting is not None
        if not baseline.mean < math.inf:
            raise RewireError("the plain model diverges on some seeds at its best rates: give the task a lower `clip`.")
        searched = [self._search(row, baseline.setting) if row.cost else row for row in rows]
        ranked = sorted((row for row in searched if row.setting), key=lambda row: min(row.tried.values()))
        names = {row.name for row in ranked[: self.finalists]}
        compared = [self._compare(row) if row.name in names else row for row in searched]
        lengths, earlier = {1.0: baseline.mean}, sorted(self.runs.entered() - {row.name for row in rows})
        said = effects(tried, self.has)
        found = Study([*plains, *compared], baseline.setting.scales, said, lengths, {}, earlier)
        rows = [self._controls(row, baseline) if found.verdict(row) == "better" else row for row in found.rows]
        rows.sort(key=lambda row: (not row.results, row.mean, min(row.tried.values(), default=float("inf"))))
        return dataclasses.replace(found, rows=rows, lengths=self._lengths(baseline, rows))

    def _losses(self, contender: Contender) -> Callable[[Sequence[Setting]], list[float]]:
        """The mean loss of each setting over the seeds of the search."""

        def losses(settings: Sequence[Setting]) -> list[float]:
            found = self.runs.results(contender, _searches(settings))
            count = len(SEARCHED)
            return [statistics.fmean(r.loss for r in found[n : n + count]) for n in range(0, len(found), count)]

        return losses

    def _plain(self) -> tuple[Row, Row | None, Tried]:
        """The rows of the plain model and, if better, of the plain model with scales; all settings that were tried."""
        losses, start = self._losses(PLAIN), Setting(self.runs.task.learning_rate)
        rates = climb(start, ["rate"], losses)
        if (first := best(rates)) is None:
            raise RewireError("no learning rate gave the plain model a finite loss: give the task a lower one.")
        tried = climb(first, ["rate", *self.scales], losses, rates)
        as_it_is = {setting: loss for setting, loss in tried.items() if setting.scales == Setting(1.0).scales}
        row = Row(PLAIN.name, PLAIN, tried=as_it_is, cost=self.plain)
        if best(tried) in as_it_is:
            return self._settled(row, 2), None, tried
        others = {setting: loss for setting, loss in tried.items() if setting not in as_it_is}
        other = self._settled(Row("residual, scaled", PLAIN, tried=others, cost=self.plain), 2)
        return self._settled(row, 1), other, tried

    def _settled(self, row: Row, count: int) -> Row:
        """The plain model's row with the best of its ``count`` best settings by all seeds, as one may be lucky."""
        finite = sorted((each for each in row.tried if row.tried[each] < math.inf), key=row.tried.__getitem__)
        rows = [self._compare(dataclasses.replace(row, setting=setting)) for setting in finite[:count]]
        found = min(rows, key=lambda row: row.mean)
        return dataclasses.replace(found, searched=self.runs.results(PLAIN, _searches(row.tried)))

    def _search(self, row: Row, start: Setting) -> Row:
        assert row.cost is not None
        names = ["rate", "connections"] if row.cost.weights else ["rate"]
        try:
            tried = climb(start, names, self._losses(row.contender), most=self.trials)
        except torch.OutOfMemoryError:
            return dataclasses.replace(row, reason="out of memory")
        searched = self.runs.results(row.contender, _searches(tried))
        found = dataclasses.replace(row, tried=tried, searched=searched)
        if (setting := best(tried)) is None:
            return dataclasses.replace(found, reason="diverged at all rates")
        return dataclasses.replace(found, setting=setting, edges=at_edge(tried, names))

    def _compare(self, row: Row) -> Row:
        return dataclasses.replace(row, results=self.runs.results(row.contender, self._of(row.setting)))

    def _of(self, setting: Setting | None, length: float = 1.0) -> list[Trial]:
        assert setting is not None
        return [Trial(setting, seed, length) for seed in self.compared]

    def _controls(self, row: Row, baseline: Row) -> Row:
        """Add to a row its controls, and the plain model's runs for the same time."""
        assert row.setting is not None and row.cost is not None
        trials, donor = self._of(row.setting), Trial(row.setting, SEARCHED[0])
        controls: dict[Held, list[Result]] = {}
        if row.contender.starts_plain:  # held at its start, it would be the plain model at another rate
            controls["start"] = self.runs.results(PLAIN, self._of(dataclasses.replace(row.setting, connections=1.0)))
        kinds: tuple[Held, ...] = ("end", "rule") if row.contender.starts_plain else ("start", "end", "rule")
        for held in kinds if row.cost.weights else ():
            results = self.runs.control(row.contender, held, trials, donor)
            if results is not None:
                controls[held] = results
        if self.runs.budget.seconds:
            return dataclasses.replace(row, controls=controls)
        longer = self.runs.results(PLAIN, self._of(baseline.setting, length_in_time_of(row.cost)))
        return dataclasses.replace(row, controls=controls, longer=longer)

    def _lengths(self, baseline: Row, rows: Sequence[Row]) -> dict[float, float]:
        """The baseline's loss by the length of its run, up to a length that shows how it falls."""
        longer = {length_in_time_of(row.cost) for row in rows if row.longer and row.cost}
        lengths = {1.0, *longer, *([1.5] if longer and max(longer) < 1.5 else [])}
        results = {length: self.runs.results(PLAIN, self._of(baseline.setting, length)) for length in sorted(lengths)}
        return {length: statistics.fmean(r.loss for r in found) for length, found in results.items()}


def _searches(settings: Iterable[Setting]) -> list[Trial]:
    return [Trial(setting, seed) for setting in settings for seed in SEARCHED]


def length_in_time_of(cost: Cost) -> float:
    """How much longer the plain model trains in the time of this contender, in steps of a twentieth."""
    return min(_LONGEST, max(1.0, round(20 * cost.time) / 20))


def _listed(seeds: Sequence[int]) -> str:
    return f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else str(seeds[0])


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _expect(kept: Kept, task: Task, budget: Budget, device: torch.device) -> None:
    """Record the budget and task in a new storage; refuse others in an old one.

    A task is identified by its numbers, and by the losses of the untrained model on its data.
    """
    check_seeded(task, SEARCHED[0])
    model = make(task, PLAIN, Trial(Setting(task.learning_rate), SEARCHED[0]), device)
    first = dataclasses.replace(task, validation=[next(iter(task.batches(SEARCHED[0])))])
    losses = [evaluate(each, model, device) for each in (task, first)]
    numbers = {name: getattr(task, name) for name in ("learning_rate", "weight_decay", "clip")}
    settings = {**dataclasses.asdict(budget), **numbers}
    known = kept.notes.get("settings")
    if known is None:
        kept.note("settings", {**settings, "losses": losses})
        return
    before = known.pop("losses", losses)
    if known != settings:
        raise RewireError(f"this storage holds a study with {known}, not {settings}: give another storage or folder.")
    if not all(math.isclose(a, b, rel_tol=0.01) for a, b in zip(before, losses, strict=True)):
        raise RewireError(
            f"this storage holds a study of another task: before training, the plain model of seed {SEARCHED[0]} had "
            f"losses of {before} on the validation batches and the first batch, and now has {losses}. Give another "
            "storage or folder; if the task is the same, let its model and batches follow from their seeds alone."
        )


@contextlib.contextmanager
def _bars(wanted: bool) -> Iterator[Callable[[str], Tick]]:
    """A function that makes a progress bar for a named run; it shows nothing unless ``wanted``."""
    named = TextColumn("{task.description}", markup=False)
    shown = bars(named, BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())

    def bar(name: str) -> Tick:
        for done in list(shown.task_ids):
            shown.remove_task(done)
        number: TaskID = shown.add_task(name, total=1.0)
        return lambda spent: shown.update(number, completed=spent)

    with drawn(shown) if wanted else contextlib.nullcontext():
        yield bar
