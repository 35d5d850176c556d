"""A control of a study: one contender at given rates, on given seeds.

    PYTHONPATH=benchmarks/choosing:tests python benchmarks/choosing/rates.py tasks:vision_transformer --steps 1200 \
        --rates 0.002 0.004 0.008 --seeds 1 2 3 --out out/rates.json

A study picks the rate of each row on one seed: a plain model with an unlucky one would make every topology look good.
"""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path

import torch
import torchvision_stub  # noqa: F401  (transformers imports torchvision)
from rich.progress import track

from rewire.studies.contenders import Contender, Scales, parse
from rewire.studies.task import Budget
from rewire.studies.training import train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", help="module:function")
    parser.add_argument("--topology", help="as `rewire study` takes it; without one, the plain model")
    parser.add_argument("--rates", type=float, nargs="+", required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--embedding", type=float, default=1.0)
    parser.add_argument("--branch", type=float, default=1.0)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)

    module, _, name = given.task.partition(":")
    task = getattr(importlib.import_module(module), name)()
    contender = parse(given.topology) if given.topology else Contender("residual")
    scales, budget, device = Scales(given.embedding, given.branch), Budget(given.steps), torch.device("cpu")
    rows = []
    for rate in given.rates:
        losses = {}
        for seed in track(given.seeds, f"{contender.name}, rate {rate:g}"):
            *_, last = train(task, contender, rate, scales, seed, budget, device)
            losses[seed] = last.loss
        mean = sum(losses.values()) / len(losses)
        print(f"{contender.name} rate {rate:g}: {mean:.4f} {[round(loss, 4) for loss in losses.values()]}", flush=True)
        rows.append({"model": contender.name, "rate": rate, "losses": losses})
        about = {"task": name, "steps": given.steps, "embedding": given.embedding, "branch": given.branch}
        given.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
