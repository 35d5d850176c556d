"""A deep language model at a size for a GPU: each contender searches one grid, then runs on the same seeds.

    PYTHONPATH=benchmarks/choosing python benchmarks/choosing/grid.py --device cuda --compiled --out out/choosing/grid

Runs, seeds and statistics are those of `rewire.study`; several processes, each with a contender of its own, share the
storage. All contenders have the same settings to choose from, on one seed, each in runs of full length. Those that are
below the plain model on each seed get a control: weights frozen where another run's ended. The plain model also runs
for longer. Called again, the script goes on; what there is at the end of ``--limit`` is written.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # this tree, whether it is installed or not
sys.path.insert(1, str(Path(__file__).parents[2] / "tests"))

with contextlib.suppress(ModuleNotFoundError):  # where torchvision's operators do not match torch's build
    import torchvision_stub  # noqa: F401

import tasks
import torch
from torch import Tensor, nn

from rewire.bench.harness import machine
from rewire.studies import training
from rewire.studies.contenders import PLAIN, Contender, parse
from rewire.studies.page import draw
from rewire.studies.report import Row, Study
from rewire.studies.run import SEARCHED
from rewire.studies.runs import Kept, Runs, open_storage
from rewire.studies.task import Budget, Task
from rewire.studies.training import Result, Setting, Trial

#: Rates, and factors on the embeddings and on the ends of branches.
SETTINGS = [
    Setting(rate, embedding=embedding, branch=branch)
    for rate, embedding, branch in ((2e-3, 64, 4), (4e-3, 64, 4), (8e-3, 64, 4), (4e-3, 16, 4), (4e-3, 64, 1))
]
CONTENDERS = ("denseformer", "ancre-ingoing", "hc-dynamic", "muddformer:norms=True", "attnres:block=6", "mhc")
#: The plain model's longer runs, as a multiple of the steps.
LONGER = 1.25


@dataclasses.dataclass(frozen=True)
class Wanted:
    """One run.

    Attributes:
        frozen: with connection weights that are held where the run of the search with this setting ended.
    """

    name: str
    trial: Trial
    frozen: bool = False

    @property
    def contender(self) -> Contender:
        plain = PLAIN if self.name == PLAIN.name else parse(self.name)
        return plain.holding("end") if self.frozen else plain


class Known:
    """What the storage holds."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.storage = open_storage(str(options.out / "journal.log"))
        self.compared = range(2, 2 + options.seeds)

    def results(self, contender: Contender) -> dict[Trial, Result]:
        return {result.trial: result for result in Kept(contender.name, self.storage).results()}

    def best(self, name: str) -> Setting | None:
        """The best of all settings; None while one is missing."""
        found = self.results(Wanted(name, Trial(SETTINGS[0], SEARCHED[0])).contender)
        losses = {s: found[Trial(s, SEARCHED[0])].loss for s in SETTINGS if Trial(s, SEARCHED[0]) in found}
        return min(losses, key=lambda s: losses[s]) if len(losses) == len(SETTINGS) else None

    def missing(self, name: str) -> list[Wanted]:
        """The runs of a contender that can be said by what is known, and are not."""
        return [wanted for wanted in self._next(name) if wanted.trial not in self.results(wanted.contender)]

    def _next(self, name: str) -> list[Wanted]:
        best, base = self.best(name), self.best(PLAIN.name)
        if best is None:
            return [Wanted(name, Trial(setting, SEARCHED[0])) for setting in SETTINGS]
        trials = [Trial(best, seed) for seed in self.compared]
        wanted = [Wanted(name, trial) for trial in trials]
        if name == PLAIN.name:
            return wanted + [Wanted(name, dataclasses.replace(trial, length=LONGER)) for trial in trials]
        below = base is not None and self._below(name, best, base)
        return wanted + [Wanted(name, trial, frozen=True) for trial in trials if below]

    def _below(self, name: str, setting: Setting, base: Setting) -> bool:
        found, plain = self.results(parse(name)), self.results(PLAIN)
        pairs = [(found.get(Trial(setting, seed)), plain.get(Trial(base, seed))) for seed in self.compared]
        return all(ours and its and ours.loss < its.loss for ours, its in pairs)

    def row(self, name: str) -> Row | None:
        """None for a contender whose search or comparison did not end."""
        best = self.best(name)
        if best is None:
            return None
        wanted = [Wanted(name, Trial(best, seed)) for seed in self.compared]
        contender = wanted[0].contender
        found = self.results(contender)
        if not all(each.trial in found for each in wanted):
            return None
        searched = [found[Trial(setting, SEARCHED[0])] for setting in SETTINGS]
        losses = {result.trial.setting: result.loss for result in searched}
        results = [found[each.trial] for each in wanted]
        row = Row(PLAIN.name + ", scaled" if contender == PLAIN else name, contender, best, losses, searched, results)
        held = self.results(contender.holding("end")) if contender != PLAIN else {}
        frozen = [held[each.trial] for each in wanted if each.trial in held]
        return dataclasses.replace(row, controls={"end": frozen}) if len(frozen) == len(results) else row


# In the processes that train.


def work(name: str, options: argparse.Namespace) -> None:
    """Make the runs of a contender that no other process has made or is at, until none is left."""
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")
    training.EVALUATIONS = 4
    known, device = Known(options), torch.device(options.device)
    task = tasks.deep_language_model(options.layers, options.width, options.length, options.batch)
    if options.compiled:
        task = dataclasses.replace(task, loss=_compiled_loss)
        training.make = _Once(training.make)  # type: ignore[assignment]
    runs = Runs(task, Budget(options.steps), known.storage, device)
    while missing := known.missing(name):
        free = [wanted for wanted in missing if wanted.trial not in Kept(wanted.name, known.storage).running()]
        if not free:
            time.sleep(1)  # what comes then is said by what others are at
            continue
        began, trial = time.monotonic(), free[0].trial
        if free[0].frozen:
            donor = dataclasses.replace(trial, seed=SEARCHED[0])
            (found,) = runs.control(parse(name), "end", [trial], donor) or [None]
            runs._ends.clear()  # the model is used again
        else:
            (found,) = runs.results(free[0].contender, [trial])
        about = f"{free[0].name}, {trial.setting}, seed {trial.seed}, {trial.length:g} x: {found}"
        print(f"{time.monotonic() - began:6.1f} s  {about}", flush=True)


class _Once:
    """Makes one model of each contender, so that it is compiled once; later ones become its weights."""

    def __init__(self, make: Callable[..., nn.Module]) -> None:
        self.make, self.models = make, dict[str, nn.Module]()

    def __call__(self, task: Task, contender: Contender, *args: Any) -> nn.Module:
        model = self.make(task, contender, *args)
        kept = self.models.setdefault(contender.name, model)
        kept.load_state_dict(model.state_dict())
        kept.zero_grad()
        return kept


_compiled: dict[nn.Module, Any] = {}


def _compiled_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    if not model.training:
        return model(**batch).loss
    if model not in _compiled:
        _compiled[model] = torch.compile(model, dynamic=False)
    return _compiled[model](**batch).loss


# In the process that asks.


def run(options: argparse.Namespace, names: Sequence[str]) -> None:
    """All runs, in processes, until none is left or the time is up."""
    end, context = time.monotonic() + options.limit, multiprocessing.get_context("spawn")
    each = [name for name in names for _ in range(options.each)] + [PLAIN.name] * options.each
    processes = [context.Process(target=work, args=(name, options)) for name in each]
    for process in processes:
        process.start()
    for process in processes:
        process.join(max(0.0, min(end - time.monotonic(), 1e6)))
    for process in processes:
        process.kill()


def write(options: argparse.Namespace, known: Known, names: Sequence[str]) -> None:
    rows = [row for name in names if (row := known.row(name))]
    plain = next((row for row in rows if row.is_plain), None)
    if plain is None:
        return
    assert plain.setting
    about = {key: getattr(options, key) for key in ("steps", "seeds", "layers", "width", "length", "batch")}
    about |= {"machine": machine(torch.device(options.device)), "longer": LONGER}
    found = known.results(PLAIN)
    longer = [found.get(Trial(plain.setting, seed, LONGER)) for seed in known.compared]
    if all(longer):
        about["losses of longer plain runs"] = [result.loss for result in longer if result]
    study = Study(sorted(rows, key=lambda row: row.mean), plain.setting.scales, {}, {1.0: plain.mean}, about)
    (options.out / "study.json").write_text(json.dumps(study.as_json(), indent=1))
    draw(study, options.out)
    print(study)
    for row in rows:
        frozen = statistics.fmean(r.loss for r in row.controls["end"]) if row.controls else float("nan")
        print(f"{row.name}: {row.mean:.4f}, with frozen weights {frozen:.4f}; {row.setting}")
    if all(longer):
        print(f"plain, {LONGER} x as long: {statistics.fmean(r.loss for r in longer if r):.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--contenders", nargs="*", default=CONTENDERS)
    parser.add_argument("--each", type=int, default=2, help="processes of a contender; twice that of the plain one")
    parser.add_argument("--compiled", action="store_true", help="train under torch.compile")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    known, names = Known(options), [PLAIN.name, *options.contenders]
    run(options, names)
    write(options, known, names)


if __name__ == "__main__":
    main()
