"""How long it takes to find and rewrite residual adds.

    python benchmarks/rewiring.py [--out FILE] [--validation]

In seconds of processor time, so that other programs on the machine count less: rewiring a 32-layer Llama (without
validation, which runs the model) against ``torch.export`` of the same model, side by side; rewiring a 126-layer Llama
whose parameters are on the meta device. With ``--validation``: the most bytes that rewiring with validation holds at
once, over the model's, for two Llamas in two precisions.
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
from memory import Peak
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


def llama(layers: int, device: str, width: int = 64, inner: int = 128, vocabulary: int = 97) -> LlamaForCausalLM:
    config = LlamaConfig(
        num_hidden_layers=layers, hidden_size=width, intermediate_size=inner, num_attention_heads=4,
        vocab_size=vocabulary,
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


def validation() -> dict[str, float]:
    """Bytes that validation holds over the model's, by parameters and precision."""
    held = {}
    for layers, width in ((12, 512), (22, 1024)):
        for dtype in (torch.float32, torch.bfloat16):
            model = llama(layers, "cpu", width, width * 11 // 4, 32000).to(dtype)
            parameters = sum(p.numel() for p in model.parameters())
            with Peak() as counted:
                rewire.compile(model, example_inputs={"input_ids": torch.zeros(2, 16, dtype=torch.long)})
            held[f"{parameters / 1e6:.0f}M, {dtype}"] = counted.most / (parameters * dtype.itemsize)
    return held


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks/rewiring.json"))
    parser.add_argument("--validation", action="store_true")
    args = parser.parse_args()
    out = args.out
    logging.getLogger("rewire").setLevel(logging.ERROR)

    measured = validation() if args.validation else measure()
    table = Table("what", "measured")
    for name, value in measured.items():
        unit = "models" if args.validation else "x" if name == "ratio" else "s"
        table.add_row(name, f"{value:.2f} {unit}")
    Console().print(table)

    out.parent.mkdir(parents=True, exist_ok=True)
    machine = {"python": platform.python_version(), "processor": platform.machine()}
    versions = {m.__name__: m.__version__ for m in (torch, transformers, rewire)}
    out.write_text(json.dumps({**measured, "machine": machine, "versions": versions}, indent=2) + "\n")


if __name__ == "__main__":
    main()
