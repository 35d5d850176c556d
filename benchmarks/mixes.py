"""Single mixes, ours beside plain torch, torch.compile and other libraries: bytes per second, and what they cost.

    python benchmarks/mixes.py [--out FILE] [--plot FILE] [--rounds N] [--eager]

The same as ``rewire bench --mixes --compiled``. Sizes depend on the device: see docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.progress import track

from rewire.bench import comparison, harness, workloads
from rewire.plotting import plot_rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks/mixes.json"))
    parser.add_argument("--plot", type=Path, default=Path("out/benchmarks/mixes.png"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    arguments = parser.parse_args()
    device = harness.default_device()
    bandwidth = harness.copy_bandwidth(device)
    todo = track(workloads.default_workloads(device), f"mixes on {device}")
    rows = [row for found in comparison.run(todo, arguments.rounds, not arguments.eager) for row in found]
    Console(width=140).print(comparison.table(rows, bandwidth))
    comparison.save(arguments.out, rows, bandwidth, device)
    plot_rates(comparison.rates(rows), bandwidth, arguments.plot)


if __name__ == "__main__":
    main()
