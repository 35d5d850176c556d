"""The training loop of the large experiments: accumulation, bfloat16, torch.compile, checkpoints, logs and a plot."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from common import RESULTS, machine
from torch import Tensor, nn

import rewire
from rewire.plotting import plot_curves

#: Loss of a model on a micro-batch: (model, step, index of the micro-batch) -> scalar.
TrainingLoss = Callable[[nn.Module, int, int], Tensor]
#: Mean loss on the validation data.
ValidationLoss = Callable[[nn.Module], float]


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one model is trained.

    Attributes:
        steps: optimiser steps, ``warmup`` of them with a rate that rises linearly.
        batch, micro: sequences or images of a step, and of one forward; ``batch`` is a multiple of ``micro``.
        rate, schedule: peak learning rate; ``"cosine"`` falls to a tenth, ``"inverse-sqrt"`` like 1 / sqrt(step).
        betas, weight_decay, clip: AdamW's, never on connection weights; 0 does not clip gradients.
        every: steps between validations and checkpoints.
        bf16, compiled: autocast to bfloat16; torch.compile.
        seed: of weights and data.
    """

    steps: int
    warmup: int
    batch: int
    micro: int
    rate: float
    schedule: Literal["cosine", "inverse-sqrt", "constant"] = "cosine"
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    clip: float = 0.0
    every: int = 1000
    bf16: bool = True
    compiled: bool = False
    seed: int = 0

    def factor(self, step: int) -> float:
        """What the peak learning rate is multiplied with."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.schedule == "inverse-sqrt":
            return math.sqrt(max(1, self.warmup) / (step + 1))
        if self.schedule == "constant":
            return 1.0
        progress = (step - self.warmup) / max(1, self.steps - self.warmup)
        return 0.55 + 0.45 * math.cos(math.pi * progress)


def options(description: str | None) -> argparse.ArgumentParser:
    """The command-line options that all large experiments share."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with the data")
    parser.add_argument("--small", action="store_true", help="a scaled-down form: about a minute on a CPU")
    parser.add_argument("--runs", nargs="+", help="which of the runs, by name (default: all)")
    parser.add_argument("--out", type=Path, default=RESULTS / "runs", help="folder for logs, plots and checkpoints")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoints in --out")
    parser.add_argument("--steps", type=int, help="fewer or more steps than the paper's")
    parser.add_argument("--micro", type=int, help="sequences or images of one forward")
    parser.add_argument("--compile", action="store_true", help="use torch.compile")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def adjusted(plan: Plan, args: argparse.Namespace) -> Plan:
    """The plan with what the command line says; warm-up keeps its share of the steps.

    Raises:
        SystemExit: the batch is no multiple of the micro-batch.
    """
    steps, micro = args.steps or plan.steps, args.micro or plan.micro
    if steps < 1 or micro < 1 or plan.batch % micro:
        raise SystemExit(f"--steps {steps} --micro {micro}: both have to be positive, and --micro divide {plan.batch}.")
    warmup = max(1, round(plan.warmup * steps / plan.steps))
    every = min(plan.every, max(1, steps // 4))
    return dataclasses.replace(
        plan, steps=steps, micro=micro, warmup=warmup, every=every, compiled=args.compile, seed=args.seed
    )


def chosen(runs: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """The runs that ``--runs`` names.

    Raises:
        SystemExit: there is no such run.
    """
    unknown = set(args.runs or ()) - set(runs)
    if unknown:
        raise SystemExit(f"--runs {' '.join(sorted(unknown))}: there are {', '.join(runs)}.")
    return {name: runs[name] for name in args.runs or runs}


def optimizer_for(model: nn.Module, plan: Plan) -> torch.optim.Optimizer:
    """AdamW; weight decay would pull connection weights towards equal ones, so they have none."""
    learned = [weight for connection in rewire.connections(model).values() for weight in connection.parameters()]
    known = {id(weight) for weight in learned}
    others = [weight for weight in model.parameters() if id(weight) not in known]
    groups = [{"params": others, "weight_decay": plan.weight_decay}, {"params": learned, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=plan.rate, betas=plan.betas)


class Log:
    """Losses of one run, with the checkpoint beside them."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.folder, self.plan = folder, plan
        self.losses: list[float] = []
        self.validation: list[tuple[int, float]] = []
        self.seconds = 0.0

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "log": self._values()}
        part = self.folder / "checkpoint.part"
        torch.save(state | {"plan": dataclasses.asdict(self.plan)}, part)
        part.replace(self.folder / "checkpoint.pt")  # an interrupted write leaves the last one whole
        (self.folder / "log.json").write_text(json.dumps(self._values() | {"machine": machine()}) + "\n")

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        """Continue from the folder's checkpoint; without one, from the start.

        Raises:
            SystemExit: the checkpoint belongs to another plan.
        """
        path = self.folder / "checkpoint.pt"
        if not path.exists():
            return
        state = torch.load(path, map_location=device, weights_only=True)
        if state["plan"] != dataclasses.asdict(self.plan):
            raise SystemExit(f"--resume: {path} was trained with other options; use them again, or another --out.")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        self.losses, self.seconds = state["log"]["losses"], state["log"]["seconds"]
        self.validation = [(step, loss) for step, loss in state["log"]["validation"]]

    def _values(self) -> dict[str, Any]:
        return {"losses": self.losses, "validation": self.validation, "seconds": self.seconds}


def train(
    model: nn.Module,
    loss_of: TrainingLoss,
    validate: ValidationLoss,
    plan: Plan,
    folder: Path,
    resume: bool = False,
) -> Log:
    """Train as planned; logs and checkpoints go to the folder.

    Args:
        model: on its device, in training mode.
        loss_of: see `TrainingLoss`; equal steps and indices have to give equal data, so that a run can be resumed.
        validate: see `ValidationLoss`; called with the model in evaluation mode, without gradients.
        plan: see `Plan`.
        folder: where log.json and checkpoint.pt go.
        resume: continue from the checkpoint in the folder.
    """
    device = next(model.parameters()).device
    optimizer, log = optimizer_for(model, plan), Log(folder, plan)
    if resume:
        log.load(model, optimizer, device)
    run = torch.compile(model) if plan.compiled else model
    for step in range(len(log.losses), plan.steps):
        started = time.perf_counter()
        torch.manual_seed(plan.seed * 1_000_003 + step)  # dropout and noise, equal when resumed
        log.losses.append(_step(run, loss_of, optimizer, plan, step))
        log.seconds += time.perf_counter() - started
        if not math.isfinite(log.losses[-1]):
            print(f"{folder.name}: the loss is {log.losses[-1]} at step {step}: diverged", flush=True)
            break
        if (step + 1) % plan.every == 0 or step + 1 == plan.steps:
            log.validation.append((step + 1, _validation(model, validate, plan)))
            log.save(model, optimizer)
            last = log.validation[-1][1]
            print(f"{folder.name}: step {step + 1}/{plan.steps}, validation loss {last:.4f}", flush=True)
    return log


def _step(model: Any, loss_of: TrainingLoss, optimizer: torch.optim.Optimizer, plan: Plan, step: int) -> float:
    for group in optimizer.param_groups:
        group["lr"] = plan.rate * plan.factor(step)
    parts = plan.batch // plan.micro
    total = 0.0
    for index in range(parts):
        with _autocast(model, plan):
            loss = loss_of(model, step, index) / parts
        loss.backward()
        total += loss.item()
    if plan.clip:
        nn.utils.clip_grad_norm_(model.parameters(), plan.clip)
    optimizer.step()
    optimizer.zero_grad()
    return total


@torch.no_grad()
def _validation(model: nn.Module, validate: ValidationLoss, plan: Plan) -> float:
    model.eval()
    with _autocast(model, plan):
        loss = validate(model)
    model.train()
    return loss


def _autocast(model: nn.Module, plan: Plan) -> contextlib.AbstractContextManager[Any]:
    device = next(model.parameters()).device.type
    return torch.autocast(device, torch.bfloat16) if plan.bf16 else contextlib.nullcontext()


def plot(logs: dict[str, Log], path: Path) -> None:
    """Validation losses of all runs, in one picture."""
    curves = {name: [(float(step), loss) for step, loss in log.validation] for name, log in logs.items()}
    shown = {name: points for name, points in curves.items() if points}
    if shown:
        plot_curves(shown, path, "step", "validation loss")
