"""The deep language model of tasks.py: topologies in the order in which they matter, each compared before the next.

    python benchmarks/choosing/deep.py --out out/choosing/deep

The parts of `rewire.study`, with its search, seeds and statistics, in another order: results are written after each
topology, so that the script can be stopped at any time, and goes on when it is called again. Controls are run of the
topologies in CONTROLLED, whether they are ahead or not.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import tasks
import torch

from rewire.bench.harness import machine
from rewire.studies.contenders import PLAIN, parse
from rewire.studies.page import draw
from rewire.studies.report import Row, Study
from rewire.studies.run import SEARCHED, _Plan
from rewire.studies.runs import Runs, open_storage
from rewire.studies.search import effects
from rewire.studies.task import Budget
from rewire.studies.training import Trial

CONTENDERS = (
    *("ancre-ingoing", "denseformer", "hc-static", "muddformer:norms=True", "hc-dynamic", "attnres"),
    *("denseformer:sources=('x0', 8, 16)", "mhc"),
)
CONTROLLED = ("ancre-ingoing",)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--contenders", nargs="*", default=CONTENDERS)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    given.out.mkdir(parents=True, exist_ok=True)
    storage, device = open_storage(str(given.out / "journal.log")), torch.device("cpu")
    runs = Runs(tasks.deep_language_model(given.layers), Budget(given.steps), storage, device, print)
    plan = _Plan(runs, given.trials, given.seeds, len(CONTENDERS))
    plain, other, tried = plan._plain()
    rows = [row for row in (plain, other) if row]
    baseline = min(rows, key=lambda row: row.mean)
    assert baseline.setting
    scales, said = baseline.setting.scales, effects(tried, plan.has)
    about = {"steps": given.steps, "trials": given.trials, "seeds": given.seeds, "machine": machine(device)}
    for name in given.contenders:
        row = plan._compare(plan._search(plan.entry(parse(name)), baseline.setting))
        rows.append(_controlled(plan, row) if name in CONTROLLED else row)
        rows.sort(key=lambda row: row.mean)
        found = Study(rows, scales, said, {1.0: baseline.mean}, about)
        (given.out / "study.json").write_text(json.dumps(found.as_json(), indent=1))
        draw(found, given.out)
        print(found, flush=True)


def _controlled(plan: _Plan, row: Row) -> Row:
    """The row with its controls; at the start it is the plain model, at its rate."""
    assert row.setting
    trials, donor = plan._of(row.setting), Trial(row.setting, SEARCHED[0])
    start = plan.runs.results(PLAIN, plan._of(dataclasses.replace(row.setting, connections=1.0)))
    held = {held: plan.runs.control(row.contender, held, trials, donor) for held in ("end", "rule")}  # type: ignore[arg-type]
    return dataclasses.replace(row, controls={"start": start, **{name: found for name, found in held.items() if found}})


if __name__ == "__main__":
    main()
