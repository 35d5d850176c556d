"""Give a trained model learned depth connections, and train on: as in Table 4 of DeepCrossAttention (arXiv 2502.06785).

    python examples/retrofit.py
    python examples/retrofit.py --steps 1000 --extra 500 --topologies dca,hc-dynamic

A plain Llama of 6 layers is trained first (the data of ``train_lm.py``) and saved as a plain checkpoint. From there it
trains on as it is, and with each topology at its preserving start, so that all begin with the same function; batches,
learning rates and fresh optimiser states are the same, too. The table, the curve, the rewired models and
``results.json`` go to ``out/retrofit``.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("GOMP_SPINCOUNT", "500")  # before torch: threads that spin for long are slow on shared cores

import torch
import transformers
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from train_lm import Config, build, pieces, read_text

import rewire
from rewire.plotting import plot_curves

PLAIN = "plain"


@dataclasses.dataclass(frozen=True)
class Retrofit:
    """What trains on, and how.

    Attributes:
        extra: steps after the checkpoint.
        evaluations: how many there are in the course of them; there is one before them, too.
        learning_rate: constant after a short warm-up; the first training ends at a tenth of its own.
        connection_rate: that of the connection weights, which have everything to learn yet.
    """

    extra: int
    evaluations: int = 6
    learning_rate: float = 1e-3
    connection_rate: float = 3e-3

    @property
    def evaluated(self) -> list[int]:
        """Steps after which there is an evaluation, the last one among them."""
        return [-(-self.extra * number // self.evaluations) for number in range(1, self.evaluations + 1)]


class Text:
    """Batches for training, the same for every model that asks for them, and one for validation."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.train, held_out = read_text()
        starts = torch.linspace(0, len(held_out) - config.length, config.validation_batch).long()
        self.validation = pieces(held_out, starts, config.length)

    def batches(self, steps: int, seed: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        last = len(self.train) - self.config.length
        starts = torch.randint(last, (steps, self.config.batch), generator=generator)
        return [pieces(self.train, row, self.config.length) for row in starts]

    @torch.no_grad()
    def loss(self, model: nn.Module) -> float:
        """Nats per byte on the validation batch."""
        model.eval()
        value = model(input_ids=self.validation, labels=self.validation).loss.item()
        model.train()
        return value


class Training:
    """A model, its optimiser, and one step after the other."""

    def __init__(self, model: nn.Module, groups: list[dict[str, Any]], rate: Callable[[int], float]) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, rate)

    def step(self, batch: Tensor) -> float:
        """The seconds that it took."""
        started = time.perf_counter()
        self.model(input_ids=batch, labels=batch).loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - started


def pretrained(config: Config, text: Text, out: Path) -> Path:
    """Train a plain model; returns the folder of its checkpoint."""
    model, warmup = build("residual", config), max(1, config.steps // 10)

    def rate(step: int) -> float:
        return min(1.0, (step + 1) / warmup) * (0.55 + 0.45 * math.cos(math.pi * step / config.steps))

    groups = rewire.parameter_groups(model, lr=config.learning_rate, weight_decay=config.weight_decay)
    training = Training(model, groups, rate)
    for batch in text.batches(config.steps, config.seed):
        training.step(batch)
    model.save_pretrained(out / "checkpoint")
    return out / "checkpoint"


def trained_on(
    name: str, checkpoint: Path, retrofit: Retrofit, config: Config, text: Text
) -> tuple[nn.Module, dict[str, Any]]:
    """The checkpoint's model, rewired unless it is the plain one, after more training; and what was measured."""
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    if name != PLAIN:
        model = rewire.compile(model, name, start="preserve")
    groups = rewire.parameter_groups(
        model,
        lr=retrofit.learning_rate,
        weight_decay=config.weight_decay,
        connection_lr=retrofit.connection_rate,
    )
    warmup = max(1, retrofit.extra // 10)
    training = Training(model.train(), groups, lambda step: min(1.0, (step + 1) / warmup))
    points, seconds = [(0, text.loss(model))], []
    for number, batch in enumerate(text.batches(retrofit.extra, config.seed + 1), start=1):
        seconds.append(training.step(batch))
        if number in retrofit.evaluated:
            points.append((number, text.loss(model)))
    learned = sum(p.numel() for connection in rewire.connections(model).values() for p in connection.parameters())
    measured = {"validation": points, "median_step_seconds": statistics.median(seconds), "connection_weights": learned}
    return model, measured


def table_of(results: dict[str, dict[str, Any]], steps: int) -> Table:
    """Perplexity per byte, and how far each topology is from the plain model: the rows of the paper's Table 4."""
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("steps", *results):
        table.add_column(column, justify="right", no_wrap=True)
    for row, (number, loss) in enumerate(results[PLAIN]["validation"]):
        cells = [f"{steps} + {number}", f"{math.exp(loss):.4f}"]
        for run in [run for name, run in results.items() if name != PLAIN]:
            own = math.exp(run["validation"][row][1])
            cells.append(f"{own:.4f} ({own - math.exp(loss):+.4f})")
        table.add_row(*cells)
    table.add_row("step", *(f"{1000 * run['median_step_seconds']:.0f} ms" for run in results.values()))
    table.add_row("weights", *(str(run["connection_weights"]) for run in results.values()))
    return table


def main(
    steps: Annotated[int, typer.Option(min=1, help="Training steps of the plain model.")] = 300,
    extra: Annotated[int, typer.Option(min=1, help="Steps that follow.")] = 120,
    topologies: Annotated[
        str, typer.Option(help="Comma-separated, of those with a preserving start.")
    ] = "dca,ancre-ingoing,denseformer",
    layers: Annotated[int, typer.Option(min=2)] = 6,
    seed: Annotated[int, typer.Option(help="Seed of the weights and of the order of the text.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for everything that is written.")] = Path("out/retrofit"),
) -> None:
    """Train a plain Llama, then train on with and without learned depth connections."""
    names = [PLAIN, *dict.fromkeys(filter(None, topologies.split(",")))]
    unknown = [name for name in names[1:] if name not in rewire.list_topologies()]
    if unknown:
        raise typer.BadParameter(f"there is no topology {unknown[0]!r}.", param_hint="--topologies")
    config, retrofit, console = Config(steps, seed, layers=layers), Retrofit(extra), Console()
    text = Text(config)
    out.mkdir(parents=True, exist_ok=True)
    with console.status(f"training the plain model, {steps} steps"):
        checkpoint = pretrained(config, text, out)
    results = {}
    for name in names:
        with console.status(f"training on: {name}, {extra} steps"):
            model, results[name] = trained_on(name, checkpoint, retrofit, config, text)
        if name != PLAIN:
            rewire.save(model, out / name)
    about = {
        "config": dataclasses.asdict(config),
        "retrofit": dataclasses.asdict(retrofit),
        "machine": {"system": platform.platform(), "threads": torch.get_num_threads()},
        "versions": {module.__name__: module.__version__ for module in (rewire, torch, transformers)},
    }
    (out / "results.json").write_text(json.dumps({**about, "runs": results}, indent=1))
    curves = {name: [(steps + number, loss) for number, loss in run["validation"]] for name, run in results.items()}
    plot_curves(curves, out / "loss.png", "step", "validation loss (nats per byte)")
    console.print(table_of(results, steps))
    console.print(
        f"Perplexity per byte. One small model, one seed. Picture, models and results: {out}", highlight=False
    )


if __name__ == "__main__":
    typer.run(main)
