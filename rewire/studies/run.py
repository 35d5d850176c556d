"""`study`: which residual connections train this model best, with tuned rates, several seeds and controls."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from rewire.bench.harness import default_device, machine
from rewire.console import bars, drawn, say
from rewire.errors import RewireError
from rewire.studies.contenders import DEFAULT, PLAIN, SCALED, Contender, Scales, parse
from rewire.studies.page import write
from rewire.studies.report import Row, Study
from rewire.studies.search import Search, Setting, Tick, Trials, best, opened
from rewire.studies.task import Budget, Task
from rewire.studies.training import Cost, cost


def study(
    task: Task,
    topologies: Sequence[str] = DEFAULT,
    *,
    steps: int | None = None,
    seconds: float | None = None,
    trials: int = 5,
    seeds: int = 3,
    out: str | Path = "study",
    storage: str | None = None,
    device: torch.device | str | None = None,
    progress: bool = True,
) -> Study:
    """Compare residual connections on a task: which one should this model be trained with?

    The plain model is searched first: its learning rate, then also factors on its embeddings and on the ends of its
    branches, as much of what topologies gain is the scale of these. Every topology starts from the better of the two,
    and gets a search of its rate of its own. What the searches (seed 0) find is run with the seeds 1, 2, ...; these
    runs are compared. A topology that does not start as the plain model is run with its weights frozen, too; one that
    does, once with weights that get gradients and stand still, which has to train as the plain model.

    All runs are kept in ``storage``: call it again after a kill, or with more topologies, and it goes on. Several
    processes, on several machines, can work at one storage. ``study.html``, which shows all that was found,
    ``study.json``, ``curves.png`` and ``differences.png`` go to ``out``.

    Args:
        task: what is trained.
        topologies: names, with options as in ``"ancre-ingoing:cascade=keep:start=paper"``.
        steps, seconds: what one run may take; at least one of them. Seconds are those of training alone.
        trials: runs in the search of a rate, at most; the first plain model's scales take three times as many.
        seeds: runs that are compared, of each.
        out: folder for what is written.
        storage: a file for a journal, or a URL of a database (``sqlite:///study.db``); default: a journal in ``out``.
        device: default: an accelerator if there is one.
        progress: whether to show bars on stderr; where that is no terminal, a line for each run that ended.

    Returns:
        What was found: `Study.rows`, `Study.findings()`, and a table if printed with rich.

    Raises:
        ImportError: Optuna or matplotlib is missing (extra ``study``).
        RewireError: the storage has another budget or other trials, or the plain model never had a finite loss.
        ValueError: no budget, or numbers that make no sense.

    Example:
        >>> found = rewire.study(task, ["ancre-ingoing"], steps=20, trials=1, seeds=1, progress=False)
        >>> found.baseline.name
        'residual'
    """
    contenders = [parse(name) for name in dict.fromkeys(topologies)]
    if trials < 1 or seeds < 1:
        raise ValueError(f"trials={trials}, seeds={seeds}: both have to be 1 or more.")
    where = torch.device(device) if device else default_device()
    budget, folder = Budget(steps, seconds), Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    settings = {**dataclasses.asdict(budget), "learning_rate": task.learning_rate, "trials": trials}
    with opened(storage or str(folder / "journal.log")) as kept, _bars(progress) as ticks:
        _expect(Trials("settings", kept), settings)
        search = Search(task, budget, kept, trials, seeds, where, *([say] if progress else []))
        scales, rows = _run(search, contenders, ticks)
    about = {**dataclasses.asdict(budget), "trials": trials, "seeds": seeds, "machine": machine(where)}
    found = Study(sorted(rows, key=lambda row: row.mean), scales, about)
    write(found, folder)
    return found


def _run(search: Search, contenders: Sequence[Contender], ticks: Callable[[str], Tick]) -> tuple[Scales, list[Row]]:
    """The scales that all but the plain model have, and all rows."""
    as_is, rate = Scales(), search.task.learning_rate
    tried = search.tune(PLAIN, {"rate": rate}, as_is, ticks)
    if best(tried) is None:
        raise RewireError("no learning rate gave the plain model a finite loss: give the task a lower one.")
    known = [dataclasses.replace(run, setting={**run.setting, **dataclasses.asdict(as_is)}) for run in tried]
    found = search.tune(SCALED, {"rate": rate, **dataclasses.asdict(as_is)}, as_is, ticks, known)
    # The second search may find a better rate for the model as it is, too.
    plain = best([run for run in found if run.setting["embedding"] == run.setting["branch"] == 1])
    scaled = best(found)
    assert plain is not None and scaled is not None  # they are as good as the first search's best at least
    scales = Scales(**{name: value for name, value in scaled.setting.items() if name != "rate"})
    rows = [_row(search, PLAIN, {"rate": plain.setting["rate"]}, as_is, ticks)]
    if scales != as_is:
        rows.append(_row(search, SCALED, scaled.setting, scales, ticks))
    for contender in contenders:
        rows += _rows(search, contender, scaled.setting["rate"], scales, ticks)
    return scales, rows


def _rows(search: Search, contender: Contender, rate: float, scales: Scales, ticks: Callable[[str], Tick]) -> list[Row]:
    """The row of a topology, and that of its control if it needs one."""
    try:
        tuned = best(search.tune(contender, {"rate": rate}, scales, ticks))
        if tuned is None:
            return [Row(contender, reason="diverged at all rates")]
        row = _row(search, contender, tuned.setting, scales, ticks)
    except RewireError as error:  # it does not fit this model: the others do
        return [Row(contender, reason=str(error).split(". ")[0].rstrip("."))]
    except torch.OutOfMemoryError:
        return [Row(contender, reason="out of memory")]
    control = contender.control
    if control is None:
        return [row]
    if control.held == "still":  # as the plain model: at its rate, and one run shows it
        return [row, _row(dataclasses.replace(search, seeds=1), control, {"rate": rate}, scales, ticks)]
    return [row, _row(search, control, tuned.setting, scales, ticks)]


def _row(search: Search, contender: Contender, setting: Setting, scales: Scales, ticks: Callable[[str], Tick]) -> Row:
    runs = search.repeat(contender, setting, scales, ticks)
    return Row(contender, setting, runs, None if contender.held else _cost(search, contender))


def _cost(search: Search, contender: Contender) -> Cost:
    """What a step costs, measured once and then kept with the runs."""
    notes = Trials(f"{contender.name} | seeds", search.storage)
    if "cost" not in notes.notes:
        notes.note("cost", cost(search.task, contender, search.device))
    return Cost(*notes.notes["cost"])


def _expect(trials: Trials, settings: dict[str, Any]) -> None:
    """Keep the settings of a new storage, and refuse others in an old one."""
    known = trials.notes.get("settings")
    if known is None:
        trials.note("settings", settings)
    elif known != settings:
        raise RewireError(f"this storage holds a study with {known}, not {settings}: give another storage or folder.")


@contextlib.contextmanager
def _bars(wanted: bool) -> Iterator[Callable[[str], Tick]]:
    """Makes a progress bar for a run, by what it is called; nothing is shown unless ``wanted``."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    shown = bars(*columns)

    def bar(name: str) -> Tick:
        for done in list(shown.task_ids):
            shown.remove_task(done)
        number: TaskID = shown.add_task(name, total=1.0)
        return lambda spent: shown.update(number, completed=spent)

    with drawn(shown) if wanted else contextlib.nullcontext():
        yield bar
