"""How long torch.compile takes for a rewired Llama: to trace it, and in all; with an empty cache, and once more.

    python benchmarks/compile_time.py --out benchmarks/results/compile_time.json

Each number is processor time of a process of its own, that of Inductor's workers included: a training step of few
tokens, compiled whole or block by block, less the same step once more. *Traced* is by Dynamo and AOTAutograd alone
(``aot_eager``). *Again* is a second process that finds the first one's caches.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # this tree, whether it is installed or not
sys.path.insert(1, str(Path(__file__).parents[1] / "tests"))

with contextlib.suppress(ModuleNotFoundError):  # where torchvision's operators do not match torch's build
    import torchvision_stub  # noqa: F401

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import rewire
from rewire.bench import harness

PLAIN = "plain"
TOPOLOGIES = ("residual", "denseformer", "ancre-ingoing", "hc-dynamic", "muddformer")
#: The runs of a model, in order, and their backends.
RUNS = {"traced": "aot_eager", "first": "inductor", "again": "inductor"}


def llama(layers: int, topology: str) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4, "vocab_size": 1000}
    model: nn.Module = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=layers))
    return model if topology == PLAIN else rewire.compile(model, topology, start="paper", validate=False)


def processor_time() -> float:
    """Seconds of this process, its threads, and those that it started and that have ended."""
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in spent)


def measure(topology: str, layers: int, by_block: bool, backend: str) -> float:
    """Processor time of a first training step, less a second one, in this process."""
    torch.set_num_threads(1)
    model, ids = llama(layers, topology), torch.arange(128).view(2, 64)
    if by_block:
        for block in model.model.layers:
            block.compile(backend=backend, fullgraph=True)
    else:
        model.compile(backend=backend, fullgraph=True)
    spent = list[float]()
    for _ in range(2):
        began = processor_time()
        model(ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad()
        spent.append(processor_time() - began)
    return spent[0] - spent[1]


def rows_of(topology: str, layers: int, by_block: bool, runs: list[str]) -> dict[str, Any]:
    """All runs of one model, in order, each in a process of its own; they share their caches."""
    found: dict[str, Any] = {"topology": topology, "layers": layers, "by block": by_block}
    with tempfile.TemporaryDirectory() as folder:
        for run in runs:
            settings = {"TORCHINDUCTOR_CACHE_DIR": folder, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
            command = [sys.executable, __file__, "--one", topology, "--layers", str(layers), "--backend", RUNS[run]]
            command += ["--by-block"] * by_block
            done = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True)
            found[run] = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else done.stderr[-2000:]
    return found


def shown(rows: list[dict[str, Any]], runs: list[str]) -> Table:
    """Seconds, and in brackets how many times the plain model's."""
    plain = {(row["layers"], row["by block"]): row for row in rows if row["topology"] == PLAIN}
    table = Table("layers", "compiled", "topology", *runs)
    for row in rows:
        cells = list[str]()
        for run in runs:
            own, base = row[run], plain[row["layers"], row["by block"]][run]
            numbers = isinstance(own, float) and isinstance(base, float)
            cells.append(f"{own:.1f} ({own / base:.2f})" if numbers else "failed")
        table.add_row(str(row["layers"]), "by block" if row["by block"] else "whole", row["topology"], *cells)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks/compile_time.json"))
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 24, 48])
    parser.add_argument("--topologies", nargs="+", default=list(TOPOLOGIES))
    parser.add_argument("--runs", nargs="+", default=list(RUNS), choices=list(RUNS), help="in this order")
    parser.add_argument("--by-block", action="store_true", help="compile each block by itself")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # in a model's process
    parser.add_argument("--backend", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one, options.layers[0], options.by_block, options.backend)))
        return 0
    wanted = [(name, layers) for layers in options.layers for name in (PLAIN, *options.topologies)]
    console = Console(width=None if sys.stdout.isatty() else 160)
    rows = [
        rows_of(name, layers, options.by_block, options.runs)
        for name, layers in track(wanted, "compiling", console=console, transient=True)
    ]
    console.print(shown(rows, options.runs))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    about = {"machine": harness.machine(torch.device("cpu")), "command": sys.argv}
    options.out.write_text(json.dumps(about | {"results": rows}, indent=1) + "\n")
    return int(any(isinstance(row[run], str) for row in rows for run in options.runs))


if __name__ == "__main__":
    sys.exit(main())
