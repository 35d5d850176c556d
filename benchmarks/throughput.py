"""Tokens per second of training steps under torch.compile: plain, and rewired with and without the kernels.

    PYTHONPATH=tests python -P benchmarks/throughput.py --out benchmarks/results/throughput.json [--shape llama-350m]
    PYTHONPATH=tests python -P benchmarks/throughput.py --device cpu --small    # runs anywhere; times mean nothing

Every variant is a process of its own, since kernels are switched on or off where rewire is imported. They compile at
the same time, and then take turns: in each round each of them makes the same few steps (forward, backward, fused
AdamW), so that ratios to the plain model are of the same minute of the same machine.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import multiprocessing
import os
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))  # this tree, whether it is installed or not
sys.path.insert(1, str(Path(__file__).parents[1] / "tests"))

with contextlib.suppress(ModuleNotFoundError):  # where torchvision's operators do not match torch's build
    import torchvision_stub  # noqa: F401

import torch
from rich.console import Console
from rich.table import Table

import rewire
from rewire.bench import harness
from rewire.bench.shapes import batch_for, make_shape
from rewire.patterns.tiny import tiny_model

#: Name -> topology, and its options.
TOPOLOGIES: dict[str, tuple[str, dict[str, Any]]] = {
    "ancre-ingoing": ("ancre-ingoing", {}),
    "denseformer": ("denseformer", {}),
    "muddformer": ("muddformer", {}),
    "muddformer, 3 sources": ("muddformer", {"block": 12}),
    "attnres, block=6": ("attnres", {"block": 6}),
    "hc-dynamic": ("hc-dynamic", {}),
    "mhc": ("mhc", {}),
}
PLAIN = "plain"
#: How torch, cuBLAS and cuDNN say that there was no memory.
_NO_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_INTERNAL_ERROR", "CUDNN_STATUS_ALLOC_FAILED")
#: Steps of a turn that do not count (memory comes back to the process) and that do.
UNCOUNTED, COUNTED = 2, 5


@dataclasses.dataclass(frozen=True)
class Variant:
    """One row of the table.

    Attributes:
        topology: key of `TOPOLOGIES`, or `PLAIN`.
        kernels: whether rewire's Triton kernels run.
        compiled: whether torch.compile does.
    """

    topology: str
    kernels: bool
    compiled: bool = True

    @property
    def name(self) -> str:
        kernels = "" if self.topology == PLAIN or self.kernels else ", no kernels"
        return self.topology + kernels + ("" if self.compiled else ", eager")


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all variants share."""

    shape: str
    batch: int
    length: int
    device: str
    small: bool
    profile: bool


# In the process of a variant.


def work(connection: Connection, variant: Variant, setting: Setting) -> None:
    """Build and compile; then a turn for each message, whose result is sent back."""
    try:
        step, about = _prepare(variant, setting)
        connection.send(about)
        while connection.recv():
            connection.send(_turn(step, torch.device(setting.device)))
        connection.send(_profile(step) if setting.profile and setting.device == "cuda" else {})
    except Exception as error:
        traceback.print_exc()
        connection.send({"error": f"{type(error).__name__}: {error}"[:2000]})


def _prepare(variant: Variant, setting: Setting) -> tuple[Callable[[], None], dict[str, Any]]:
    torch.manual_seed(0)
    device = torch.device(setting.device)
    model = tiny_model("llama").train() if setting.small else make_shape(setting.shape, device, torch.bfloat16)
    if variant.topology != PLAIN:
        topology, options = TOPOLOGIES[variant.topology]
        model = rewire.compile(model, topology, start="paper", validate=False, **options)
    batch, length = (1, 8) if setting.small else (setting.batch, setting.length)
    inputs = batch_for(model, batch, length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0, fused=True)
    compiled = torch.compile(model, backend="eager" if setting.small else "inductor", dynamic=False)
    forward_backward = harness.training_step(compiled if variant.compiled else model, inputs)  # type: ignore[arg-type]

    def step() -> None:
        forward_backward()
        optimizer.step()
        optimizer.zero_grad()

    start = time.perf_counter()
    _until_it_fits(step)
    _wait(device)
    first = time.perf_counter() - start
    _give_back(device)
    parameters = sum(p.numel() for p in model.parameters())
    return step, {"parameters": parameters, "first step seconds": first, "tokens": batch * length}


def _until_it_fits(step: Callable[[], None], tries: int = 30) -> None:
    """While others compile, too, the memory may be theirs."""
    for left in reversed(range(tries)):
        try:
            return step()
        except RuntimeError as error:
            if not left or not any(each in str(error) for each in _NO_MEMORY):
                raise
        gc.collect()
        torch.cuda.empty_cache()
        time.sleep(random.uniform(1, 4))


def _turn(step: Callable[[], None], device: torch.device) -> dict[str, Any]:
    """Seconds of a step, and bytes that were allocated at most, weights and all."""
    for _ in range(UNCOUNTED):
        step()
    _wait(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    for _ in range(COUNTED):
        step()
    _wait(device)
    seconds = (time.perf_counter() - start) / COUNTED
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    _give_back(device)
    return {"seconds": seconds, "peak bytes": peak}


def _profile(step: Callable[[], None]) -> dict[str, Any]:
    """Microseconds and calls of the kernels that take longest in one step."""
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    events = [event for event in profile.key_averages() if event.self_device_time_total]
    events.sort(key=lambda event: -event.self_device_time_total)
    kernels = [[event.key[:120], event.count, round(event.self_device_time_total, 1)] for event in events]
    return {"kernels": kernels[:60], "kernels in all, us": sum(kernel[2] for kernel in kernels)}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _give_back(device: torch.device) -> None:
    """What a process does not use between its turns, for the others."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


# In the process that asks.


@dataclasses.dataclass
class Worker:
    """A variant's process."""

    variant: Variant
    process: Any
    connection: Connection
    turns: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    about: dict[str, Any] = dataclasses.field(default_factory=dict)

    def ask(self, more: bool) -> dict[str, Any]:
        self.connection.send(more)
        return self.answer()

    def answer(self) -> dict[str, Any]:
        try:
            return self.connection.recv()
        except EOFError:
            return {"error": "the process died"}

    @property
    def error(self) -> str | None:
        return next((found["error"] for found in (self.about, *self.turns) if "error" in found), None)


def run(
    variants: Sequence[Variant], setting: Setting, rounds: int, workers: int, limit: float, console: Console
) -> list[Worker]:
    """Compile all variants, ``workers`` at a time, then let them take turns. What is not compiled by then is left out.

    Args:
        limit: seconds in which all have to be compiled.
    """
    end = time.monotonic() + limit
    waiting, running, ready = list(variants), list[Worker](), list[Worker]()
    while (waiting or running) and time.monotonic() < end:
        while waiting and len(running) < workers:
            running.append(_start(waiting.pop(0), setting))
        for worker in list(running):
            if worker.connection.poll(0.05):
                worker.about = worker.answer()
                running.remove(worker)
                ready.append(worker)
                found = worker.error or f"first step {worker.about['first step seconds']:.1f} s"
                console.print(f"{worker.variant.name}: {found}", markup=False)
    for worker in running:
        worker.about = {"error": f"not compiled within {limit:g} s"}
        worker.process.kill()
    going = [worker for worker in ready if not worker.error]
    for _ in range(rounds):
        for worker in going:
            if not worker.error:
                worker.turns.append(worker.ask(True))
    for worker in going:
        if not worker.error:
            worker.about |= worker.ask(False)
        worker.process.join(20)
        worker.process.kill()
    return ready + running


def _start(variant: Variant, setting: Setting) -> Worker:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    # A few compilers each: many variants compile at the same time.
    environment = {"REWIRE_KERNELS": "on" if variant.kernels else "off", "TORCHINDUCTOR_COMPILE_THREADS": "2"}
    with mock.patch.dict(os.environ, environment):  # which it takes over
        process = context.Process(target=work, args=(there, variant, setting))
        process.start()
    there.close()
    return Worker(variant, process, here)


def results(workers: Sequence[Worker]) -> list[dict[str, Any]]:
    """A row for each variant, the ratios to the plain model's turns in the same round."""
    plain = {w.variant.compiled: w.turns for w in workers if w.variant.topology == PLAIN and not w.error}
    rows = []
    for worker in workers:
        row: dict[str, Any] = {"variant": worker.variant.name, **worker.about}
        base = plain.get(worker.variant.compiled)
        if worker.error is None and base is not None:
            ratios = [b["seconds"] / turn["seconds"] for b, turn in zip(base, worker.turns, strict=True)]
            seconds = statistics.median(turn["seconds"] for turn in worker.turns)
            row |= {
                "seconds": [turn["seconds"] for turn in worker.turns],
                "tokens per second": worker.about["tokens"] / seconds,
                "throughput over plain": statistics.median(ratios),
                "range": [min(ratios), max(ratios)],
                "peak bytes": worker.turns[-1]["peak bytes"],
                "peak over plain": _over(worker.turns[-1]["peak bytes"], base[-1]["peak bytes"]),
            }
        rows.append(row)
    return rows


def _over(peak: int | None, plain: int | None) -> float | None:
    return peak / plain if peak and plain else None


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    found = Table("", "tokens/s", "over plain", "range", "peak over plain", "first step, s")
    for row in rows:
        if "seconds" not in row:
            found.add_row(row["variant"], row.get("error", "no plain model beside it")[:60])
            continue
        low, high = row["range"]
        peak = row["peak over plain"]
        found.add_row(
            row["variant"],
            f"{row['tokens per second']:,.0f}",
            f"{row['throughput over plain']:.3f}",
            f"{low:.3f} to {high:.3f}",
            "" if peak is None else f"{peak:.2f}",
            f"{row['first step seconds']:.1f}",
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks/throughput.json"))
    parser.add_argument("--shape", default="llama-350m", help="24 layers, 302M parameters beside the embeddings")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--topologies", nargs="+", default=list(TOPOLOGIES), choices=list(TOPOLOGIES))
    parser.add_argument("--kernels", choices=("on", "off", "both"), default="both")
    parser.add_argument("--eager", action="store_true", help="with the kernels also without torch.compile")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--workers", type=int, default=6, help="variants that compile at the same time")
    parser.add_argument("--limit", type=float, default=420, help="seconds in which all have to be compiled")
    parser.add_argument("--profile", action="store_true", help="add the kernels of a step, by time")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="a tiny model, without Inductor")
    options = parser.parse_args()
    variants = [Variant(PLAIN, True)]
    modes = {"on": (True,), "off": (False,), "both": (True, False)}[options.kernels]
    variants += [Variant(name, kernels) for kernels in modes for name in options.topologies]
    if options.eager:
        variants += [Variant(name, True, compiled=False) for name in (PLAIN, *options.topologies)]
    setting = Setting(options.shape, options.batch, options.length, options.device, options.small, options.profile)
    console = Console(width=None if sys.stdout.isatty() else 140)
    workers = run(variants, setting, options.rounds, options.workers, options.limit, console)
    rows = results(workers)
    console.print(table(rows))
    about = {"machine": harness.machine(torch.device(options.device)), "setting": dataclasses.asdict(setting)}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({**about, "command": sys.argv, "results": rows}, indent=1) + "\n")
    if options.small:
        console.print("These were tiny sizes: times mean nothing.")
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
