"""All jobs, by name and in the order in which they run: checks, then what the goals ask for, then the rest."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from on_mixes import cold_passes, comparison, workloads

from on_gpu import bandwidth, device_checks, kernel_checks, model_checks, steps
from on_gpu.goals import STEPS
from on_gpu.processes import Job, Skipped
from rewire import conformance
from rewire.conformance.ours import ours

Result = Mapping[str, Any]

#: In what follows, what turn a job has.
FIRST, GOALS, MORE, LAST = range(4)


@dataclasses.dataclass(frozen=True)
class Setting:
    """Where jobs run, and how.

    Attributes:
        small: tiny sizes, for a CPU; times mean nothing.
        seed: of the checks.
    """

    device: torch.device
    small: bool
    seed: int


def all_jobs(setting: Setting) -> list[Job]:
    """Every job, by turns; the name of each is unique."""
    makers = (_conformance, _kernel_checks, _device_checks, _model_checks, _bandwidth, _mixes, _steps, _tests)
    return sorted((job for make in makers for job in make(setting)), key=lambda job: job.turn)


def chosen(jobs: list[Job], patterns: list[str]) -> list[Job]:
    """Those whose names match a pattern or start with it, as a path does; all that are not hidden if there is none."""
    if not patterns:
        return [job for job in jobs if not job.hidden]
    return [
        job
        for job in jobs
        if any(job.name == each or job.name.startswith(f"{each}/") or fnmatchcase(job.name, each) for each in patterns)
    ]


# Checks.


def _conformance(setting: Setting) -> Iterator[Job]:
    """What the papers say, before what kernels are compared with each other."""

    def run(scheme: str) -> Result:
        report = conformance.check(scheme, ours(scheme), device=str(setting.device))
        assert report.agrees, str(report)
        return {"largest error": report.errors[torch.float32]}

    for scheme in conformance.list_schemes():
        yield Job(f"check/conformance/{scheme}", partial(run, scheme), FIRST)


def _kernel_checks(setting: Setting) -> Iterator[Job]:
    def run(check: kernel_checks.Check, number: int) -> Result:
        return {"largest error over tolerance": kernel_checks.run(check, setting.device, setting.seed + number)}

    for number, check in enumerate(kernel_checks.checks(setting.small)):
        turn = FIRST if check.dtype == torch.bfloat16 or setting.small else LAST
        yield Job(f"check/kernel/{check.name}", partial(run, check, number), turn)


def _device_checks(setting: Setting) -> Iterator[Job]:
    def run(check: Callable[[torch.device, bool], None]) -> Result:
        torch.manual_seed(setting.seed)
        check(setting.device, setting.small)
        return {}

    for name, check in device_checks.checks().items():
        large = name.startswith("more than")
        yield Job(f"check/device/{name}", partial(run, check), FIRST, limit=300, alone=large)


def _model_checks(setting: Setting) -> Iterator[Job]:
    def run(check: model_checks.ModelCheck) -> Result:
        share = model_checks.run(check, setting.device, setting.seed, setting.small)
        return {"largest error over tolerance": share}

    for check in model_checks.checks(setting.small):
        yield Job(f"check/model/{check.name}", partial(run, check), FIRST, limit=300)


# Times.


def _bandwidth(setting: Setting) -> Iterator[Job]:
    for name in bandwidth.cases():
        turn = GOALS if name.startswith("sum of") else MORE
        run = partial(bandwidth.measure, name, setting.device, setting.small)
        yield Job(f"bandwidth/{name}", run, turn, alone=True)


def _mixes(setting: Setting) -> Iterator[Job]:
    """Ours beside plain torch, torch.compile and other libraries."""
    device, rounds = setting.device, 1 if setting.small else 20

    def run(workload: workloads.Workload) -> Result:
        (rows,) = comparison.run([workload], rounds, compiled=not setting.small)
        copied = cold_passes.copy_bandwidth(device, 1 << (22 if setting.small else 28), rounds)
        return {"copy bytes per second": copied, "rows": comparison.as_json(rows, copied)}

    sizes = workloads.Sizes(1, 32, 32, torch.float32, device)
    every = workloads.make_workloads(sizes, True) if setting.small else workloads.default_workloads(device)
    for workload in every:
        yield Job(f"mix/{workload.name}", partial(run, workload), MORE, limit=400, alone=True)


def _steps(setting: Setting) -> Iterator[Job]:
    for shape in steps.SHAPES:
        for topology in steps.topologies():
            for compiled in (True, False):
                name = f"step/{shape}/{topology}/{'compiled' if compiled else 'eager'}"
                run = partial(steps.measure, shape, topology, compiled, setting.device, setting.small)
                wanted = any(fnmatchcase(name, goal.job) for goal in STEPS)
                turn = GOALS if wanted else MORE if shape == "llama-1b" else LAST
                yield Job(name, run, turn, limit=600, alone=True)


# How the rest is tested.


def _tests(setting: Setting) -> Iterator[Job]:
    def fails() -> Result:
        raise ValueError("as it was asked to")

    def cannot() -> Result:
        raise Skipped("it never does")

    def killed() -> Result:
        os.kill(os.getpid(), signal.SIGKILL)
        return {}

    def hangs() -> Result:
        time.sleep(1000)
        return {}

    for name, run in {"passes": dict, "fails": fails, "cannot": cannot, "killed": killed}.items():
        yield Job(f"test/{name}", run, hidden=True)
    yield Job("test/hangs", hangs, limit=20, hidden=True)
