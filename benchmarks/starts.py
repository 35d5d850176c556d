"""How forms of ANCRe that start as the original network learn, beside the paper's start and plain connections.

    PYTHONPATH=tests python benchmarks/starts.py [--steps 400] [--seeds 0 1] [--embedding 0.2] [--out FILE]

The model, text and schedule are those of ``examples/train_lm.py``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import rich.table
import torch
import torchvision_stub  # noqa: F401
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import train_lm
from rich.console import Console

import rewire
from rewire.mixes.claimed import Table
from rewire.topologies.ancre import ANCRe
from rewire.topologies.base import Dims, Start, one_hot_previous

#: What becomes of the softmax p and a gate per unit that starts at 0, E being the original network.
GATED = {"(1 - g) E + g p": lambda e, p, g: (1 - g) * e + g * p, "E + g p": lambda e, p, g: e + g * p}


@dataclasses.dataclass(frozen=True)
class Gated(ANCRe):
    """ANCRe with a gate per unit, which starts at 0."""

    gate: str = "E + g p"

    def for_start(self, start: Start) -> Gated:
        return self

    def parameters(self, dims: Dims, start: Start) -> dict[str, Tensor]:
        return {**super().parameters(dims, "paper"), "gates": torch.zeros(dims.depth, 1)}

    def weights(self, parameters: dict[str, Tensor], dims: Dims) -> Table:
        p = self.matrix(super().weights(parameters, dims), dims)
        matrix = GATED[self.gate](one_hot_previous(dims.depth).to(p), p, parameters["gates"])
        row, column = torch.tril_indices(dims.depth, dims.depth, device=matrix.device)
        return self.table(dims, matrix[row, column])


RUNS: dict[str, dict[str, Any] | None] = {
    "residual": None,
    "E + p - p(0)": {"topology": "ancre-ingoing"},
    **{name: {"topology": Gated(gate=name)} for name in GATED},
    "p, the paper's": {"topology": "ancre-ingoing", "start": "paper"},
}


def losses(seed: int, steps: int, embedding: float, console: Console) -> dict[str, float]:
    """Final validation loss of each run."""
    config = train_lm.Config(steps, seed, embedding=embedding)
    train_lm.RUNS = RUNS
    runs = [train_lm.Run(name, config) for name in RUNS]
    train_lm.train(runs, config, console)
    return {run.name: run.validation[-1][1] for run in runs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--embedding", type=float, default=0.2, help="standard deviation of the embeddings")
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks/starts.json"))
    given = parser.parse_args()
    console = Console()
    found = {seed: losses(seed, given.steps, given.embedding, console) for seed in given.seeds}
    table = rich.table.Table("run", *(f"seed {seed}" for seed in found))
    for name in RUNS:
        table.add_row(name, *(f"{found[seed][name]:.4f}" for seed in found))
    console.print(table)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    settings = {"steps": given.steps, "embedding": given.embedding, "rewire": rewire.__version__}
    given.out.write_text(json.dumps({**settings, "validation loss": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
