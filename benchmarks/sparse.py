"""Are the connections that `rewire.sparsify` finds better than random ones, and than the nearest ones?

    python benchmarks/sparse.py [--topology NAME] [--layers N] [--width N] [--steps N] [--seeds N] [--table]

A byte language model (Llama, texts behind Python's ``help()``, scales as in examples/train_lm.py) is trained from each
seed plain, and with all connections of a topology; `sparsify` scores these on training text. Then it is trained again,
from the same weights and on the same batches, with the K found ones alone, with K random ones, and with the K nearest
(each of the last units reads the state before the newest), for each K. Told are losses on held out text, and paired
differences with 95% t-intervals, one for each comparison: of twenty such intervals one misses its value by chance.

Whether scores mislead: their rank correlation on two halves of the data, between seeds, and with what `rewire.ablate`
says of leaving each out; and the loss of the model as it is trained with all but some set to the plain network's: all
but the found ones, all but those that cost most when left out, and all but random ones.

Each training is kept in the results at once, and those that are there are not run again.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

with contextlib.suppress(ModuleNotFoundError):  # where torchvision's operators do not match torch's build
    import torchvision_stub  # noqa: F401

import torch
from rich.console import Console
from rich.table import Table
from scipy import stats
from torch import Tensor, nn

import rewire

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import train_lm

RESULTS = Path(__file__).parent / "results" / "sparse.json"
KEPT, ARMS, DRAWS = (4, 8, 2), ("found", "random", "nearest"), 8
Edges = list[tuple[int | str, int]]


def trained(model: nn.Module, config: train_lm.Config) -> nn.Module:
    text, _ = train_lm.read_text()
    groups = rewire.parameter_groups(model, lr=config.learning_rate, weight_decay=config.weight_decay)
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, [group["lr"] for group in groups], total_steps=config.steps, pct_start=0.1, cycle_momentum=False
    )
    generator = torch.Generator().manual_seed(config.seed)
    for _ in range(config.steps):
        starts = torch.randint(len(text) - config.length, (config.batch,), generator=generator)
        batch = train_lm.pieces(text, starts, config.length)
        model(input_ids=batch, labels=batch).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model


@torch.no_grad()
def held_out(model: nn.Module, config: train_lm.Config) -> float:
    _, text = train_lm.read_text()
    starts = torch.linspace(0, len(text) - config.length, config.validation_batch).long()
    batch = train_lm.pieces(text, starts, config.length)
    return float(model.eval()(input_ids=batch, labels=batch).loss)


def scoring(config: train_lm.Config) -> list[dict[str, Tensor]]:
    """Batches of training text."""
    text, _ = train_lm.read_text()
    generator = torch.Generator().manual_seed(1000 + config.seed)
    drawn = [torch.randint(len(text) - config.length, (2 * config.batch,), generator=generator) for _ in range(4)]
    pieces = [train_lm.pieces(text, starts, config.length) for starts in drawn]
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def scored(model: nn.Module, config: train_lm.Config) -> dict[str, Any]:
    """Edges by score; of each its scores; and losses of the model as it is trained, with some edges alone."""
    batches, scores = scoring(config), dict[str, dict[tuple[int | str, int], float]]()
    for name, some in {"half": batches[:2], "rest": batches[2:]}.items():
        scores[name] = {(c.unit, c.source): c.score for c in rewire.sparsify(model, some, keep=1).candidates}
    left_out = {}
    for effect in rewire.ablate(model, batches, of=["edge"]).effects:
        t, source = int(effect.destination[1:]), int(effect.source[1:])
        left_out["output" if t > config.layers else t, source] = effect.plain or 0.0
    edges = sorted(scores["half"], key=lambda edge: -scores["half"][edge] - scores["rest"][edge])
    scores["left out"] = {edge: left_out[edge] for edge in edges}
    chance, orders = random.Random(config.seed), {"found": edges, "left out": sorted(edges, key=lambda e: -left_out[e])}
    alone: dict[str, dict[str, float]] = {
        name: {str(k): with_alone(model, order[:k], batches) for k in (0, *KEPT, len(edges))}
        for name, order in orders.items()
    }
    alone["random"] = {
        str(k): statistics.mean(with_alone(model, chance.sample(edges, k), batches) for _ in range(DRAWS)) for k in KEPT
    }
    lists = {name: [own[edge] for edge in edges] for name, own in scores.items()}
    return {"edges": edges, "scores": lists, "as trained": alone}


@torch.no_grad()
def with_alone(model: nn.Module, edges: Edges, batches: list[dict[str, Tensor]]) -> float:
    """The loss with all other connections those of the plain network, of averages of states (`denseformer`)."""
    (connection,) = rewire.connections(model).values()
    values, dims = connection.values(), connection.layout.dims
    topology: Any = connection.layout.topology
    (key,), start = values, topology.parameters(dims, "preserve")
    ends = [("output" if t > dims.depth else t, i, i == t - 1) for t in topology.mixing(dims) for i in range(t)]
    kept = torch.tensor([newest or t == 2 or (t, i) in edges for t, i, newest in ends])
    connection.set_values({key: torch.where(kept, values[key], start[key])})
    loss = statistics.mean(float(model(**batch).loss) for batch in batches)
    connection.set_values(values)
    return loss


def build(config: train_lm.Config, topology: str | None = None, **options: Any) -> nn.Module:
    """Always the same weights for a seed."""
    model = train_lm.build("residual", config)
    if topology is None:
        return model
    return rewire.compile(model, topology, granularity="block", validate=False, **options)


def chosen(arm: str, k: int, edges: Edges, seed: int) -> dict[int | str, list[int]]:
    if arm == "found":
        some = edges[:k]
    elif arm == "random":
        some = random.Random(seed).sample(sorted(edges, key=str), k)
    else:
        near = [(unit, source) for unit, source in edges if isinstance(unit, int) and source == unit - 2]
        some = sorted(near, reverse=True)[:k]
    ordered = sorted(some, key=str)
    return {unit: [source for _, source in group] for unit, group in itertools.groupby(ordered, lambda edge: edge[0])}


def run(row: dict[str, Any], k: int, config: train_lm.Config, topology: str, save: Callable[[], Any]) -> None:
    """The trainings of a seed that are not there yet."""
    losses = row.setdefault("losses", {})
    if "all" not in losses:
        model = trained(build(config, topology), config)
        row.update(scored(model.eval(), config))
        losses["all"] = held_out(model, config)
        save()
    if k and "plain" not in losses:
        losses["plain"] = held_out(trained(build(config), config), config)
        save()
    edges: Edges = [(unit, source) for unit, source in row["edges"]]
    for arm in ARMS if k else ():
        if f"{arm} {k}" not in losses:
            sources = chosen(arm, k, edges, config.seed)
            losses[f"{arm} {k}"] = held_out(trained(build(config, topology, sources=sources), config), config)
            save()


def interval(differences: list[float]) -> str:
    """The mean, and half of its 95% t-interval."""
    mean, n = statistics.mean(differences), len(differences)
    if n < 2:
        return f"{mean:+.4f}"
    return f"{mean:+.4f} ± {float(stats.t.ppf(0.975, n - 1)) * statistics.stdev(differences) / n**0.5:.4f}"


def added(row: dict[str, Any]) -> list[float]:
    """Scores on all of the data."""
    return [(a + b) / 2 for a, b in zip(row["scores"]["half"], row["scores"]["rest"], strict=True)]


def tables(rows: list[dict[str, Any]]) -> list[Table]:
    trained_again = Table("connections", "seeds", "held out loss", "less than plain by", "less than random by")
    for arm in ("plain", "all", *(f"{arm} {k}" for k in sorted(KEPT) for arm in ARMS)):
        own = [row["losses"] for row in rows if arm in row["losses"]]
        if own:
            mean = f"{statistics.mean(losses[arm] for losses in own):.4f}"
            others = [] if arm == "plain" else ["plain"]
            if arm.startswith(("found", "nearest")):
                others.append("random " + arm.split()[1])
            less = [interval([row[other] - row[arm] for row in own if other in row]) for other in others]
            trained_again.add_row(arm, str(len(own)), mean, *less)
    kept = Table("kept, as trained", "found", "by what they cost left out", "random")
    for k in map(str, (0, *sorted(KEPT), *(len(row["edges"]) for row in rows[:1]))):
        own = [[row["as trained"][arm].get(k) for row in rows] for arm in ("found", "left out", "random")]
        kept.add_row(k, *("" if None in losses else f"{statistics.mean(losses):.4f}" for losses in own))
    agreement = Table("scores", "rank correlation, mean")
    by_edge = [dict(zip(map(tuple, row["edges"]), added(row), strict=True)) for row in rows]
    pairs = [[[*map(a.get, a)], [*map(b.get, a)]] for a, b in itertools.combinations(by_edge, 2)]
    for name, compared in {
        "two halves of the data": [[row["scores"]["half"], row["scores"]["rest"]] for row in rows],
        "added to plain, left out of all": [[row["scores"]["left out"], added(row)] for row in rows],
        "two seeds": pairs,
    }.items():
        if compared:
            agreement.add_row(name, f"{statistics.mean(stats.spearmanr(*pair).statistic for pair in compared):.2f}")
    return [trained_again, kept, agreement]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="denseformer")
    for name, default in {"layers": 12, "width": 64, "length": 64, "steps": 300, "seeds": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="only print the tables of what was found")
    options = parser.parse_args()
    about = {name: getattr(options, name) for name in ("topology", "layers", "width", "length", "steps")}
    known = json.loads(options.out.read_text()) if options.out.exists() else {}
    if any(known.get(name) != value for name, value in about.items()):
        known = {**about, "torch": torch.__version__, "rows": {}}
    for k, seed in itertools.product((0, *KEPT), range(0 if options.table else options.seeds)):
        sizes = {name: about[name] for name in ("layers", "width", "length", "steps")}
        config = train_lm.Config(seed=seed, validation_batch=256, **sizes)
        row = known["rows"].setdefault(str(seed), {})
        run(row, k, config, options.topology, lambda: options.out.write_text(json.dumps(known) + "\n"))
    for table in tables([row for row in known["rows"].values() if "edges" in row]):
        Console().print(table)


if __name__ == "__main__":
    main()
