"""Train a small language model with and without learned depth connections.

    python examples/train_lm.py                                  # what `make demo` runs
    python examples/train_lm.py --steps 2000 --runs ancre-paper

A Llama of 8 layers learns, byte by byte, the texts behind Python's ``help()``. All runs start from the same weights and
see the same batches, and they take turns at every step, so that a busy machine slows all of them alike. Pictures,
checkpoints and ``results.json`` go to ``out/train_lm``.

All runs have the scales that the plain model trains best with: embeddings of a standard deviation of 0.2, and the
matrices that branches end with drawn four times as large as Llama's (``--embedding``, ``--branch``). At Llama's own
0.02 a topology gains by such a scale alone. Two controls show what is left: `ancre-fixed` adds to every shortcut the
newest state less the mean of all, and learns nothing; `ancre-still` has ANCRe's weights, which get gradients and stand
still: it is the plain model, and has to train as that does.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import statistics
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Annotated, Any

os.environ.setdefault("GOMP_SPINCOUNT", "500")  # before torch: threads that spin for long are slow on shared cores

import torch
import transformers
import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import rewire
from rewire.bench.harness import kept_for_backward
from rewire.plotting import plot_arcs, plot_curves, plot_heatmap

#: What each run passes to rewire.compile; None leaves the model as it is.
RUNS: dict[str, dict[str, Any] | None] = {
    "residual": None,
    "ancre": {"topology": "ancre-ingoing"},
    "muddformer": {"topology": "muddformer"},
    "ancre-paper": {"topology": "ancre-ingoing", "start": "paper"},
    "ancre-fixed": {"topology": "ancre-ingoing"},
    "ancre-still": {"topology": "ancre-ingoing"},
}
BASELINE = "residual"
FIXED = {"ancre-fixed"}  # their connection weights are preset, and no parameters
STILL = {"ancre-still"}  # their connection weights get gradients, at a rate of 0


@dataclasses.dataclass(frozen=True)
class Config:
    steps: int
    seed: int
    layers: int = 8
    width: int = 128
    heads: int = 4
    length: int = 128
    batch: int = 8
    embedding: float = 0.2
    branch: float = 4.0
    learning_rate: float = 3e-3
    weight_decay: float = 0.1
    evaluate_every: int = 20
    validation_batch: int = 64


class Run:
    """One model in training, and what was measured."""

    def __init__(self, name: str, config: Config) -> None:
        self.name, self.config = name, config
        self.model = build(name, config)
        groups = rewire.parameter_groups(
            self.model,
            lr=config.learning_rate,
            weight_decay=config.weight_decay,
            connection_lr=0.0 if name in STILL else None,
        )
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._rate)
        learned = [p for connection in rewire.connections(self.model).values() for p in connection.parameters()]
        self.connection_weights = sum(p.numel() for p in learned if p.requires_grad)
        self.kept_bytes = 0
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.validation: list[tuple[int, float]] = []

    def _rate(self, step: int) -> float:
        """Linear warm-up over the first tenth of the steps, then a cosine down to a tenth of the learning rate."""
        warmup = max(1, self.config.steps // 10)
        progress = max(0, step - warmup) / max(1, self.config.steps - warmup)
        return min(1.0, (step + 1) / warmup) * (0.55 + 0.45 * math.cos(math.pi * progress))

    def train(self, batch: Tensor) -> None:
        started = time.perf_counter()
        loss = self.model(input_ids=batch, labels=batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())
        self.seconds.append(time.perf_counter() - started)

    @torch.no_grad()
    def evaluate(self, batch: Tensor) -> None:
        self.model.eval()
        self.validation.append((len(self.losses), self.model(input_ids=batch, labels=batch).loss.item()))
        self.model.train()

    def measure_kept(self, batch: Tensor) -> None:
        self.kept_bytes = kept_for_backward(self.model, lambda: self.model(input_ids=batch, labels=batch).loss)

    def results(self, baseline: Run) -> dict[str, Any]:
        goal = baseline.validation[-1][1]
        return {
            "compile": RUNS[self.name],
            "final_validation_loss": self.validation[-1][1],
            "steps_to_baseline": next((step for step, loss in self.validation if loss <= goal), None),
            "median_step_seconds": statistics.median(self.seconds),
            "kept_for_backward_bytes": self.kept_bytes,
            "connection_weights": self.connection_weights,
            "validation": self.validation,
            "losses": self.losses,
        }


def build(name: str, config: Config) -> nn.Module:
    """The model of a run, its weights drawn from the seed."""
    torch.manual_seed(config.seed)
    llama = LlamaConfig(
        vocab_size=256,
        hidden_size=config.width,
        intermediate_size=round(config.width * 8 / 3),
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        max_position_embeddings=config.length,
        use_cache=False,
    )
    model, options = LlamaForCausalLM(llama), RUNS[name]
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(config.embedding / llama.initializer_range)
        for path, parameter in model.named_parameters():
            if path.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_(config.branch)
    model = model if options is None else rewire.compile(model, **options)
    if name in FIXED:
        for connection in rewire.connections(model).values():
            connection.set_values({"logits": newest(connection.layout.dims.depth)})
            connection.requires_grad_(False)
    return model


def newest(depth: int) -> Tensor:
    """Logits of ANCRe whose softmax is the newest state alone."""
    logits = torch.zeros(depth * (depth + 1) // 2)
    logits[torch.arange(1, depth + 1).cumsum(0) - 1] = 1.0  # 100 times the temperature
    return logits


def read_text() -> tuple[Tensor, Tensor]:
    """Bytes for training, and for validation: every eighth topic is held out whole."""
    names = sorted(topics)
    parts = [name for number, name in enumerate(names) if number % 8], names[::8]
    train, held_out = ("\n\n".join(topics[name] for name in part).encode() for part in parts)
    return torch.tensor(list(train)), torch.tensor(list(held_out))


def pieces(text: Tensor, starts: Tensor, length: int) -> Tensor:
    """[len(starts), length]: pieces of the text."""
    return text[starts[:, None] + torch.arange(length)]


def train(runs: list[Run], config: Config, console: Console) -> None:
    text, held_out = read_text()
    starts = torch.linspace(0, len(held_out) - config.length, config.validation_batch).long()
    validation = pieces(held_out, starts, config.length)
    generator = torch.Generator().manual_seed(config.seed)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        tasks = [progress.add_task(run.name, total=config.steps) for run in runs]
        for step in range(config.steps):
            starts = torch.randint(len(text) - config.length, (config.batch,), generator=generator)
            batch = pieces(text, starts, config.length)
            for run, task in zip(runs, tasks, strict=True):
                if step == 0:
                    run.measure_kept(batch)
                if step % config.evaluate_every == 0:
                    run.evaluate(validation)
                run.train(batch)
                progress.update(task, advance=1, description=f"{run.name:<14}  loss {run.losses[-1]:.3f}")
            if not console.is_terminal and step % config.evaluate_every == 0:
                losses = ", ".join(f"{run.name} {run.losses[-1]:.3f}" for run in runs)
                print(f"step {step + 1} of {config.steps}: loss of {losses}", flush=True)
    for run in runs:
        run.evaluate(validation)


def cut_to_common(runs: list[Run]) -> int:
    """After an interruption: leave what all runs were compared at, and say after how many steps that was last."""
    compared = min(len(run.validation) for run in runs)
    for run in runs:
        run.validation = run.validation[:compared]
    return runs[0].validation[-1][0] if compared else 0


def table_of(results: dict[str, dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("run", no_wrap=True)
    steps = "steps to the\nbaseline's loss"
    columns = ("validation\nloss", steps, "median\nstep", "kept for\nbackward", "learned\nweights")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for name, run in results.items():
        reached = run["steps_to_baseline"]
        table.add_row(
            name,
            f"{run['final_validation_loss']:.4f}",
            "never" if reached is None else str(reached),
            f"{1000 * run['median_step_seconds']:.0f} ms",
            f"{run['kept_for_backward_bytes'] / 2**20:.1f} MiB",
            str(run["connection_weights"]),
        )
    return table


def finding(name: str, run: dict[str, Any], baseline: dict[str, Any], config: Config) -> str:
    """One sentence on how a run compares with the baseline, whichever way it fell."""
    goal, reached = baseline["final_validation_loss"], run["steps_to_baseline"]
    gap = run["final_validation_loss"] - goal
    slowdown = run["median_step_seconds"] / baseline["median_step_seconds"]
    sentence = f"{name} ends {abs(gap):.4f} {'above' if gap > 0 else 'below'} {BASELINE} in validation loss"
    if reached is not None:
        sentence += f", whose final {goal:.4f} it reached after {reached} of {config.steps} steps"
    return f"{sentence}; its steps took {slowdown:.2f} times as long."


def draw(runs: list[Run], config: Config, out: Path) -> None:
    # From an eighth of the steps on: the steep start would squeeze the rest into a line.
    late = {run.name: [(step, loss) for step, loss in run.validation if 8 * step >= config.steps] for run in runs}
    plot_curves(late, out / "loss.png", "step", "validation loss (nats per byte)")
    matrices = {run.name: matrix for run in runs[1:] for matrix in rewire.coefficients(run.model).values()}
    if matrices:
        plot_heatmap(matrices, out / "heatmap.png")
        plot_arcs(matrices, out / "arcs.png")


def main(
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each run.")] = 400,
    seed: Annotated[int, typer.Option(help="Seed of the weights and of the order of the text.")] = 0,
    runs: Annotated[str, typer.Option(help=f"Comma-separated, of {', '.join(RUNS)}.")] = "ancre,muddformer,ancre-fixed",
    embedding: Annotated[float, typer.Option(help="Standard deviation of the embeddings at the start.")] = 0.2,
    branch: Annotated[float, typer.Option(help="Factor on the matrices that branches end with, at the start.")] = 4.0,
    out: Annotated[Path, typer.Option(help="Folder for everything that is written.")] = Path("out/train_lm"),
) -> None:
    """Train a small Llama with learned depth connections, and without (the run 'residual', which is always there)."""
    names = [BASELINE, *(name for name in dict.fromkeys(runs.split(",")) if name not in ("", BASELINE))]
    unknown = [name for name in names if name not in RUNS]
    if unknown:
        raise typer.BadParameter(f"there is no run {unknown[0]!r}, only {', '.join(RUNS)}.", param_hint="--runs")
    config, console = Config(steps, seed, embedding=embedding, branch=branch), Console()
    trained = [Run(name, config) for name in names]
    interrupted = False
    try:
        train(trained, config, console)
    except KeyboardInterrupt:
        interrupted = True
        stopped = cut_to_common(trained)
        console.print(f"Interrupted. What follows is of the first {stopped} of {steps} steps.", highlight=False)
        if not stopped:
            raise typer.Exit(130) from None
        config = dataclasses.replace(config, steps=stopped)
    results = {run.name: run.results(trained[0]) for run in trained}
    findings = [finding(name, results[name], results[BASELINE], config) for name in names[1:]]
    versions = {"python": platform.python_version()}
    versions |= {module.__name__: module.__version__ for module in (rewire, torch, transformers)}
    machine = {"system": platform.platform(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    out.mkdir(parents=True, exist_ok=True)
    about = {"config": dataclasses.asdict(config), "machine": machine, "versions": versions}
    (out / "results.json").write_text(json.dumps({**about, "findings": findings, "runs": results}, indent=1))
    draw(trained, config, out)
    for run in trained[1:]:
        torch.save(run.model.state_dict(), out / f"{run.name}.pt")
    console.print(table_of(results))
    for sentence in findings:
        console.print(sentence, highlight=False)
    console.print("One small model, one seed, rates not tuned for each run: no evidence for large models.")
    console.print(f"Pictures, checkpoints and results.json: {out}", highlight=False)
    if interrupted:
        raise typer.Exit(130)


if __name__ == "__main__":
    typer.run(main)
