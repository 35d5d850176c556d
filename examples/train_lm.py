"""Train a small language model with and without learned depth connections.

    python examples/train_lm.py                                  # what `make demo` runs
    python examples/train_lm.py --steps 2000 --runs residual,ancre-paper

A Llama of 8 layers learns, byte by byte, the texts behind Python's ``help()``. All runs start from the same weights and
see the same batches, and they take turns at every step, so that a busy machine slows all of them alike. Pictures,
checkpoints and ``results.json`` go to ``out/train_lm``.
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

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch: spinning threads are slow where cores are shared

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
from rewire.plotting import plot_arcs, plot_curves, plot_heatmap

#: What each run passes to rewire.compile; None is the model as it is.
RUNS: dict[str, dict[str, Any] | None] = {
    "residual": None,
    "ancre-preserve": {"topology": "ancre-ingoing", "start": "preserve"},
    "ancre-keep": {"topology": "ancre-ingoing", "start": "paper", "cascade": "keep"},
    "ancre-paper": {"topology": "ancre-ingoing", "start": "paper"},
}
BASELINE = "residual"


@dataclasses.dataclass(frozen=True)
class Config:
    steps: int
    seed: int
    layers: int = 8
    width: int = 128
    heads: int = 4
    length: int = 128
    batch: int = 8
    learning_rate: float = 3e-3
    weight_decay: float = 0.1
    evaluate_every: int = 20
    validation_batch: int = 64


@dataclasses.dataclass
class Run:
    """One model in training, and what was measured."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    kept: int = 0  # bytes of activations kept for the backward pass
    losses: list[float] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)
    validation: list[tuple[int, float]] = dataclasses.field(default_factory=list)

    @property
    def final(self) -> float:
        return self.validation[-1][1]

    def steps_to(self, loss: float) -> int | None:
        """The first evaluation at which the validation loss was ``loss`` or less."""
        return next((step for step, value in self.validation if value <= loss), None)


def build(name: str, config: Config) -> Run:
    """The model of one run, its weights drawn from the seed, with its optimizer."""
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
    model: nn.Module = LlamaForCausalLM(llama)
    options = RUNS[name]
    if options is not None:
        model = rewire.compile(model, **options)
    # Weight decay would pull the connection logits towards uniform weights: they get a group of their own.
    logits = [p for connection in rewire.connections(model).values() for p in connection.parameters()]
    others = [p for p in model.parameters() if not any(p is logit for logit in logits)]
    groups = [{"params": others, "weight_decay": config.weight_decay}, {"params": logits, "weight_decay": 0.0}]
    return Run(name, model, torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95), fused=True))


def learning_rate(step: int, config: Config) -> float:
    """Linear warm-up over the first tenth, then a cosine down to a tenth."""
    warmup = max(1, config.steps // 10)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, config.steps - warmup)
    return config.learning_rate * (0.55 + 0.45 * math.cos(math.pi * progress))


def read_text() -> tuple[Tensor, Tensor]:
    """Bytes for training, and for validation: every eighth topic is held out whole."""
    names = sorted(topics)
    held_out = names[::8]
    train = "\n\n".join(topics[name] for name in names if name not in held_out)
    validation = "\n\n".join(topics[name] for name in held_out)
    return tuple(torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long() for text in (train, validation))  # type: ignore[return-value]


def windows(text: Tensor, starts: Tensor, length: int) -> Tensor:
    """[len(starts), length]: pieces of the text."""
    return text[starts[:, None] + torch.arange(length)]


def train_step(run: Run, batch: Tensor, rate: float) -> None:
    started = time.perf_counter()
    for group in run.optimizer.param_groups:
        group["lr"] = rate
    loss = run.model(input_ids=batch, labels=batch).loss
    loss.backward()
    nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.losses.append(loss.item())
    run.seconds.append(time.perf_counter() - started)


@torch.no_grad()
def evaluate(run: Run, step: int, batch: Tensor) -> None:
    run.model.eval()
    run.validation.append((step, run.model(input_ids=batch, labels=batch).loss.item()))
    run.model.train()


def kept_for_backward(model: nn.Module, batch: Tensor) -> int:
    """Bytes of activations that a forward keeps for its backward pass; that of a process would mix the runs."""
    kept: dict[int, int] = {}
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = model(input_ids=batch, labels=batch).loss
    assert loss.requires_grad  # and alive until here: no storage was reused
    return sum(kept.values())


def train(runs: list[Run], config: Config, console: Console) -> None:
    text, held_out = read_text()
    starts = torch.linspace(0, len(held_out) - config.length, config.validation_batch).long()
    validation = windows(held_out, starts, config.length)
    generator = torch.Generator().manual_seed(config.seed)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        tasks = [progress.add_task(run.name, total=config.steps) for run in runs]
        for step in range(config.steps):
            starts = torch.randint(len(text) - config.length, (config.batch,), generator=generator)
            batch = windows(text, starts, config.length)
            for run, task in zip(runs, tasks, strict=True):
                if step == 0:
                    run.kept = kept_for_backward(run.model, batch)
                if step % config.evaluate_every == 0:
                    evaluate(run, step, validation)
                train_step(run, batch, learning_rate(step, config))
                progress.update(task, advance=1, description=f"{run.name:<14}  loss {run.losses[-1]:.3f}")
    for run in runs:
        evaluate(run, config.steps, validation)


def table_of(runs: list[Run], baseline: Run, config: Config) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("run", no_wrap=True)
    for column in ("validation loss", "baseline's loss after", "median step", "kept for backward", "learned weights"):
        table.add_column(column, justify="right")
    for run in runs:
        reached = run.steps_to(baseline.final)
        table.add_row(
            run.name,
            f"{run.final:.4f}",
            "never" if reached is None else f"{reached} of {config.steps}",
            f"{1000 * statistics.median(run.seconds):.0f} ms",
            f"{run.kept / 2**20:.1f} MiB",
            str(sum(p.numel() for c in rewire.connections(run.model).values() for p in c.parameters())),
        )
    return table


def finding(run: Run, baseline: Run, config: Config) -> str:
    """One sentence on how a run compares with the baseline, whichever way it fell."""
    gap, reached = run.final - baseline.final, run.steps_to(baseline.final)
    ratio = statistics.median(run.seconds) / statistics.median(baseline.seconds)
    sentence = f"{run.name} ends {abs(gap):.4f} {'above' if gap > 0 else 'below'} {baseline.name} in validation loss"
    if reached is not None:
        sentence += f", whose final {baseline.final:.4f} it reached after {reached} of {config.steps} steps"
    return f"{sentence}; its steps took {ratio:.2f} times as long."


def save(runs: list[Run], baseline: Run, config: Config, out: Path, findings: list[str]) -> None:
    """results.json, the pictures, and a state dict of every rewired model."""
    results = {
        "config": dataclasses.asdict(config),
        "machine": {"system": platform.platform(), "cores": os.cpu_count(), "threads": torch.get_num_threads()},
        "versions": {m.__name__: m.__version__ for m in (rewire, torch, transformers)} | {"python": platform.python_version()},
        "runs": {
            run.name: {
                "compile": RUNS[run.name],
                "final_validation_loss": run.final,
                "steps_to_baseline": run.steps_to(baseline.final),
                "median_step_seconds": statistics.median(run.seconds),
                "kept_for_backward_bytes": run.kept,
                "validation": run.validation,
                "losses": run.losses,
            }
            for run in runs
        },
        "findings": findings,
    }
    (out / "results.json").write_text(json.dumps(results, indent=1))
    # From an eighth of the steps on: what comes before would squeeze the rest into a line.
    later = {run.name: [(step, loss) for step, loss in run.validation if 8 * step >= config.steps] for run in runs}
    plot_curves(later, out / "loss.png", "step", "validation loss (nats per byte)")
    rewired = [run for run in runs if rewire.connections(run.model)]
    if rewired:
        matrices = {run.name: matrix for run in rewired for matrix in rewire.coefficients(run.model).values()}
        plot_heatmap(matrices, out / "heatmap.png")
        plot_arcs(matrices, out / "arcs.png")
    for run in rewired:
        torch.save(run.model.state_dict(), out / f"{run.name}.pt")


def main(
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each run.")] = 400,
    seed: Annotated[int, typer.Option(help="Seed of the weights and of the order of the text.")] = 0,
    runs: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(RUNS)}.")] = "residual,ancre-preserve,ancre-keep",
    out: Annotated[Path, typer.Option(help="Folder for everything that is written.")] = Path("out/train_lm"),
) -> None:
    """Train a small Llama with and without learned depth connections."""
    names = [BASELINE, *(name for name in runs.split(",") if name != BASELINE)]
    unknown = [name for name in names if name not in RUNS]
    if unknown:
        raise typer.BadParameter(f"there is no run {unknown[0]!r}; there are {', '.join(RUNS)}.", param_hint="--runs")
    console, config = Console(), Config(steps, seed)
    out.mkdir(parents=True, exist_ok=True)
    trained = [build(name, config) for name in names]
    baseline = trained[0]
    train(trained, config, console)
    findings = [finding(run, baseline, config) for run in trained[1:]]
    save(trained, baseline, config, out, findings)
    console.print(table_of(trained, baseline, config))
    for sentence in findings:
        console.print(sentence, highlight=False)
    console.print(f"This is one small model and one seed. Pictures, checkpoints and results.json are in {out}.", highlight=False)


if __name__ == "__main__":
    typer.run(main)
