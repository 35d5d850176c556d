"""Two ways to compile a rewired model, side by side: its edited source, and flat graphs rewritten by `rewire.Backend`.

    python benchmarks/backend.py [TOPOLOGY ..] [--rounds N] [--out FILE]

*Source* is ``torch.compile(rewire.compile(model, topology))``, *graph* is ``torch.compile(model,
backend=rewire.Backend(topology))``, *plain* the model under ``torch.compile`` alone; all by Inductor, of a 12-layer
Llama. *First step* is everything up to the end of the first forward and backward pass: rewiring, validation, capture,
code. Steps (forward, backward) are measured in turn. Both ways have to give the same loss.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

with contextlib.suppress(ModuleNotFoundError):  # where torchvision's operators do not match torch's build
    import torchvision_stub  # noqa: F401

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from topologies import BATCH, LENGTH, llama
from torch import nn

import rewire
from rewire.bench import harness

CPU = torch.device("cpu")
PLAIN = "plain"


def compiled(way: str, topology: str, model: nn.Module, inputs: Any) -> Callable[..., Any]:
    if way == PLAIN:
        return torch.compile(model)
    if way == "source":
        return torch.compile(rewire.compile(model, topology, example_inputs=inputs))
    return torch.compile(model, backend=rewire.Backend(topology))


def measure(topology: str, rounds: int) -> list[dict[str, Any]]:
    torch.compiler.reset()
    model = llama()
    ids = torch.randint(1000, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    inputs = ((), {"input_ids": ids, "labels": ids})
    steps, first, losses = dict[str, Callable[[], None]](), dict[str, float](), dict[str, float]()
    for way in (PLAIN, "source", "graph"):
        with torch._inductor.utils.fresh_cache():
            begin = time.perf_counter()
            run: Any = compiled(way, topology, model, inputs)
            steps[way] = harness.training_step(run, inputs)
            steps[way]()
            first[way] = time.perf_counter() - begin
            losses[way] = float(run(**inputs[1]).loss.detach())
    if abs(losses["graph"] - losses["source"]) > 1e-4 * abs(losses["source"]):
        raise RuntimeError(f"{topology}: the loss is {losses['graph']} one way and {losses['source']} the other")
    found = harness.side_by_side(steps, rounds, CPU)
    return [
        {
            "topology": topology,
            "way": way,
            "first step": first[way],
            "over plain": found[way].ratio(found[PLAIN]),
            **harness.as_json({way: found[way]})[way],
        }
        for way in steps
    ]


def table(rows: list[dict[str, Any]]) -> Table:
    result = Table("topology", "way", "first step", "step over plain")
    for row in rows:
        result.add_row(row["topology"], row["way"], f"{row['first step']:.0f} s", f"{row['over plain']:.2f}")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("topologies", nargs="*", default=["ancre-ingoing", "grn-v3", "dca", "hc-dynamic"])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks/backend.json"))
    arguments = parser.parse_args()
    rows = [
        row for name in track(arguments.topologies, "compiling, measuring") for row in measure(name, arguments.rounds)
    ]
    Console(width=100).print(table(rows))
    harness.save(arguments.out, rows, CPU)


if __name__ == "__main__":
    main()
