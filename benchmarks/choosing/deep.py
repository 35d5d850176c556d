"""The deep language model of tasks.py: topologies in the order in which they matter, each compared before the next.

    python benchmarks/choosing/deep.py --out out/choosing/deep

Runs, seeds, controls and statistics are those of `rewire.study`; its searches are left out, as a run takes a minute.
The plain model has the best of SETTINGS, and all others take that one. Results are written after each part, so that
the script can be stopped at any time; called again, it goes on.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import tasks
import torch

from rewire.bench.harness import machine
from rewire.studies import training
from rewire.studies.contenders import PLAIN, parse
from rewire.studies.page import draw
from rewire.studies.report import Row, Study
from rewire.studies.run import SEARCHED
from rewire.studies.runs import Runs, open_storage
from rewire.studies.task import Budget
from rewire.studies.training import Setting, Trial

#: Of the plain model: rates, and factors on its embeddings and on the ends of its branches.
SETTINGS = [
    Setting(rate, embedding=embedding, branch=branch)
    for rate, embedding, branch in (
        *((0.004, 64, 4), (0.004, 64, 1), (0.004, 16, 4), (0.008, 1024, 4), (0.016, 4096, 4), (0.002, 64, 4)),
        *((0.008, 64, 4), (0.004, 256, 4)),
    )
]
CONTENDERS = (
    *("ancre-ingoing", "denseformer", "hc-static", "muddformer:norms=True", "hc-dynamic", "attnres"),
    *("denseformer:sources=('x0', 8, 16)", "mhc"),
)
#: What `ancre-ingoing` learned, and the rule that it is near to, both held; after how many of the contenders.
CONTROLS, AFTER = ("end", "rule"), 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--contenders", nargs="*", default=CONTENDERS)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    training.EVALUATIONS = 4
    given.out.mkdir(parents=True, exist_ok=True)
    storage, device = open_storage(str(given.out / "journal.log")), torch.device("cpu")
    runs = Runs(tasks.deep_language_model(given.layers), Budget(given.steps), storage, device, print)
    about = {"steps": given.steps, "seeds": given.seeds, "layers": given.layers, "machine": machine(device)}

    first = {setting: runs.results(PLAIN, [Trial(setting, SEARCHED[0])])[0].loss for setting in SETTINGS}
    two = sorted(first, key=first.__getitem__)[:2]
    searched = {setting: runs.results(PLAIN, [Trial(setting, seed) for seed in SEARCHED]) for setting in two}
    tried = first | {setting: sum(run.loss for run in found) / len(found) for setting, found in searched.items()}
    setting = min(two, key=tried.__getitem__)
    trials = [Trial(setting, seed) for seed in range(2, 2 + given.seeds)]
    rows = [Row("residual, scaled", PLAIN, setting, tried, results=runs.results(PLAIN, trials), cost=runs.cost(PLAIN))]
    for name in given.contenders:
        contender = parse(name)
        row = Row(name, contender, setting, results=runs.results(contender, trials), cost=runs.cost(contender))
        rows.append(row)
        _write(rows, about, given.out)
        for held in CONTROLS if len(rows) == AFTER + 1 else ():
            donor = Trial(setting, SEARCHED[0])
            rows[1].controls[held] = runs.control(rows[1].contender, held, trials, donor) or []
            _write(rows, about, given.out)
    plain = Setting(0.004)
    as_it_is = runs.results(PLAIN, [Trial(plain, trial.seed) for trial in trials])
    _write([*rows, Row("residual", PLAIN, plain, results=as_it_is)], about, given.out)


def _write(rows: list[Row], about: dict[str, object], out: Path) -> None:
    baseline = rows[0]
    assert baseline.setting
    ranked = sorted(rows, key=lambda row: row.mean)
    found = Study(ranked, baseline.setting.scales, {}, {1.0: baseline.mean}, about)
    (out / "study.json").write_text(json.dumps(found.as_json(), indent=1))
    draw(found, out)
    print(found, flush=True)


if __name__ == "__main__":
    main()
