"""Hardware counters of the kernels that are furthest from a copy's bandwidth, by Nsight Compute (``ncu``).

    python benchmarks/on_gpu/counters.py --out FILE [--cases NAME ..]

Each case of `bandwidth` runs twice, to compile first. What ncu calls stalls are cycles in which a warp waited, for each
instruction that was issued.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # this tree, whether it is installed or not
sys.path.insert(1, str(Path(__file__).parents[1]))

import torch

from on_gpu import bandwidth

CASES = (
    *("read of 4 streams, sent back", "projection to 24", "projection to 96", "write of 4 streams, projected to 6"),
    *("queries, keys, values of 12", "gather 16 for 4", "4 sums of 16, per token", "sum of 8, RMSNorm"),
    *("gates of 4 streams", "gates of 4 streams, Sinkhorn", "sum of 8"),
)
SECTIONS = ("SpeedOfLight", "Occupancy", "LaunchStats", "WarpStateStats", "SchedulerStats", "MemoryWorkloadAnalysis")
#: What is kept of a kernel: patterns of ncu's names, and ours.
COUNTERS = {
    r"gpu__time_duration\.sum": "time",
    r"launch__registers_per_thread": "registers",
    r"launch__(block|grid)_size": "threads and programs",
    r"launch__shared_mem_per_block_dynamic": "shared memory",
    r"launch__occupancy_limit_\w+": "CTAs on an SM, limit",
    r"launch__waves_per_multiprocessor": "waves",
    r"sm__warps_active\.avg\.pct_of_peak_sustained_active": "occupancy, %",
    r"(gpu__)?dram__throughput.*pct_of_peak_sustained_elapsed": "memory, %",
    r"dram__bytes_(read|write)\.sum(\.per_second)?": "bytes",
    r"sm__throughput.*pct_of_peak_sustained_elapsed": "compute, %",
    r"smsp__issue_active\.avg(\.pct.*|\.per_cycle_active)?": "issue",
    r"smsp__average_warps?_(latency_)?issue_stalled_\w+": "stall",
    r".*local.*": "local memory",
}


def run(name: str, rows: int, width: int) -> None:
    """A case, compiled, then once more where ncu looks."""
    make = bandwidth.cases()[name]
    again, *_ = make(rows, width, torch.device("cuda"))
    again()()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    again()()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def counters(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """What ncu counts of each kernel of a case, in a process of its own."""
    sections = [argument for section in SECTIONS for argument in ("--section", section)]
    command = ["ncu", "--clock-control", "none", "--profile-from-start", "off", "--csv", "--page", "raw", *sections]
    own = ["--one", name, "--rows", str(options.rows), "--width", str(options.width)]
    done = subprocess.run([*command, sys.executable, __file__, *own], capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    if not lines:
        return {"case": name, "error": (done.stdout + done.stderr)[-2000:]}
    _, units, *found = ({k: v for k, v in row.items() if k} for row in _rows(lines))
    return {"case": name, "kernels": [_kept(row, units) for row in found]}


def _rows(lines: list[str]) -> list[dict[str, str]]:
    header = next(csv.reader(io.StringIO(lines[0])))
    return [dict(zip(header, row, strict=False)) for row in csv.reader(io.StringIO("\n".join(lines)))]


def _kept(row: dict[str, str], units: dict[str, str]) -> dict[str, str]:
    kept = {"kernel": row["Kernel Name"][:100]}
    for name, value in row.items():
        if any(re.fullmatch(pattern, name) for pattern in COUNTERS):
            kept[name] = f"{value} {units[name]}".strip()
    return kept


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks/counters.json"))
    parser.add_argument("--cases", nargs="+", default=list(CASES))
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--one", help=argparse.SUPPRESS)  # under ncu
    options = parser.parse_args()
    if options.one:
        run(options.one, options.rows, options.width)
        return 0
    found = [counters(name, options) for name in options.cases]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    for case in found:
        for kernel in case.get("kernels", [{"kernel": case.get("error", "")}]):
            print(case["case"], *(f"{name} {value}" for name, value in kernel.items()), sep="\n    ")
    return int(any("error" in case for case in found))


if __name__ == "__main__":
    sys.exit(main())
