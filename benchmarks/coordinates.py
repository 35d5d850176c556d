"""Coordinate checks: how large the last state and a few updates of it are, over width and over depth.

    python benchmarks/coordinates.py [--over depth]  # writes benchmarks/results/coordinates.json, and prints tables

Llamas with and without depth connections, trained by AdamW for a few steps on one batch: at torch's usual start and
rates ("standard": N(0, 0.02^2), one rate) and with `rewire.init.MuP`, over depth with its ``base_depth`` (CompleteP).
What is measured is the state in front of the last norm, in RMS: at the start, by how much the steps moved it, and by
how much it moves back if the connection weights alone are set to the start; and how much the steps moved the logits.
What transfers is about the same for all sizes. Of each the table has the exponent, the slope of the logarithms of
measure and size.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
from pathlib import Path
from typing import Any

with contextlib.suppress(ModuleNotFoundError):  # where torchvision's operators do not match torch's build
    import torchvision_stub  # noqa: F401

import torch
from torch import Tensor, nn

import rewire
from rewire.init import MuP
from rewire.patterns.tiny import tiny_model

RESULTS = Path(__file__).parent / "results" / "coordinates.json"
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("residual", {}),
    "ancre-ingoing": ("ancre-ingoing", {}),
    "denseformer": ("denseformer", {}),
    "grn-v1": ("grn-v1", {}),
    "hc-static": ("hc-static", {}),
    "mhc": ("mhc", {}),
    "attnres": ("attnres", {}),
    "muddformer": ("muddformer", {}),
}
#: Sizes, and the other one's where one is varied.
WIDTHS, DEPTHS, WIDTH, DEPTH = (64, 128, 256, 512), (2, 4, 8, 16, 32), 64, 2
STEPS, RATE, SEEDS, HEAD = 8, 4e-3, 2, 16
MEASURES = ("start", "update", "logits", "connections")


def made(width: int, depth: int, family: str, scaled: bool, over_depth: bool) -> tuple[nn.Module, Any]:
    """A model at its start, and its optimiser."""
    heads = width // HEAD
    model = tiny_model(
        *("llama",),
        **{"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": depth},
        **{"num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": HEAD, "tie_word_embeddings": False},
    )
    mup = MuP(WIDTH, DEPTH if over_depth else None)
    rewire.initialize(model, mup if scaled else MuP(width))
    name, options = FAMILIES[family]
    model = rewire.compile(model, name, **options, validate=False)
    groups = rewire.parameter_groups(model, lr=RATE, weight_decay=0.0, mup=mup if scaled else None)
    return model, torch.optim.AdamW(groups)


def measured(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor) -> dict[str, float]:
    def looked_at() -> tuple[Tensor, Tensor]:
        seen: list[Tensor] = []
        hook = model.model.norm.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))  # type: ignore[union-attr, operator]
        with torch.no_grad():
            logits = model(input_ids=ids).logits
        hook.remove()
        return seen[0], logits

    starts = {connection: connection.values() for connection in rewire.connections(model).values()}
    starts = {connection: {name: x.clone() for name, x in values.items()} for connection, values in starts.items()}
    state, logits = looked_at()
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    after, then = looked_at()
    for connection, values in starts.items():
        connection.set_values(values)
    back, _ = looked_at()
    return dict(zip(MEASURES, map(rms, (state, after - state, then - logits, after - back)), strict=True))


def rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


def exponent(sizes: tuple[int, ...], values: list[float]) -> float:
    """Slope of the line through the logarithms."""
    x = torch.tensor(sizes).double().log()
    y = torch.tensor(values).double().log()
    x = x - x.mean()
    return float((x * y).sum() / (x * x).sum())


def run(family: str, over: str, scaled: bool) -> dict[str, Any]:
    sizes = WIDTHS if over == "width" else DEPTHS
    values: dict[str, list[float]] = {name: [] for name in MEASURES}
    for size in sizes:
        found = []
        for seed in range(SEEDS):
            torch.manual_seed(seed)
            shape = (size, DEPTH) if over == "width" else (WIDTH, size)
            model, optimizer = made(*shape, family, scaled, over == "depth")
            found.append(measured(model, optimizer, torch.randint(90, (4, 32))))
        for name in MEASURES:
            values[name].append(math.prod(one[name] for one in found) ** (1 / SEEDS))
    slopes = {name: round(exponent(sizes, values[name]), 3) for name in MEASURES if all(values[name])}
    shown = {name: [float(f"{value:.4g}") for value in of_sizes] for name, of_sizes in values.items()}
    return {"family": family, "over": over, "scaled": scaled, "sizes": sizes, **shown, "exponents": slopes}


def table(rows: list[dict[str, Any]], over: str) -> str:
    """The exponents."""
    lines = ["| | start | | update of the last state | | update of the logits | | state by connections | |"]
    lines += ["|---" * 9 + "|", "| " + "| standard | scaled " * 4 + "|"]
    for family in FAMILIES:
        pair = [row for row in rows if (row["family"], row["over"]) == (family, over)]  # standard, and scaled
        cells = [f"{row['exponents'].get(name, math.nan):+.2f}" for name in MEASURES for row in pair]
        lines.append(f"| {family} | {' | '.join(cells)} |")
    return "\n".join(lines)


def key(row: dict[str, Any]) -> tuple[str, int, bool]:
    """Of a result, in the order of the tables."""
    return row["over"], [*FAMILIES].index(row["family"]), row["scaled"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--table", action="store_true", help="only print the tables of what was found")
    parser.add_argument("--over", choices=["width", "depth"], help="only this part")
    options = parser.parse_args()
    if not options.table:
        parts = ("width", "depth") if options.over is None else (options.over,)
        rows = {key(row): row for row in json.loads(RESULTS.read_text())}
        for over, scaled, family in itertools.product(parts, (True, False), FAMILIES):
            row = run(family, over, scaled)
            print(family, over, scaled, row["exponents"], flush=True)
            rows[key(row)] = row
            RESULTS.write_text("[\n" + ",\n".join(json.dumps(rows[each]) for each in sorted(rows)) + "\n]\n")
    rows = json.loads(RESULTS.read_text())
    for over in ("width", "depth"):
        print(f"\nOver {over}\n\n{table(rows, over)}")


if __name__ == "__main__":
    main()
