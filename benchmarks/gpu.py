"""Everything that has to be known of one GPU: checks, bandwidths, mixes beside other libraries, training steps.

    python benchmarks/gpu.py [--out FILE] [--jobs PATTERN ..] [--budget SECONDS] [--retry] [--list] [--tables]
    python benchmarks/gpu.py --device cpu --small    # at tiny sizes, in Triton's interpreter; times mean nothing

Each job runs in a process of its own and has a limit in time; when it ends, a line is written to the file. Jobs that
have one there are not run again, so that any number of calls with budgets makes one run. A job that fails costs its own
line, which says why; ``--retry`` runs it again. What matters most comes first. Ends with 1 if a job failed.

With ``--here`` no job waits for the start of a process: each runs once in a process of its own, several at a time,
which fills the caches of compiled kernels, and is then measured in this one.

A pattern is the start of a name, as of a path (``check``, ``step/llama-1b/dca``), or has wildcards (``step/*/eager``).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import secrets
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # this tree, whether it is installed or not
sys.path.insert(1, str(Path(__file__).parents[1] / "tests"))

with contextlib.suppress(ModuleNotFoundError):  # where torchvision's operators do not match torch's build
    import torchvision_stub  # noqa: F401

import torch
from on_gpu import goals, processes
from on_gpu.jobs import Setting, all_jobs, chosen
from on_gpu.processes import Job, Record
from rich.console import Console
from rich.progress import Progress

from rewire.bench import harness


def environment(setting: Setting) -> dict[str, str]:
    """Of the processes of jobs. Without a GPU, kernels run in Triton's interpreter."""
    interpreted = {"TRITON_INTERPRET": "1"} if setting.device.type == "cpu" else {}
    return {**os.environ, "PYTHONUNBUFFERED": "1"} | interpreted


def unfinished(jobs: list[Job], known: dict[str, Record], retry: bool) -> list[Job]:
    """Jobs without a record; with ``retry`` those that failed, too."""
    return [job for job in jobs if job.name not in known or (retry and known[job.name]["status"] == "failed")]


def run(
    console: Console, jobs: list[Job], setting: Setting, about: dict[str, Any], options: argparse.Namespace
) -> dict[str, Record]:
    """Run the jobs and write their records; returns them."""
    command = [sys.executable, str(Path(__file__)), "--seed", str(setting.seed), "--device", str(setting.device)]
    command += ["--small"] * setting.small + ["--one"]
    found = {}
    with Progress(console=console) as progress:
        bar = progress.add_task("jobs", total=len(jobs))
        how = command, environment(setting), options.workers, options.budget
        for record in here(jobs, setting, *how) if options.here else processes.run_all(jobs, *how):
            processes.append(options.out, record | {"setting": about})
            found[record["job"]] = record
            reason = f": {record['error']}" if "error" in record else ""
            line = f"{record['status']:8}{record['seconds']:7.1f} s  {record['job']}{reason}"
            progress.console.print(line, markup=False, highlight=False)
            progress.advance(bar)
    return found


def here(
    jobs: list[Job], setting: Setting, command: Sequence[str], environment: dict[str, str], workers: int, budget: float
) -> Iterator[Record]:
    """Run the jobs one after the other in this process, once all have run elsewhere to compile their kernels."""
    end = time.monotonic() + budget
    together = [dataclasses.replace(job, alone=False) for job in jobs]
    for _ in processes.run_all(together, command, environment, workers, budget / 2):
        pass
    for job in jobs:
        if time.monotonic() > end:
            return
        start = time.monotonic()
        found = processes.outcome(job, lambda: {"machine": harness.machine(setting.device)})
        yield {"job": job.name, "seconds": round(time.monotonic() - start, 1), **found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks/gpu.jsonl"))
    parser.add_argument("--jobs", nargs="+", default=[], metavar="PATTERN")
    parser.add_argument("--budget", type=float, default=float("inf"), metavar="SECONDS", help="all ends after these")
    parser.add_argument("--retry", action="store_true", help="run what failed again")
    parser.add_argument("--list", action="store_true", help="print the jobs and what is known of them, and end")
    parser.add_argument("--tables", action="store_true", help="print what is known, and end")
    parser.add_argument("--workers", type=int, default=min(8, os.cpu_count() or 1), help="checks at the same time")
    parser.add_argument("--here", action="store_true", help="measure in this process")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="tiny sizes")
    parser.add_argument("--seed", type=int, help="of the checks; that of the file, or fresh")
    parser.add_argument("--one", nargs=2, metavar=("RESULT", "JOB"), help=argparse.SUPPRESS)  # in a job's process
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU here; `--device cpu --small` runs tiny sizes on the CPU.")

    def of(seed: int) -> Setting:
        return Setting(torch.device(options.device), options.small, seed)

    if options.here and options.device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        parser.error("--here on a CPU: set TRITON_INTERPRET=1.")  # it is read where rewire is imported
    if options.one:
        result, name = options.one
        (job,) = (job for job in all_jobs(of(options.seed)) if job.name == name)
        return processes.run_here(job, Path(result), lambda: {"machine": harness.machine(torch.device(options.device))})

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # jobs that run are ended
    records = processes.read(options.out)
    seeds = [record["setting"]["seed"] for record in records]
    seed = options.seed if options.seed is not None else seeds[-1] if seeds else secrets.randbits(31)
    setting = of(seed)
    about = {"device": options.device, "small": options.small}
    # What another device or size has written is left alone.
    known = processes.latest([record for record in records if about.items() <= record["setting"].items()])
    jobs = chosen(all_jobs(setting), options.jobs)
    if not jobs:
        parser.error(f"no job is called {' or '.join(options.jobs)}; --list prints them.")
    console = Console(width=None if sys.stdout.isatty() else 160)
    if options.list:
        for job in jobs:
            console.print(f"{known.get(job.name, {}).get('status', ''):8}{job.name}", markup=False, highlight=False)
        return 0
    if not options.tables:
        known |= run(console, unfinished(jobs, known, options.retry), setting, about | {"seed": seed}, options)
    names = {job.name for job in jobs}
    found = {name: record for name, record in known.items() if name in names}
    goals.show(console, found)
    if options.small:
        console.print("These were tiny sizes: times mean nothing.")
    failed = sum(record["status"] == "failed" for record in found.values())
    console.print(f"{len(found)} of {len(jobs)} jobs have ended, {failed} failed: {options.out}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
