"""Does a study give the right answer? Tasks whose true connections are known.

    python benchmarks/choosing/known.py --instances 5 --out out/known.json

A teacher of four blocks is drawn: with plain residual connections, with skips from given earlier states, with scales of
its branches by depth, or with token-dependent reads. The student starts from the teacher's blocks, perturbed, and from
plain connections, so that what has to be learned is the connections. A study of one topology of each family is right if
it names the true family, or says that there is no difference, and wrong if it calls another one better.
"""

from __future__ import annotations

import argparse
import collections
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import rewire

DEPTH, WIDTH, BATCH = 4, 8, 64
#: Teacher -> the topology of its family.
FAMILIES = {"plain": "residual", "skips": "ancre-ingoing", "scales": "skipinit", "reads": "attnres"}
CONTENDERS = ["ancre-ingoing", "skipinit", "attnres"]
#: Standard deviations: of the student's weights around the teacher's, as a part of these; of noise on the targets.
PERTURBED, NOISE = 0.4, 0.1


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(self.inner(x).tanh())


def blocks() -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(DEPTH)))


def teacher(kind: str, seed: int) -> tuple[nn.Module, nn.Module]:
    """The blocks of a teacher, and the teacher, which connects them."""
    generator = torch.Generator().manual_seed(seed)
    plain = blocks()
    for parameter in plain.parameters():
        nn.init.normal_(parameter, std=_std(parameter), generator=generator)
    if kind == "plain":
        return plain, plain
    start = "paper" if kind == "skips" else "preserve"
    true = rewire.compile(plain, FAMILIES[kind], start=start, validate=False)
    (connection,) = rewire.connections(true).values()
    connection.set_values(DRAWN[kind](generator))
    return plain, true


def _skips(generator: torch.Generator) -> dict[str, Tensor]:
    """Two units out of three take an earlier state than the newest as their shortcut."""
    rows = []
    for t in range(1, DEPTH + 1):
        row = torch.full((t,), -1.0)  # a hundred temperatures below the one that is chosen
        earlier = t > 1 and torch.rand((), generator=generator) < 2 / 3
        row[torch.randint(t - 1, (), generator=generator) if earlier else t - 1] = 0.0
        rows.append(row)
    return {"logits": torch.cat(rows)}


DRAWN = {
    "skips": _skips,
    "scales": lambda generator: {"scales": (0.8 * torch.randn(DEPTH, generator=generator)).exp()},
    "reads": lambda generator: {"queries": 2 * torch.randn(DEPTH, WIDTH, generator=generator) / WIDTH**0.5},
}


def task(kind: str, seed: int) -> rewire.Task:
    """The task of one teacher: mean squared error, over the variance of the teacher's outputs."""
    plain, true = teacher(kind, seed)
    inputs = torch.randn(2**14, WIDTH, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        targets = true(inputs)
    scale = targets.std()
    held_out, seen = slice(0, 512), slice(512, None)

    def model() -> nn.Module:
        student = blocks()
        for mine, parameter in zip(student.parameters(), plain.parameters(), strict=True):
            mine.data = parameter.detach() + PERTURBED * _std(mine) * torch.randn(mine.shape)
        return student

    def batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        x, y = inputs[seen], targets[seen]
        while True:
            chosen = torch.randint(len(x), (BATCH,), generator=generator)
            yield x[chosen], y[chosen] + NOISE * scale * torch.randn(BATCH, WIDTH, generator=generator)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return ((model(batch[0]) - batch[1]) / scale).square().mean()

    validation = [(inputs[held_out], targets[held_out])]
    return rewire.Task(model, batches, validation, loss, adamw, learning_rate=1e-2, weight_decay=0.0)


def adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)


def _std(parameter: Tensor) -> float:
    return WIDTH**-0.5 if parameter.ndim == 2 else 0.1


def outcome(kind: str, best: str | None) -> str:
    """What a study's answer is worth."""
    if best is None:
        return "right" if kind == "plain" else "no difference"
    return "right" if best == FAMILIES[kind] else "wrong"


def answer(instance: tuple[str, int, int, int]) -> dict[str, Any]:
    """A study of one teacher."""
    kind, number, steps, seeds = instance
    torch.set_num_threads(1)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        found = rewire.study(
            task(kind, number), CONTENDERS, steps=steps, seeds=seeds, out=folder, device="cpu", progress=False
        )
    best = found.best and found.best.name
    return {
        "teacher": kind,
        "number": number,
        "best": best,
        "outcome": outcome(kind, best),
        "seconds": time.perf_counter() - started,
        "better": [row.name for row in found.rows if found.verdict(row) == "better"],
        "losses": {row.name: row.mean for row in found.rows if row.results},
        "p": found.p,
        "spread": statistics.stdev(found.baseline.losses),
        "settings": {row.name: str(row.setting) for row in found.rows},
        "learned": {row.name: gain.mean for row in found.rows if (gain := found.learned(row))},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=5, help="of each teacher")
    parser.add_argument("--first", type=int, default=0, help="number of the first instance, which is its seed")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    numbers = [
        (kind, n, given.steps, given.seeds)
        for n in range(given.first, given.first + given.instances)
        for kind in FAMILIES
    ]
    answers = []
    with multiprocessing.get_context("spawn").Pool(given.processes) as pool:
        for found in pool.imap_unordered(answer, numbers):
            answers.append(found)
            print(
                f"{found['teacher']} {found['number']}: {found['outcome']}, best {found['best']}, "
                f"{found['seconds']:.0f} s, { ({name: round(loss, 4) for name, loss in found['losses'].items()}) }",
                flush=True,
            )
            given.out.write_text(json.dumps({"steps": given.steps, "seeds": given.seeds, "answers": answers}, indent=1))
    print(dict(collections.Counter(found["outcome"] for found in answers)))


if __name__ == "__main__":
    main()
