"""What few connections cost beside the plain model and beside all of them: time of a step, and hidden states kept.

    python benchmarks/few.py [--out FILE] [--repeats N] [--layers N] [--width N]

A pre-norm transformer of 24 layers of width 512, whose second to last layer and output (for ANCRe, two layers) read
three named states; and the same topology with all of its connections. Steps (forward, backward) are timed in turn with
the plain model's; what is reported is the median over rounds of the ratio within a round, as other programs on the
machine slow all of a round down. A second copy of the plain model shows what such a median is worth.
*Kept* is what autograd keeps for backward beside what the plain model has, in hidden states, each memory once.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import rewire

BATCH, LENGTH, HEADS = 2, 128, 8
SOURCES = ["x0", 7, 9]
READERS: dict[str, list[int | str]] = {"ancre-ingoing": [12, -2]}
TOPOLOGIES = ("ancre-ingoing", "denseformer", "grn-v3", "muddformer", "attnres")
CHANNELS = {"muddformer": {"channels": ["v", "shortcut"]}}


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers, self.norm = nn.ModuleList(Layer(width) for _ in range(layers)), nn.RMSNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def step(model: nn.Module, x: Tensor) -> float:
    """Seconds of forward and backward."""
    model.zero_grad(set_to_none=True)
    start = time.perf_counter()
    model(x).square().mean().backward()
    return time.perf_counter() - start


def kept(model: nn.Module, x: Tensor) -> int:
    """Bytes of all activations that autograd keeps, each memory once."""
    memory: dict[int, int] = {}
    learned = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        if storage.data_ptr() not in learned:
            memory[storage.data_ptr()] = storage.nbytes()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        out = model(x)
    total = sum(memory.values())
    del out
    return total


def models(layers: int, width: int) -> dict[str, nn.Module]:
    """The plain model, and it with few and with all connections of each topology."""
    torch.manual_seed(0)
    plain = Transformer(layers, width)
    found: dict[str, nn.Module] = {"plain": plain, "plain, again": copy.deepcopy(plain)}
    for name in TOPOLOGIES:
        units, options = READERS.get(name, [-2, "output"]), CHANNELS.get(name, {})
        few = {"units": units, "sources": SOURCES, **options}
        found[f"{name}, few"] = rewire.compile(plain, name, granularity="block", validate=False, **few)
        found[f"{name}, all"] = rewire.compile(plain, name, granularity="block", validate=False)
    return found


def measured(layers: int, width: int, repeats: int) -> list[dict[str, Any]]:
    """A row for each model."""
    x, compared = torch.randn(BATCH, LENGTH, width), models(layers, width)
    state, bytes_kept = x.nbytes, {name: kept(model, x) for name, model in compared.items()}
    times: dict[str, list[float]] = {name: [] for name in compared}
    for model in compared.values():
        step(model, x)
    for _ in track(range(repeats), "steps in turn"):
        for name, model in compared.items():
            times[name].append(step(model, x))
    ratios = {
        name: [own / base for own, base in zip(each, times["plain"], strict=True)] for name, each in times.items()
    }
    return [
        {
            "model": name,
            "step_ms": round(1e3 * statistics.median(times[name]), 1),
            "over_plain": round(statistics.median(ratios[name]), 3),
            "kept_states": round((bytes_kept[name] - bytes_kept["plain"]) / state, 2),
        }
        for name in compared
    ]


def table(rows: list[dict[str, Any]]) -> Table:
    shown = Table("model", "step, ms", "over plain", "kept, hidden states")
    for row in rows:
        shown.add_row(row["model"], f"{row['step_ms']}", f"{row['over_plain']:.3f}", f"{row['kept_states']:.2f}")
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=512)
    options = parser.parse_args()
    rows = measured(options.layers, options.width, options.repeats)
    Console().print(table(rows))
    if options.out:
        about = {"torch": torch.__version__, "machine": platform.machine(), "threads": torch.get_num_threads()}
        sizes = {"layers": options.layers, "width": options.width, "batch": BATCH, "length": LENGTH}
        options.out.write_text(json.dumps({**about, **sizes, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
