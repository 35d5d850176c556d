"""The deep language model of tasks.py: topologies in the order in which they matter, each compared before the next.

    python benchmarks/choosing/deep.py --out out/choosing/deep

Runs, seeds and statistics are those of `rewire.study`, in another order and with smaller searches. The plain model has
the best of SETTINGS, which go on where the best was at an edge. The others have the one that is best for them, on one
seed, of the plain model's best for five factors on the embeddings, and then the best of three rates of their
connections, or more if the highest is the best; with that setting, the plain model is run, too. Those whose gain has an
interval above zero get controls: weights frozen where another run's ended, and the plain model trained for the same
time. Results are written after each part; called again, the script goes on. So it does from the results of others
with `--known`, the file that they were written to: runs that it holds are not made again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna
import tasks
import torch

from rewire.bench.harness import machine
from rewire.diagnostics.moves import Moves
from rewire.studies import training
from rewire.studies.contenders import PLAIN, Contender, parse
from rewire.studies.page import draw
from rewire.studies.paired import difference
from rewire.studies.report import Row, Study
from rewire.studies.run import SEARCHED, length_in_time_of
from rewire.studies.runs import Kept, Runs, open_storage
from rewire.studies.task import Budget
from rewire.studies.training import Point, Result, Setting, Trial

#: Of the plain model: by factors on its embeddings, rates and factors on the ends of its branches.
TRIED = {
    16: [(0.004, 4)],
    64: [(0.002, 4), (0.004, 1), (0.004, 4), (0.004, 16), (0.008, 4)],
    256: [(0.002, 16), (0.004, 4), (0.004, 16), (0.004, 64), (0.008, 4), (0.008, 16)],
    1024: [(0.004, 4), (0.004, 16), (0.008, 4), (0.008, 16), (0.008, 64), (0.016, 16)],
    4096: [(0.004, 16), (0.008, 16), (0.008, 64), (0.008, 256), (0.016, 4), (0.016, 16), (0.016, 64)],
    16384: [(0.008, 16), (0.008, 64), (0.008, 256)],
    65536: [(0.008, 256), (0.008, 1024)],
}
SETTINGS = [
    Setting(rate, embedding=embedding, branch=branch)
    for embedding, settings in TRIED.items()
    for rate, branch in settings
]
#: Factors on the rates of connections.
CONNECTIONS = (1, 4, 16)
CONTENDERS = (
    *("denseformer", "hc-static", "muddformer:norms=True", "ancre-ingoing", "hc-dynamic", "attnres"),
    *("denseformer:sources=('x0', 8, 16)", "mhc"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=2, help="of those that are compared")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--contenders", nargs="*", default=CONTENDERS)
    parser.add_argument("--controls", nargs="*", choices=("end", "time"), default=("end", "time"))
    parser.add_argument("--known", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    training.EVALUATIONS = 4
    given.out.mkdir(parents=True, exist_ok=True)
    storage, device = open_storage(str(given.out / "journal.log")), torch.device("cpu")
    if given.known:
        _keep(json.loads(given.known.read_text())["kept"], storage)
    runs = Runs(tasks.deep_language_model(given.layers), Budget(given.steps), storage, device, print)
    compared = range(given.first_seed, given.first_seed + given.seeds)
    about = {"steps": given.steps, "seeds": given.seeds, "layers": given.layers, "machine": machine(device)}

    def tried(contender: Contender, settings: Sequence[Setting], seeds: Sequence[int]) -> list[Result]:
        return runs.results(contender, [Trial(setting, seed) for setting in settings for seed in seeds])

    def row(name: str, contender: Contender, setting: Setting, searched: list[Result]) -> Row:
        losses = {run.trial.setting: run.loss for run in searched}
        results = tried(contender, [setting], compared)
        return Row(name, contender, setting, losses, searched, results, runs.cost(contender))

    def controlled(row: Row) -> Row:
        assert row.setting and row.cost
        trials, donor = [Trial(row.setting, seed) for seed in compared], Trial(row.setting, SEARCHED[0])
        ended = runs.control(row.contender, "end", trials, donor) if "end" in given.controls else None
        length = length_in_time_of(row.cost)
        longer = [Trial(setting, seed, length) for seed in compared if "time" in given.controls]
        controls = {"end": ended} if ended else {}
        return dataclasses.replace(row, controls=controls, longer=runs.results(PLAIN, longer))

    first = tried(PLAIN, SETTINGS, SEARCHED[:1])
    first.sort(key=lambda run: run.loss)
    best, of_embedding = [run.trial.setting for run in first], dict[float, Setting]()
    for each in best:
        of_embedding.setdefault(each.embedding, each)
    second = tried(PLAIN, best[:4], SEARCHED[1:])
    sums = {run.trial.setting: run.loss for run in second}
    setting = min(best[:4], key=lambda each: sums[each] + first[best.index(each)].loss)
    rows = [row("residual, scaled", PLAIN, setting, [*first, *second])]
    for name in given.contenders:
        contender = parse(name)
        searched = tried(contender, [*of_embedding.values()][:5], SEARCHED[:1])
        own = min(searched, key=lambda run: run.loss).trial.setting
        rates = [dataclasses.replace(own, connections=own.connections * factor) for factor in CONNECTIONS]
        searched += tried(contender, rates[1:], SEARCHED[:1])
        while (best_rate := min(searched, key=lambda run: run.loss).trial.setting) == rates[-1]:  # at the edge
            rates.append(dataclasses.replace(best_rate, connections=best_rate.connections * 4))
            searched += tried(contender, rates[-1:], SEARCHED[:1])
        own = min(searched, key=lambda run: run.loss).trial.setting
        at, of_plain = len(rows), dataclasses.replace(own, connections=1.0)
        rows.append(row(name, contender, own, searched))
        if all(other.setting != of_plain for other in rows if other.contender == PLAIN):  # is it the setting alone?
            rows.append(row(f"residual, the setting of {name}", PLAIN, of_plain, []))
        _write(rows, about, storage, given.out)
        plain = min((other for other in rows if other.contender == PLAIN), key=lambda other: other.mean)
        if difference(plain.losses, rows[at].losses).low > 0:
            rows[at] = controlled(rows[at])
            _write(rows, about, storage, given.out)


def _kept(storage: Any) -> dict[str, Any]:
    """All runs that there are, of each contender, and what its steps cost."""
    found: dict[str, Any] = {}
    for name in optuna.get_all_study_names(storage):
        kept = Kept(name, storage)
        runs = [dataclasses.asdict(dataclasses.replace(run, matrix=[])) for run in kept.results()]
        found[name] = {"cost": kept.notes.get("cost"), "runs": runs}
    return found


def _keep(found: dict[str, Any], storage: Any) -> None:
    """Put runs of others into ``storage``, as if they had been made here."""
    for name, of_contender in found.items():
        kept = Kept(name, storage)
        known = {run.trial for run in kept.results()}
        if of_contender["cost"] and "cost" not in kept.notes:
            kept.note("cost", of_contender["cost"])
        for run in of_contender["runs"]:
            trial = Trial(**run["trial"] | {"setting": Setting(**run["trial"]["setting"])})
            moves = run["moves"] and Moves(**run["moves"])
            if trial not in known:
                with kept.recorded(trial) as record:
                    record.end(Result(trial, [Point(*point) for point in run["curve"]], run["spikes"], moves))


def _write(rows: list[Row], about: dict[str, object], storage: Any, out: Path) -> None:
    baseline = rows[0]
    assert baseline.setting
    ranked = sorted(rows, key=lambda row: row.mean)
    found = Study(ranked, baseline.setting.scales, {}, {1.0: baseline.mean}, about)
    (out / "study.json").write_text(json.dumps(found.as_json() | {"kept": _kept(storage)}, indent=1))
    draw(found, out)
    print(found, flush=True)


if __name__ == "__main__":
    main()
