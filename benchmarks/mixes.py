"""Single mixes, ours beside plain torch, torch.compile and other libraries: bytes per second, and what they cost.

    python benchmarks/mixes.py [--eager] [--dtype float16] [--batch N] [--length N] [--device cpu] [--rounds N]

Sizes depend on the device: see docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from on_mixes import comparison, workloads
from on_mixes.chart import plot_rates
from on_mixes.cold_passes import copy_bandwidth
from rich.console import Console
from rich.progress import track

from rewire.bench import harness


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks/mixes.json"))
    parser.add_argument("--plot", type=Path, default=Path("out/benchmarks/mixes.png"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="of states")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--length", type=int, help="tokens of a sequence")
    parser.add_argument("--device", type=torch.device, default=harness.default_device())
    given = parser.parse_args()
    bandwidth = copy_bandwidth(given.device)
    dtype = given.dtype and getattr(torch, given.dtype)
    found = workloads.default_workloads(given.device, dtype, given.batch, given.length)
    todo = track(found, f"mixes on {given.device}")
    rows = [row for each in comparison.run(todo, given.rounds, not given.eager) for row in each]
    Console(width=140).print(comparison.table(rows, bandwidth))
    comparison.save(given.out, rows, bandwidth, given.device)
    plot_rates(comparison.rates(rows), bandwidth, given.plot)


if __name__ == "__main__":
    main()
