"""What rewiring adds to a training step on a CPU: a 12-layer Llama, plain and rewired, in one run.

    python benchmarks/cpu_step.py [TOPOLOGY ..] [--compiled] [--vocabulary N] [--threads N] [--rounds N] [--out FILE]

A round runs plain, A, B, .., and all of them again in reverse, and adds up the two times of each: what slows down or
speeds up evenly during a round then counts for all alike. Ratios are taken within rounds, to the mean of the plain
model's two times: *plain, again* is that model once more, and what its own ratio to the first differs from 1 is noise.
*Middle* is the mean of the middle three fifths of the ratios, with its standard error. A step is forward, backward and
AdamW. *in place* is the same model with sums that are made in place and left to autograd.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

with contextlib.suppress(ModuleNotFoundError):  # where torchvision's operators do not match torch's build
    import torchvision_stub  # noqa: F401

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from topologies import LAYERS, LENGTH, WIDTH, llama
from torch import nn

import rewire
from rewire.bench import harness
from rewire.kernels.cpu import plain as by_hand

BATCH = 8
CPU = torch.device("cpu")
PLAIN, AGAIN = "plain", "plain, again"


def steps(plain: nn.Module, topologies: list[str], compiled: bool) -> dict[str, Callable[[], None]]:
    """One training step for each model, by name."""
    ids = torch.randint(plain.config.vocab_size, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))  # type: ignore[union-attr]
    models: dict[str, Any] = {PLAIN: plain}
    for name in topologies:
        models[name] = rewire.compile(plain, name, start="paper", validate=False)
    if compiled:
        models = {name: torch.compile(model, fullgraph=True) for name, model in models.items()}
    todo = {name: step(model, ids) for name, model in [*models.items(), (AGAIN, models[PLAIN])]}
    if not compiled:  # torch.compile leaves all of them to autograd
        todo |= {f"{name}, in place": left_to_autograd(todo[name]) for name in topologies if name != "residual"}
    return todo


def step(model: nn.Module, ids: torch.Tensor) -> Callable[[], None]:
    """Forward, backward, and an optimiser that leaves the weights as they are: models share them."""
    forward_and_backward = harness.training_step(model, ((), {"input_ids": ids, "labels": ids}))
    optimizer = torch.optim.AdamW(rewire.parameter_groups(model, lr=0.0, weight_decay=0.1), fused=True)

    def run() -> None:
        forward_and_backward()
        optimizer.step()

    return run


def left_to_autograd(run: Callable[[], None]) -> Callable[[], None]:
    """A step whose sums are made in place, with the gradients that autograd gives: the simple way."""

    def in_place() -> None:
        with mock.patch.object(by_hand, "WORTHWHILE", sys.maxsize):
            run()

    return in_place


def there_and_back(todo: Mapping[str, Callable[[], None]]) -> dict[str, float]:
    """Seconds of one round, for each step."""
    there = harness.side_by_side(todo, 1, CPU, warmup=0)
    back = harness.side_by_side(dict(reversed(todo.items())), 1, CPU, warmup=0)
    return {name: there[name].median + back[name].median for name in todo}


def measure(todo: Mapping[str, Callable[[], None]], rounds: int, title: str) -> list[dict[str, Any]]:
    there_and_back(todo)
    found = [there_and_back(todo) for _ in track(range(rounds), title)]
    rows = []
    for name in todo:
        ratios = [seconds[name] / plain_seconds(seconds, name) for seconds in found]
        row = {"mode": title, "model": name, "seconds": [seconds[name] / 2 for seconds in found]}
        rows.append({**row, "over plain": quartiles(ratios), "middle": middle(ratios)})
    return rows


def plain_seconds(seconds: Mapping[str, float], name: str) -> float:
    """What the time of ``name`` is divided by."""
    return seconds[PLAIN] if name in (PLAIN, AGAIN) else (seconds[PLAIN] + seconds[AGAIN]) / 2


def middle(values: list[float]) -> list[float]:
    """Mean of the middle three fifths, and its standard error (of a trimmed mean: Tukey and McLaughlin, 1963)."""
    cut = len(values) // 5
    ordered = sorted(values)
    kept = ordered[cut : len(values) - cut]
    winsorized = [min(max(value, kept[0]), kept[-1]) for value in ordered]
    spread = statistics.stdev(winsorized) if len(values) > 1 else 0.0
    return [statistics.mean(kept), spread / (1 - 2 * cut / len(values)) / len(values) ** 0.5]


def quartiles(values: list[float]) -> list[float]:
    """First quartile, median, third quartile."""
    return statistics.quantiles(values, n=4) if len(values) > 1 else values * 3


def table(rows: list[dict[str, Any]]) -> Table:
    result = Table("mode", "model", "step", "over plain", "quartiles", "middle")
    for row in rows:
        low, median, high = (f"{100 * (ratio - 1):+.1f}%" for ratio in row["over plain"])
        step = f"{1e3 * statistics.median(row['seconds']):.0f} ms"
        mean, error = row["middle"]
        mid = f"{100 * (mean - 1):+.1f}% ± {100 * error:.1f}"
        result.add_row(row["mode"], row["model"], step, median, f"{low} to {high}", mid)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("topologies", nargs="*", default=["residual", "ancre-ingoing"])
    parser.add_argument("--compiled", action="store_true", help="whole models under torch.compile, too")
    parser.add_argument("--vocabulary", type=int, default=32000, help="its head is a large part of the step")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks/cpu_step.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    plain = llama(arguments.vocabulary)
    rows = measure(steps(plain, arguments.topologies, compiled=False), arguments.rounds, "eager")
    if arguments.compiled:
        rows += measure(steps(plain, arguments.topologies, compiled=True), arguments.rounds, "torch.compile")
    Console(width=120).print(table(rows))
    settings = {"tokens": [BATCH, LENGTH], "width": WIDTH, "layers": LAYERS, "vocabulary": arguments.vocabulary}
    harness.save(arguments.out, [{**settings, **row} for row in rows], CPU)


if __name__ == "__main__":
    main()
