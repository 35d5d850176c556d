"""How long it takes to find and rewrite residual adds.

    python benchmarks/rewiring.py [--out FILE]

In seconds of processor time, so that other programs on the machine count less: rewiring a 32-layer Llama (without
validation, which runs the model) against ``torch.export`` of the same model, side by side; rewiring a 126-layer Llama
whose parameters are on the meta device.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import platform
import time
from collections.abc import Callable
from pathlib import Path

with contextlib.suppress(ModuleNotFoundError):  # where torchvision's operators do not match torch's build
    import torchvision_stub  # noqa: F401

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

import rewire


def seconds(function: Callable[[], object], repeats: int = 1) -> float:
    """Processor time of one call: the least of several."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return min(times)


def llama(layers: int, device: str) -> LlamaForCausalLM:
    config = LlamaConfig(
        num_hidden_layers=layers, hidden_size=64, intermediate_size=128, num_attention_heads=4, vocab_size=97,
    )  # fmt: skip
    with torch.device(device):
        return LlamaForCausalLM(config)


def measure() -> dict[str, float]:
    """Seconds by what was measured; and ``ratio``: how many times faster than torch.export rewriting is."""
    rewire.compile(llama(2, "meta"), validate=False)  # imports
    model, ids = llama(32, "cpu"), torch.randint(0, 97, (2, 16))
    ours = seconds(lambda: rewire.compile(model, validate=False), repeats=3)
    export = seconds(lambda: torch.export.export(model, (), {"input_ids": ids, "use_cache": False}, strict=False))
    deep = llama(126, "meta")
    return {
        "rewire Llama, 32 layers": ours,
        "torch.export of it": export,
        "ratio": export / ours,
        "rewire and validate Llama, 32 layers": seconds(lambda: rewire.compile(model)),
        "rewire Llama, 126 layers, meta": seconds(lambda: rewire.compile(deep, validate=False), repeats=3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks/rewiring.json"))
    out = parser.parse_args().out
    logging.getLogger("rewire").setLevel(logging.ERROR)

    measured = measure()
    table = Table("what", "measured")
    for name, value in measured.items():
        table.add_row(name, f"{value:.0f} x" if name == "ratio" else f"{value:.2f} s")
    Console().print(table)

    out.parent.mkdir(parents=True, exist_ok=True)
    machine = {"python": platform.python_version(), "processor": platform.machine()}
    versions = {m.__name__: m.__version__ for m in (torch, transformers, rewire)}
    out.write_text(json.dumps({**measured, "machine": machine, "versions": versions}, indent=2) + "\n")


if __name__ == "__main__":
    main()
