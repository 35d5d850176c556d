"""Does `rewire.sparsify` find connections that are known, and are the found ones as good as the true ones?

    python benchmarks/sparse_known.py [--depth N] [--true K] [--steps N] [--seeds N]

A teacher is a net of pre-norm blocks in which K units, drawn by chance, read an earlier state beside the newest, with
a weight of 0.5 or -0.5. The student has its blocks, perturbed, and connections to all earlier states (`denseformer`),
which start as those of a plain net. It is trained, and `sparsify` says which K to keep. Students are trained again,
from the same weights and on the same batches, with these alone, with K random ones, with the K true ones, with all,
and with none. Told are how many of the K are true by each score (``by=``), and validation losses, over the variance of
the targets: means, and paired differences from those of random ones, with 95% t-intervals.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import torch
from rich.console import Console
from rich.table import Table
from sparse import Edges, interval
from torch import Tensor, nn

import rewire
from rewire.diagnostics.sparsity import Score

RESULTS = Path(__file__).parent / "results" / "sparse_known.json"
WIDTH, BATCH, RATE = 16, 64, 1e-2
#: Small inputs and large branches: states differ, so that it matters which ones are read.
INPUTS, BRANCHES, PLANTED = 0.5, 2.0, 0.5
#: Standard deviations: of the student's weights around the teacher's, as a part of these; of noise on the targets.
PERTURBED, NOISE = 0.2, 0.1
ARMS = ("none", "all", "true", *(f"by {score}" for score in get_args(Score)), "random")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(self.inner(self.norm(x)).tanh())


class Known:
    """A teacher, its true connections, and students of it."""

    def __init__(self, depth: int, true: int, seed: int) -> None:
        self.seed, chance = seed, random.Random(seed)
        torch.manual_seed(seed)
        self.blocks = nn.Sequential(*(Block() for _ in range(depth)))
        for block in self.blocks:
            nn.init.normal_(block.inner.weight, std=WIDTH**-0.5)
            nn.init.normal_(block.outer.weight, std=BRANCHES * WIDTH**-0.5)
        self.true: Edges = [(t, chance.randrange(t - 1)) for t in chance.sample(range(2, depth + 1), true)]
        teacher = rewire.compile(self.blocks, "denseformer", sources=_sources(self.true), validate=False)
        (connection,) = rewire.connections(teacher).values()
        ((name, weights),) = connection.values().items()
        planted = torch.tensor([PLANTED * chance.choice((-1, 1)) for _ in weights])
        connection.set_values({name: torch.where(weights == 0, planted, weights)})
        self.inputs = INPUTS * torch.randn(2**14, WIDTH)
        with torch.no_grad():
            self.targets = teacher(self.inputs)
        self.scale = self.targets.std()

    def student(self, edges: Edges | None) -> nn.Module:
        """With these connections, or all; always the same blocks."""
        torch.manual_seed(1000 + self.seed)
        blocks = nn.Sequential(*(Block() for _ in self.blocks))
        for mine, parameter in zip(blocks.parameters(), self.blocks.parameters(), strict=True):
            mine.data = parameter.detach() + PERTURBED * parameter.detach().std().nan_to_num(0) * torch.randn_like(mine)
        if edges == []:
            return blocks
        options = {} if edges is None else {"sources": _sources(edges)}
        return rewire.compile(blocks, "denseformer", validate=False, **options)

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(self.seed)
        while True:
            chosen = torch.randint(512, len(self.inputs), (BATCH,), generator=generator)
            noise = NOISE * self.scale * torch.randn(BATCH, WIDTH, generator=generator)
            yield self.inputs[chosen], self.targets[chosen] + noise

    def loss(self, model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        return ((model(batch[0]) - batch[1]) / self.scale).square().mean()

    def trained(self, edges: Edges | None, steps: int) -> tuple[nn.Module, float]:
        """A student, and its validation loss."""
        model = self.student(edges)
        optimizer = torch.optim.AdamW(rewire.parameter_groups(model, lr=RATE, weight_decay=0.0), fused=True)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for _, batch in zip(range(steps), self.batches(), strict=False):
            optimizer.zero_grad()
            self.loss(model, batch).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        with torch.no_grad():
            return model, float(self.loss(model, (self.inputs[:512], self.targets[:512])))


def _sources(edges: Edges) -> dict[int | str, list[int]]:
    found: dict[int | str, list[int]] = {}
    for unit, source in sorted(edges, key=str):
        found.setdefault(unit, []).append(source)
    return found


def compared(depth: int, true: int, steps: int, seed: int) -> dict[str, Any]:
    """The losses of one teacher's students, and how many of the true connections each score finds."""
    known = Known(depth, true, seed)
    dense, loss = known.trained(None, steps)
    losses, hits = {"all": loss}, dict[str, int]()
    batches = [batch for _, batch in zip(range(8), known.batches(), strict=False)]
    chosen: dict[str, Edges] = {"none": [], "true": known.true}
    for score in get_args(Score):
        found = rewire.sparsify(dense, batches, keep=true, loss=known.loss, by=score)
        ranked = [(c.unit, c.source) for c in found.candidates]
        chosen[f"by {score}"] = ranked[:true]
    chosen["random"] = random.Random(1000 + seed).sample(sorted(ranked, key=str), true)
    for arm, edges in chosen.items():
        losses[arm] = known.trained(edges, steps)[1]
        hits[arm] = len({*edges} & {*known.true})
    return {"seed": seed, "losses": losses, "true ones": hits}


def table(rows: list[dict[str, Any]], true: int) -> Table:
    shown = Table("connections", f"true, of {true}", "loss", "less than random by")
    for arm in ARMS:
        hits = [row["true ones"].get(arm) for row in rows]
        losses = [row["losses"][arm] for row in rows]
        less = [row["losses"]["random"] - row["losses"][arm] for row in rows]
        count = "" if None in hits else f"{statistics.mean(hits):.1f}"
        shown.add_row(arm, count, f"{statistics.mean(losses):.4f}", "" if arm == "random" else interval(less))
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"depth": 12, "true": 4, "steps": 300, "seeds": 10}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    rows = []
    for seed in range(given.seeds):
        rows.append(compared(given.depth, given.true, given.steps, seed))
        about = {name: getattr(given, name) for name in ("depth", "true", "steps")}
        given.out.write_text(json.dumps({**about, "torch": torch.__version__, "rows": rows}) + "\n")
    Console().print(table(rows, given.true))


if __name__ == "__main__":
    main()
