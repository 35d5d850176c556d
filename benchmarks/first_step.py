"""The first training step of rewired models in eager mode, with kernels that `rewire.precompile` compiled, and without.

    python benchmarks/first_step.py --out benchmarks/results/first_step.json

Each model in a process of its own with an empty cache of Triton's. Those that compile in their first step do so at the
same time, as they use one processor each; then `precompile`, one model after the other, has all processors.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

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

PLAIN = "plain"
TOPOLOGIES = ("ancre-ingoing", "denseformer", "hc-dynamic", "mhc", "attnres", "muddformer", "dca")


def measure(topology: str, ahead: bool, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of the first step and of the second, in this process."""
    device = torch.device(options.device)
    plain = tiny_model("llama").train() if options.small else make_shape(options.shape, device, torch.bfloat16)
    inputs = batch_for(plain, *((1, 8) if options.small else (options.batch, options.length)))
    harness.training_step(plain, inputs)()  # torch's own start
    found: dict[str, Any] = {"topology": topology}
    model = plain
    if topology != PLAIN:
        began = time.perf_counter()
        model = rewire.compile(plain, topology, start="paper", validate=False)
        found["rewiring"] = time.perf_counter() - began
    if ahead:
        began = time.perf_counter()
        found["kernels"] = rewire.precompile(model, inputs)
        found["precompile"] = time.perf_counter() - began
    step = harness.training_step(model, inputs)
    for name in ("first step", "second step"):
        began = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        found[name] = time.perf_counter() - began
    return found


def apart(topology: str, ahead: bool, given: list[str]) -> dict[str, Any]:
    """`measure` in a process of its own."""
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"TRITON_CACHE_DIR": cache}
        command = [sys.executable, __file__, *given, "--one", topology, *["--ahead"] * ahead]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        return {"topology": topology, "error": done.stderr[-2000:]}
    return json.loads(done.stdout.splitlines()[-1])


def table(rows: list[dict[str, Any]]) -> Table:
    columns = ("first step, s", "kernels", "precompile, s", "first step after it, s", "second step, s")
    found = Table("", *columns)
    for row in rows:
        later = row.get("with precompile", {})
        numbers = (row.get("first step"), later.get("kernels"), *map(later.get, ("precompile", "first step")))
        cells = ["" if x is None else f"{x:.2f}" if isinstance(x, float) else str(x) for x in numbers]
        found.add_row(row["topology"], *cells, f"{row['second step']:.2f}" if "second step" in row else row["error"])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks/first_step.json"))
    parser.add_argument("--shape", default="llama-350m", help="24 layers of width 1024")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--topologies", nargs="+", default=list(TOPOLOGIES))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="a tiny model")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # in a model's process
    parser.add_argument("--ahead", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one, options.ahead, options)))
        return 0
    given = ["--shape", options.shape, "--batch", str(options.batch), "--length", str(options.length)]
    given += ["--device", options.device, *["--small"] * options.small]
    names = [PLAIN, *options.topologies]
    with ThreadPoolExecutor(len(names)) as pool:
        rows = [*pool.map(lambda name: apart(name, False, given), names)]
    if options.device == "cuda":  # nothing is compiled for a CPU
        for row in rows[1:]:
            row["with precompile"] = apart(row["topology"], True, given)
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table(rows))
    about = {"machine": harness.machine(torch.device(options.device)), "command": sys.argv}
    about |= {name: getattr(options, name) for name in ("shape", "batch", "length", "small")}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(about | {"results": rows}, indent=1) + "\n")
    return int(any("error" in row or "error" in row.get("with precompile", {}) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
