"""Are the connections that `rewire.sparsify` finds better than random ones, and than the nearest ones?

    python benchmarks/sparse.py [--topology NAME] [--keep K] [--layers N] [--width N] [--steps N] [--seeds N]

A byte language model (Llama, texts behind Python's ``help()``, scales as in examples/train_lm.py) is trained from each
seed plain, and with all connections of a topology; `sparsify` finds K of these on training text. Then it is trained
again, from the same weights and on the same batches, with the found ones alone, with K random ones, with the K nearest
(each of the last units reads the state before the newest), and with the found ones of *another* seed. Told are losses
on held out text, and paired differences from the plain model with 95% t-intervals, one for each comparison: with five
comparisons, one interval in five such tables misses its value by chance.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

with contextlib.suppress(ModuleNotFoundError):  # where torchvision's operators do not match torch's build
    import torchvision_stub  # noqa: F401

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from scipy import stats
from torch import Tensor, nn
from transformers import LlamaForCausalLM

import rewire

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import train_lm

ARMS = ("plain", "all", "found", "found elsewhere", "random", "nearest")
Edges = list[tuple[int | str, int]]


def trained(model: nn.Module, config: train_lm.Config) -> float:
    """Seconds of the median step."""
    text, _ = train_lm.read_text()
    groups = rewire.parameter_groups(model, lr=config.learning_rate, weight_decay=config.weight_decay)
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, [group["lr"] for group in groups], total_steps=config.steps, pct_start=0.1, cycle_momentum=False
    )
    generator, seconds = torch.Generator().manual_seed(config.seed), list[float]()
    for _ in range(config.steps):
        started = time.perf_counter()
        batch = train_lm.pieces(
            text, torch.randint(len(text) - config.length, (config.batch,), generator=generator), config.length
        )
        model(input_ids=batch, labels=batch).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


@torch.no_grad()
def loss_of(model: nn.Module, config: train_lm.Config) -> float:
    _, held_out = train_lm.read_text()
    starts = torch.linspace(0, len(held_out) - config.length, config.validation_batch).long()
    batch = train_lm.pieces(held_out, starts, config.length)
    return float(model.eval()(input_ids=batch, labels=batch).loss)


def batches(config: train_lm.Config) -> list[dict[str, Tensor]]:
    """Training text, to score connections on."""
    text, _ = train_lm.read_text()
    generator = torch.Generator().manual_seed(1000 + config.seed)
    found = []
    for _ in range(4):
        starts = torch.randint(len(text) - config.length, (config.batch,), generator=generator)
        piece = train_lm.pieces(text, starts, config.length)
        found.append({"input_ids": piece, "labels": piece})
    return found


def plain(config: train_lm.Config) -> LlamaForCausalLM:
    """Always the same weights for a seed."""
    model: LlamaForCausalLM = train_lm.build("residual", config)
    return model


def few(config: train_lm.Config, topology: str, edges: Edges) -> nn.Module:
    sources: dict[int | str, list[int]] = {}
    for unit, source in sorted(edges, key=str):
        sources.setdefault(unit, []).append(source)
    return rewire.compile(plain(config), topology, sources=sources, granularity="block", validate=False)


def measured(config: train_lm.Config, topology: str, keep: int, elsewhere: Edges | None) -> dict[str, Any]:
    """Losses and steps of a seed, and what was found."""
    models: dict[str, nn.Module] = {"plain": plain(config)}
    models["all"] = rewire.compile(plain(config), topology, granularity="block", validate=False)
    seconds = {name: trained(model, config) for name, model in models.items()}
    sparse = rewire.sparsify(models["all"], batches(config), keep=keep)
    chosen: dict[str, Edges] = {"found": [(c.unit, c.source) for c in sparse.candidates[:keep]]}
    everything: Edges = [(c.unit, c.source) for c in sparse.candidates]
    chosen["random"] = random.Random(config.seed).sample(everything, keep)
    near = [unit for unit, source in everything if isinstance(unit, int) and source == unit - 2]
    chosen["nearest"] = [(unit, unit - 2) for unit in sorted(near, reverse=True)[:keep]]
    if elsewhere is not None:
        chosen["found elsewhere"] = elsewhere
    for name, edges in chosen.items():
        models[name] = few(config, topology, edges)
        seconds[name] = trained(models[name], config)
    losses = {name: loss_of(model, config) for name, model in models.items()}
    curve = [(point.k, point.loss, point.states) for point in sparse.curve]
    return {"seed": config.seed, "losses": losses, "seconds": seconds, "edges": chosen, "curve": curve}


def interval(differences: list[float]) -> tuple[float, float]:
    """The mean, and half of its 95% t-interval."""
    mean, n = statistics.mean(differences), len(differences)
    if n < 2:
        return mean, float("nan")
    return mean, float(stats.t.ppf(0.975, n - 1)) * statistics.stdev(differences) / n**0.5


def table(rows: list[dict[str, Any]]) -> Table:
    shown = Table("connections", "held out loss", "less than plain by", "seeds better", "step over plain")
    for arm in ARMS:
        own = [row for row in rows if arm in row["losses"]]
        gains = [row["losses"]["plain"] - row["losses"][arm] for row in own]
        mean, half = interval(gains)
        slower = statistics.median(row["seconds"][arm] / row["seconds"]["plain"] for row in own)
        told = "" if arm == "plain" else f"{mean:+.4f} ± {half:.4f}"
        better = "" if arm == "plain" else f"{sum(gain > 0 for gain in gains)} of {len(gains)}"
        shown.add_row(arm, f"{statistics.mean(row['losses'][arm] for row in own):.4f}", told, better, f"{slower:.2f}")
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="denseformer")
    for name, default in {"keep": 4, "layers": 12, "width": 64, "length": 64, "steps": 300, "seeds": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    sizes = {"layers": options.layers, "width": options.width, "length": options.length, "steps": options.steps}
    rows, elsewhere = list[dict[str, Any]](), None
    for seed in track([-1, *range(options.seeds)], "seeds"):  # of the first one only what it finds
        config = train_lm.Config(seed=max(seed, 0) + 100 * (seed < 0), **sizes)
        if seed < 0:
            model = rewire.compile(plain(config), options.topology, granularity="block", validate=False)
            trained(model, config)
            found = rewire.sparsify(model, batches(config), keep=options.keep).candidates[: options.keep]
            elsewhere = [(c.unit, c.source) for c in found]
            continue
        rows.append(measured(config, options.topology, options.keep, elsewhere))
        if options.out:
            about = {"topology": options.topology, "keep": options.keep, **sizes, "elsewhere": elsewhere}
            options.out.write_text(json.dumps({**about, "torch": torch.__version__, "rows": rows}, indent=1) + "\n")
    Console().print(table(rows))


if __name__ == "__main__":
    main()
