"""Rewire thousands of random residual nets (tests/fuzz), and count: right, refused, wrong.

    PYTHONPATH=tests python -P benchmarks/fuzz.py [--nets 5000] [--jobs 2] [--seed 0] [--unvalidated] [--out FILE]

Every net is run by itself first; those that do not run, and those with a single residual add, are not counted. Nets
that are wrong are printed with the seed that makes them. Of those that are refused, some do not fit: what they do has
no meaning with learned connections, or leaves no two adds that follow each other (`DOES_NOT_FIT`).
"""

from __future__ import annotations

import argparse
import collections
import functools
import json
import logging
import multiprocessing
import random
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
from fuzz.checking import check
from fuzz.nets import ADDS, ASIDES, BODIES, RETURNS, Net
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import rewire

#: Words of the errors that refuse nets for what they are, and what that is.
DOES_NOT_FIT = {
    "gradients do not pass from the residual add": "gradients are cut between two adds",
    "began with gradients switched on, and they are off": "gradients are cut between two adds",
    "has the same memory and is read afterwards": "a state is written to in place, and read under another name",
}
_SINGLE = "a single residual add: there is nothing"


def net_of(seed: int) -> Net:
    """The random net of a number."""
    draw = random.Random(seed)
    forwards = []
    for _ in range(draw.choice([1, 1, 2])):
        parts = [draw.choice(list(ADDS)) for _ in range(draw.choice([1, 1, 2, 2, 3]))]
        for _ in range(draw.choice([0, 0, 1, 2])):
            parts.insert(draw.randrange(len(parts) + 1), draw.choice(list(ASIDES)))
        forwards.append(tuple(parts))
    order = tuple(draw.randrange(len(forwards)) for _ in range(draw.choice([1, 2, 3, 4])))
    return Net(tuple(forwards), order, draw.choice(list(BODIES)), draw.choice(list(RETURNS)))


def outcome(seed: int, validate: bool = True) -> tuple[int, str, str]:
    """The number, ``right``, ``refused``, ``does not fit``, ``wrong`` or ``not counted``, and why."""
    net = net_of(seed)
    if net.adds < 2:
        return seed, "not counted", "a single residual add"
    with tempfile.TemporaryDirectory() as folder:
        try:
            result = check(net, Path(folder), validate)
        except Exception as error:  # an assertion, or what is no RewireError: both are faults
            return seed, "wrong", f"{type(error).__name__}: {error}"
    if result == "invalid":
        return seed, "not counted", "it does not run"
    if result == "right":
        return seed, "right", ""
    unfit = next((why for words, why in DOES_NOT_FIT.items() if words in result), "")
    left = [line for line in result.splitlines() if line.startswith("  ")]
    if left and all(_SINGLE in line for line in left):
        unfit = "no two adds follow each other"
    return (seed, "does not fit", unfit) if unfit else (seed, "refused", result)


def quiet() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    sys.setrecursionlimit(10_000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", type=int, default=5000)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0, help="of the first net")
    parser.add_argument("--unvalidated", action="store_true", help="rewire with validate=False")
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks/fuzz.json"))
    given = parser.parse_args()

    start, console = time.time(), Console()
    results: list[tuple[int, str, str]] = []
    spawn = multiprocessing.get_context("spawn")
    with spawn.Pool(given.jobs, quiet, maxtasksperchild=500) as pool, Progress(console=console) as progress:
        task = progress.add_task("nets", total=given.nets)
        one = functools.partial(outcome, validate=not given.unvalidated)
        for result in pool.imap_unordered(one, range(given.seed, given.seed + given.nets), chunksize=8):
            results.append(result)
            progress.advance(task)
            if result[1] == "wrong":
                console.print(f"wrong: net {result[0]}: {result[2]}", markup=False)

    counts = collections.Counter(kind for _, kind, _ in results)
    reasons = collections.Counter(why.partition(":")[0] for _, kind, why in results if kind == "refused")
    unfit = collections.Counter(why for _, kind, why in results if kind == "does not fit")
    counted = sum(counts[kind] for kind in ("right", "refused", "wrong"))
    table = Table("outcome", "nets", "of those that fit")
    for kind in ("right", "refused", "wrong"):
        table.add_row(kind, str(counts[kind]), f"{counts[kind] / max(counted, 1):.1%}")
    for why, count in unfit.items():
        table.add_row(f"refused: does not fit, {why}", str(count), "")
    table.add_row("not counted", str(counts["not counted"]), "")
    console.print(table)
    console.print(f"refused because: {dict(reasons)}; {time.time() - start:.0f} s", markup=False)

    given.out.parent.mkdir(parents=True, exist_ok=True)
    settings = {"nets": given.nets, "seed": given.seed, "validated": not given.unvalidated}
    settings |= {"rewire": rewire.__version__, "torch": torch.__version__}
    found = {"counts": counts, "refused because": reasons, "does not fit": unfit}
    found["wrong"] = [r for r in results if r[1] == "wrong"]
    given.out.write_text(json.dumps({**settings, **found}, indent=2) + "\n")
    sys.exit(bool(counts["wrong"]))


if __name__ == "__main__":
    main()
