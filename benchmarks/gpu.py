"""Everything that has to be known of one GPU, in under 9 minutes.

    python benchmarks/gpu.py [--out FILE] [--phases check mixes steps] [--minutes N] [--seed N]
    python benchmarks/gpu.py --dry-run        # the whole script at tiny sizes on a CPU, kernels in Triton's interpreter

Three phases: *check* compares every kernel and every gradient with float64, and small models with kernels to the same
without; *mixes* times single mixes; *steps* times training steps over the plain model. What matters most of each phase
runs first. The file is written after every job. Jobs that no longer fit are listed as not measured; ``--phases``
measures them in another run. Ends with 1 if a check or a job failed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated

with contextlib.suppress(ModuleNotFoundError):  # where torchvision's operators do not match torch's build
    import torchvision_stub  # noqa: F401

import kernel_checks
import model_checks
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn

import rewire
from rewire.bench import comparison, harness, workloads
from rewire.bench.shapes import batch_for, make_shape
from rewire.patterns.tiny import tiny_model

PHASES = ("check", "mixes", "steps")
#: Training steps under torch.compile, LLaMA-1B: name, topology, options.
TOPOLOGIES: list[tuple[str, str, dict[str, Any]]] = [
    ("ancre", "ancre-ingoing", {}),
    ("dca", "dca", {}),
    ("grn-v3", "grn-v3", {}),
    ("hc n=4", "hc-dynamic", {}),
    ("mhc n=4", "mhc", {}),
    ("attnres-block", "attnres", {"block": 6}),  # 48 units in 8 groups
]
_FAILED, _LATE = "failed: ", "not measured: out of time"


@dataclasses.dataclass(frozen=True)
class Job:
    """One thing to do.

    Attributes:
        run: returns what goes into the file, and raises if it fails.
        turn: jobs of a lower one run first.
    """

    phase: str
    name: str
    run: Callable[[], dict[str, Any]]
    turn: int = 1


def check_jobs(device: torch.device, seed: int, dry: bool) -> list[Job]:
    def run(check: kernel_checks.Check, number: int) -> dict[str, Any]:
        return {"largest error over tolerance": kernel_checks.run(check, device, seed + number)}

    def run_model(check: model_checks.ModelCheck) -> dict[str, Any]:
        return {"largest error over tolerance": model_checks.run(check, device, seed, dry)}

    jobs = [
        Job("check", check.name, functools.partial(run, check, number), 0 if check.dtype == torch.bfloat16 else 2)
        for number, check in enumerate(kernel_checks.checks(small=dry))
    ]
    models = model_checks.checks(small=dry)
    return jobs + [
        Job("check", check.name, functools.partial(run_model, check), 0 if check is models[0] else 2)
        for check in models
    ]


def mix_jobs(device: torch.device, rounds: int, bandwidth: float, dry: bool) -> list[Job]:
    def run(workload: workloads.Workload) -> dict[str, Any]:
        (rows,) = comparison.run([workload], rounds, compiled=not dry)
        return {"rows": comparison.as_json(rows, bandwidth)}

    sizes = workloads.Sizes(1, 32, 32, torch.float32, device)
    todo = workloads.make_workloads(sizes, small=True) if dry else workloads.default_workloads(device)
    return [
        Job(
            "mixes",
            workload.name,
            functools.partial(run, workload),
            0 if workload.name.startswith(("sum", "trunk")) else 1,
        )
        for workload in todo
    ]


class Steps:
    """Training steps of a rewired model and of the plain one, in turn; plain models are made and compiled once."""

    def __init__(self, device: torch.device, rounds: int, dry: bool) -> None:
        self.device, self.rounds, self.dry = device, rounds, dry
        self.plain: dict[Any, nn.Module] = {}

    def jobs(self) -> list[Job]:
        large, small = ("llama-1b", 8, 2048), ("llama-60m", 1, 256)
        jobs = [
            self._job("ancre, eager", large, "ancre-ingoing", {}, compiled=False),
            self._job("dca, eager", large, "dca", {}, compiled=False),
            self._job("ancre, eager, LLaMA-60M, batch 1", small, "ancre-ingoing", {}, compiled=False),
        ]
        return jobs + [self._job(f"{name}, compiled", large, *what, compiled=True) for name, *what in TOPOLOGIES]

    def _job(self, name: str, shape: tuple[str, int, int], topology: str, options: Any, compiled: bool) -> Job:
        turn = 0 if topology.startswith("ancre") else 1
        return Job("steps", name, lambda: self._measure(shape, topology, options, compiled), turn)

    def _measure(
        self, shape: tuple[str, int, int], topology: str, options: dict[str, Any], compiled: bool
    ) -> dict[str, Any]:
        name, batch, length = ("tiny llama", 1, 8) if self.dry else shape
        plain = self._plain(name, compiled=False)
        rewired: nn.Module = rewire.compile(plain, topology, start="paper", validate=False, **options)
        models = {"plain": self._plain(name, compiled), "rewired": self._compiled(rewired) if compiled else rewired}
        inputs = batch_for(plain, batch, length)
        steps = {each: harness.training_step(model, inputs) for each, model in models.items()}
        held = _allocated(self.device)
        timings = harness.side_by_side(steps, self.rounds, self.device, warmup=1 if self.dry else harness.WARMUP)
        ours, base = timings["rewired"], timings["plain"]
        peaks = None if ours.peak is None or base.peak is None else (held + ours.peak) / (held + base.peak)
        return {
            "model": name,
            "batch": batch,
            "length": length,
            "topology": topology,
            "options": options,
            "compiled": compiled,
            "time over plain": ours.ratio(base),
            "peak memory over plain": peaks,
            **harness.as_json(timings),
        }

    def _plain(self, name: str, compiled: bool) -> nn.Module:
        if (name, compiled) not in self.plain:
            if compiled:
                made = self._compiled(self._plain(name, False))
            else:
                made = tiny_model("llama").train() if self.dry else make_shape(name, self.device, torch.bfloat16)
            self.plain[name, compiled] = made
        return self.plain[name, compiled]

    def _compiled(self, model: nn.Module) -> nn.Module:
        return torch.compile(model, backend="eager" if self.dry else "inductor", dynamic=False)  # type: ignore[return-value]


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def run_all(jobs: Sequence[Job], report: dict[str, Any], write: Callable[[], None], seconds: float) -> None:
    """Run the jobs, in this order, into ``report["jobs"]``; those that would end after ``seconds`` are left out.

    A job is expected to take as long as the longest of its phase so far.
    """
    start = time.monotonic()
    longest: dict[str, float] = {}
    report["jobs"] = [{"phase": job.phase, "name": job.name, "status": _LATE} for job in jobs]
    for job, entry in zip(track(jobs, "running"), report["jobs"], strict=True):
        begun = time.monotonic()
        if begun - start + longest.get(job.phase, 0) > seconds:
            continue
        try:
            entry.update(status="done", **job.run())
        except Exception as error:  # the other jobs still run
            entry["status"] = f"{_FAILED}{type(error).__name__}: {error}"
        entry["seconds taken"] = time.monotonic() - begun
        longest[job.phase] = max(longest.get(job.phase, 0), entry["seconds taken"])
        write()


def goals(jobs: Sequence[dict[str, Any]]) -> list[tuple[str, str, float | None, bool | None]]:
    """Each goal with what was measured (the worst case) and whether that meets it; None if nothing was."""
    rows = [row for job in jobs for row in job.get("rows", ()) if row["status"] == "measured"]
    ours = [row for row in rows if row["implementation"] == workloads.OURS]
    sums = [row for row in ours if row["workload"].startswith("sum of") and "RMSNorm" not in row["workload"]]
    compiled = [
        row for row in rows if row["implementation"] == workloads.COMPILED and row["workload"].startswith("sum of")
    ]
    steps = {job["name"]: job for job in jobs if job["phase"] == "steps" and job["status"] == "done"}

    def least(values: Sequence[float | None]) -> float | None:
        return min((value for value in values if value is not None), default=None)

    def peer(workload: str, implementation: str) -> float | None:
        return least(
            [
                row["over ours"]
                for row in rows
                if row["workload"].startswith(workload) and row["implementation"] == implementation
            ]
        )

    def over(name: str, what: str = "time over plain") -> float | None:
        value = steps.get(name, {}).get(what)
        return None if value is None else value - 1

    at_least = [
        ("mix forward, share of copy bandwidth", 0.90, least([row["forward"]["share of copy"] for row in sums])),
        ("mix backward, share of copy bandwidth", 0.85, least([row["backward"]["share of copy"] for row in sums])),
        ("plain mix under torch.compile over ours", 1.5, least([row["over ours"] for row in compiled])),
        ("liger-kernel attention residuals over ours", 3.0, peer("attention residuals", "liger-kernel")),
        ("fla-core attention residuals over ours", 1.2, peer("attention residuals", "fla-core")),
        ("hyper-connections over ours", 5.0, peer("hyper-connections", "hyper-connections")),
    ]
    limits = {"ancre": 0.01, "grn-v3": 0.03, "dca": 0.08, "hc n=4": 0.05, "mhc n=4": 0.06, "attnres-block": 0.02}
    at_most = [
        (f"step over plain, {name}, compiled", limit, over(f"{name}, compiled")) for name, limit in limits.items()
    ]
    at_most += [
        ("step over plain, ancre, eager", 0.02, over("ancre, eager")),
        ("peak memory over plain, ancre", 0.01, over("ancre, eager", "peak memory over plain")),
        ("peak memory over plain, dca", 0.01, over("dca, eager", "peak memory over plain")),
        ("step over plain, LLaMA-60M, batch 1", 0.03, over("ancre, eager, LLaMA-60M, batch 1")),
    ]
    found = [(name, f">= {goal:g}", value, None if value is None else value >= goal) for name, goal, value in at_least]
    return found + [
        (name, f"<= {goal:.0%}", value, None if value is None else value <= goal) for name, goal, value in at_most
    ]


def show(console: Console, report: dict[str, Any]) -> None:
    table = Table("goal", "", "measured, worst case", "met")
    for name, goal, value, met in goals(report["jobs"]):
        number = "not measured" if value is None else f"{value:+.1%}" if goal.startswith("<=") else f"{value:.2f}"
        table.add_row(name, goal, number, "dry run" if report["dry run"] else {None: "", True: "yes", False: "no"}[met])
    console.print(table)
    for phase in PHASES:
        mine = [job for job in report["jobs"] if job["phase"] == phase]
        done = sum(job["status"] == "done" for job in mine)
        console.print(f"{phase}: {done} of {len(mine)} done")
        for job in mine:
            if job["status"] != "done":
                console.print(f"  {job['name']}: {job['status']}", markup=False)
    others = [row for job in report["jobs"] for row in job.get("rows", ()) if row["status"] != "measured"]
    for row in others:
        console.print(f"  {row['workload']}, {row['implementation']}: {row['status']}", markup=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks/gpu.json"))
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=PHASES)
    parser.add_argument("--minutes", type=float, default=8.5, help="no job starts that would end later")
    parser.add_argument("--seed", type=int, default=secrets.randbits(31), help="of the checks; fresh by default")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    if not (options.dry_run or torch.cuda.is_available()):
        parser.error("there is no GPU here; --dry-run runs the script at tiny sizes on the CPU.")
    dry, device = options.dry_run, torch.device("cpu" if options.dry_run else "cuda")
    torch._dynamo.config.recompile_limit = 64  # all models share the code of their outermost forward
    rounds = 1 if dry else 20
    bandwidth = harness.copy_bandwidth(device, 1 << (22 if dry else 28), rounds)
    by_phase = {
        "check": lambda: check_jobs(device, options.seed, dry),
        "mixes": lambda: mix_jobs(device, rounds, bandwidth, dry),
        "steps": lambda: Steps(device, 1 if dry else 10, dry).jobs(),
    }
    jobs = [job for phase in PHASES if phase in options.phases for job in by_phase[phase]()]
    jobs.sort(key=lambda job: job.turn)
    report: dict[str, Any] = {
        "machine": harness.machine(device),
        "dry run": dry,
        "seed": options.seed,
        "copy bytes per second": bandwidth,
    }

    def write() -> None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n")

    run_all(jobs, report, write, 60 * options.minutes)
    write()
    show(Console(width=120), report)
    return int(any(job["status"].startswith(_FAILED) for job in report["jobs"]))


if __name__ == "__main__":
    sys.exit(main())
