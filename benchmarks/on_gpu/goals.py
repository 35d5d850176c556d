"""What was measured beside what it is to be: tables of the records of jobs."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from on_gpu.processes import Record

Records = Mapping[str, Record]


@dataclasses.dataclass(frozen=True)
class StepGoal:
    """What a training step may cost at most over the plain one, in time, or in peak memory."""

    job: str
    over: float
    what: str = "time over plain"


_COMPILED = {
    "ancre-ingoing": 0.01,
    "grn-v3": 0.03,
    "dca": 0.08,
    "hc-dynamic": 0.05,
    "mhc": 0.06,
    "attnres, block=6": 0.02,
}
STEPS = [
    *(
        StepGoal(f"step/{shape}/{topology}/compiled", over)
        for topology, over in _COMPILED.items()
        for shape in ("llama-1b", "llama-1b-5504")
    ),
    StepGoal("step/llama-1b/ancre-ingoing/eager", 0.02),
    StepGoal("step/llama-60m, batch 1/ancre-ingoing/eager", 0.03),
    StepGoal("step/llama-1b/ancre-ingoing/eager", 0.01, "peak memory over plain"),
    StepGoal("step/llama-1b/dca/eager", 0.01, "peak memory over plain"),
]
#: Share of copy bandwidth of sums with a weight each, median over shapes.
BANDWIDTH = {"forward": 0.90, "backward": 0.85}
#: Least time over ours in any workload: by implementation, the start of the workloads' names, and the goal.
PEERS = [
    ("eager", "", 1.0),
    ("eager, compiled", "sum of", 1.5),
    ("liger-kernel", "attention residuals", 3.0),
    ("fla-core", "attention residuals", 1.2),
    ("hyper-connections", "hyper-connections", 5.0),
]


def show(console: Console, records: Records) -> None:
    """All tables, then what failed and what could not run."""
    for table in (_bandwidth(records), _mixes(records), _steps(records), goals(records)):
        if table.row_count:
            console.print(table)
    for job, record in records.items():
        if record["status"] != "done":
            console.print(f"{record['status']}: {job}: {record['error']}", markup=False, highlight=False)


def goals(records: Records) -> Table:
    table = Table("goal", "", "measured", "met", title="Goals")
    for what, goal, value, met in _goals(records):
        number = "not measured" if value is None else f"{value:+.1%}" if goal.startswith("<=") else f"{value:.2f}"
        table.add_row(what, goal, number, {None: "", True: "yes", False: "no"}[met])
    return table


def _goals(records: Records) -> Iterator[tuple[str, str, float | None, bool | None]]:
    """Each with what was measured and whether that meets it; None if nothing was."""
    sums = [
        shape for job, result in _done(records, "bandwidth/sum of") if job[-1].isdigit() for shape in result["shapes"]
    ]
    for which, least in BANDWIDTH.items():
        shares = [shape[which]["share of copy"] for shape in sums if which in shape]
        value = statistics.median(shares) if shares else None
        yield f"mix {which}, share of copy, median", f">= {least:g}", value, None if value is None else value >= least
    rows = [row for _, result in _done(records, "mix/") for row in result["rows"] if row["status"] == "measured"]
    for implementation, workload, least in PEERS:
        found = [
            row["over ours"]
            for row in rows
            if row["implementation"] == implementation and row["workload"].startswith(workload)
        ]
        value = min((ratio for ratio in found if ratio is not None), default=None)
        what = f"{implementation} over ours, {workload or 'any workload'}, least"
        yield what, f">= {least:g}", value, None if value is None else value >= least
    steps = dict(_done(records, "step/"))
    for goal in STEPS:
        ratio = steps.get(goal.job, {}).get(goal.what)
        over = None if ratio is None else ratio - 1
        name = goal.job.removeprefix("step/").replace("/", ", ")
        met = None if over is None else over <= goal.over
        yield f"{name}: {goal.what.removesuffix(' over plain')}", f"<= {goal.over:.0%}", over, met


def _bandwidth(records: Records) -> Table:
    columns = [f"{which}{what}" for which in BANDWIDTH for what in (", us", ", quartiles", ", share", ", goal")]
    table = Table("kernel", "width", *columns, title="Share of copy bandwidth")
    for job, result in _done(records, "bandwidth/"):
        for shape in result["shapes"]:
            cells = []
            for which, goal in BANDWIDTH.items():
                found = shape.get(which)
                low, high = found["quartiles"] if found else (math.nan, math.nan)
                cells += (
                    [
                        f"{found['microseconds']:.1f}",
                        f"{low:.1f} to {high:.1f}",
                        f"{found['share of copy']:.0%}" + _late(found["late"]),
                        f"{goal:.0%}",
                    ]
                    if found
                    else [""] * 4
                )
            table.add_row(_short(job), str(shape["width"]), *cells)
    return table


def _mixes(records: Records) -> Table:
    table = Table("", "forward, ms", "share", "backward, ms", "share", "/ ours", "MiB", "", title="Mixes")
    for job, result in _done(records, "mix/"):
        table.add_row(_short(job), *[""] * 6, f"copy {result['copy bytes per second'] / 1e9:.0f} GB/s", style="bold")
        for row in result["rows"]:
            if row["status"] != "measured":
                table.add_row(f"  {row['implementation']}", *[""] * 6, row["status"])
                continue
            cells = []
            for which in ("forward", "backward"):
                found = row[which]
                low, high = found["quartiles"]
                cells.append(f"{1e3 * found['median']:.3g} ({1e3 * low:.3g} to {1e3 * high:.3g})")
                share = found.get("share of copy")
                cells.append("" if share is None else f"{share:.0%}" + _late(found["late"]))
            ratio, peak = row["over ours"], row["peak bytes"]
            cells += ["" if ratio is None else f"{ratio:.2f}", "" if peak is None else f"{peak / 2**20:.0f}"]
            table.add_row(f"  {row['implementation']}", *cells, row["note"])
    return table


def _steps(records: Records) -> Table:
    table = Table("step", "ms", "plain, ms", "over plain", "quartiles", "goal", "peak", title="Training steps")
    limits = {goal.job: goal.over for goal in STEPS if goal.what == "time over plain"}
    for job, result in _done(records, "step/"):
        low, high = result["quartiles"]
        times, peak, limit = result["milliseconds"], result["peak memory over plain"], limits.get(job)
        table.add_row(
            _short(job),
            f"{times['rewired']:.1f}",
            f"{times['plain']:.1f}",
            f"{result['time over plain'] - 1:+.1%}",
            f"{low - 1:+.1%} to {high - 1:+.1%}",
            "" if limit is None else f"<= {limit:.0%}",
            "" if peak is None else f"{peak - 1:+.1%}",
        )
    return table


def _late(rounds: int) -> str:
    return f" ({rounds} late)" if rounds else ""


def _done(records: Records, prefix: str) -> Iterable[tuple[str, dict[str, Any]]]:
    """Names and results of the jobs that start so and are done."""
    done = [(job, record) for job, record in records.items() if record["status"] == "done"]
    return [(job, record["result"]) for job, record in done if job.startswith(prefix)]


def _short(job: str) -> str:
    """Without its kind."""
    return job.partition("/")[2]
