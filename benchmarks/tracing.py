"""How long it takes to find and rewrite residual adds.

    python benchmarks/tracing.py [--out FILE]

Three questions, each answered in seconds of processor time, so that other programs on the machine count less:
tracing one block (median over the blocks of a model), rewiring a 126-layer Llama whose parameters are on the meta
device, and rewiring a 32-layer Llama against ``torch.export`` of the same model, side by side.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

with contextlib.suppress(ModuleNotFoundError):  # where torchvision's operators do not match torch's build
    import torchvision_stub  # noqa: F401

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import rewire
from rewire.patterns.tiny import tiny_config
from rewire.tracing import trace

BLOCKS = {"llama": "model.layers", "gpt2": "transformer.h", "mixtral": "model.layers", "bloom": "transformer.h"}


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


def milliseconds_per_block(model_type: str) -> float:
    """Median over the blocks of a 12-layer model."""
    config = tiny_config(model_type)
    setattr(config, config.attribute_map.get("num_hidden_layers", "num_hidden_layers"), 12)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    blocks = list(model.get_submodule(BLOCKS[model_type]))
    trace(blocks[0])  # looks up each class's source once
    return statistics.median(1e3 * seconds(lambda block=block: trace(block)) for block in blocks)


def against_export(layers: int) -> tuple[float, float]:
    """Seconds for rewire.compile (without validation, which runs the model) and for torch.export."""
    model = llama(layers, "cpu")
    ids = torch.randint(0, 97, (2, 16))
    ours = seconds(lambda: rewire.compile(model, validate=False), repeats=3)
    export = seconds(lambda: torch.export.export(model, (), {"input_ids": ids, "use_cache": False}, strict=False))
    return ours, export


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks/tracing.json"))
    out = parser.parse_args().out
    logging.getLogger("rewire").setLevel(logging.ERROR)

    blocks = {name: milliseconds_per_block(name) for name in BLOCKS}
    rewire.compile(llama(2, "meta"))  # imports
    deep = seconds(lambda: rewire.compile(llama(126, "meta")), repeats=3)
    ours, export = against_export(32)

    table = Table("what", "measured", "goal")
    for name, value in blocks.items():
        table.add_row(f"trace one block, {name}", f"{value:.1f} ms", "<= 10 ms")
    table.add_row("build and rewire Llama, 126 layers, meta", f"{deep:.2f} s", "< 3 s")
    table.add_row("rewire Llama, 32 layers", f"{ours:.2f} s", "")
    table.add_row("torch.export of it", f"{export:.2f} s", "")
    table.add_row("ratio", f"{export / ours:.0f} x", ">= 20 x")
    Console().print(table)

    out.parent.mkdir(parents=True, exist_ok=True)
    results = {
        "milliseconds_per_block": blocks,
        "seconds_126_layers_meta": deep,
        "seconds_32_layers": ours,
        "seconds_export_32_layers": export,
        "ratio": export / ours,
        "machine": {"python": platform.python_version(), "processor": platform.machine()},
        "versions": {m.__name__: m.__version__ for m in (torch, transformers, rewire)},
    }
    out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
