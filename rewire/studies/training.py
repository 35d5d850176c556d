"""One training run, and the cost of a step."""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from rewire.bench.harness import kept_for_backward, side_by_side
from rewire.copies import Inputs
from rewire.diagnostics.losses import scalar
from rewire.diagnostics.moves import Look, Moves, look, moves, starts, together
from rewire.errors import RewireError
from rewire.init.apply import initialize
from rewire.init.initializers.scaled_weights import Scaled
from rewire.runtime.connection import connections
from rewire.studies.contenders import Contender, Values
from rewire.studies.task import Budget, Task
from rewire.torch_internals import pytree
from rewire.training import parameter_groups

#: Evaluations in a budget, besides the one at the start of a run.
EVALUATIONS = 10
#: Timed training steps of each model, in turn with the plain one.
_ROUNDS = 20


class Point(NamedTuple):
    """The validation loss at some point of a run, and the seconds of training until then."""

    step: int
    seconds: float
    loss: float


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a study tunes.

    Attributes:
        rate: learning rate of the model.
        connections: factor on the rates that `rewire.parameter_groups` gives the connection weights.
        embedding, branch: factors on weights at their start, see `rewire.init.Scaled`.
    """

    rate: float
    connections: float = 1.0
    embedding: float = 1.0
    branch: float = 1.0

    @property
    def scales(self) -> Scaled:
        return Scaled(self.embedding, self.branch)

    def __str__(self) -> str:
        factors = {name: value for name, value in dataclasses.asdict(self).items() if name != "rate" and value != 1}
        return ", ".join([f"rate {self.rate:.3g}", *(f"{name} x {value:g}" for name, value in factors.items())])


@dataclasses.dataclass(frozen=True)
class Trial:
    """A run of a contender.

    Attributes:
        seed: of the model's weights and the batches.
        length: of the run and its schedule, as a multiple of the budget.
    """

    setting: Setting
    seed: int
    length: float = 1.0


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of a run.

    Attributes:
        curve: a point before the first step, then one at each tenth of the budget.
        spikes: how often the training loss jumped above its usual range.
        moves: of the connection weights of all trunks together; None if none are learned.
        matrix: effective weights of the first trunk at the end, as rows; empty if there are none.
    """

    trial: Trial
    curve: list[Point]
    spikes: int = 0
    moves: Moves | None = None
    matrix: list[list[float]] = dataclasses.field(default_factory=list)

    @property
    def loss(self) -> float:
        return self.curve[-1].loss

    def __str__(self) -> str:
        return f"loss {self.loss:.4f} after {self.curve[-1].step} steps"


class Cost(NamedTuple):
    """The cost of a training step.

    Attributes:
        seconds: median time of a step.
        time: median, as a multiple of the plain model's, timed in turn with it.
        kept: bytes of activations that a forward keeps for its backward.
        weights: number of learned connection weights.
        evaluation: seconds of one evaluation.
    """

    seconds: float
    time: float
    kept: int
    weights: int
    evaluation: float = 0.0


def train(
    task: Task,
    contender: Contender,
    trial: Trial,
    budget: Budget,
    device: torch.device,
    values: Values | None = None,
    tick: Callable[[float], object] = lambda spent: None,
) -> tuple[Result, nn.Module]:
    """Train a fresh model. A loss that is not finite ends the run, with an infinite loss as its last point.

    Args:
        values: of the connection weights at the start; default: the topology's own.
        tick: called after each step with the share of the budget that is spent.

    Raises:
        RewireError: the model cannot be connected like that, or there were too few batches.
    """
    model = make(task, contender, trial, device, values)
    setting, budget = trial.setting, budget.times(trial.length)
    groups = parameter_groups(
        model, lr=setting.rate, weight_decay=task.weight_decay, connection_factor=setting.connections
    )
    optimizer = task.optimizer(groups)
    step, seconds, spent = 0, 0.0, 0.0
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: warm_up_and_decay(spent))
    curve, watch, spikes = [Point(0, 0.0, evaluate(task, model, device))], _Watch(model), _Spikes()
    for step, batch in enumerate(task.batches(trial.seed), start=1):
        started = time.perf_counter()
        loss = training_step(task, model, optimizer, to(batch, device))
        seconds += time.perf_counter() - started
        spent = budget.spent(step, seconds)
        schedule.step()
        spikes.see(loss)
        tick(spent)
        if not math.isfinite(loss):
            curve.append(Point(step, seconds, math.inf))
            break
        if spent == 1 or int(spent * trial.length * EVALUATIONS) >= len(curve):
            curve.append(Point(step, seconds, evaluate(task, model, device)))
            watch.look(step)
        if spent == 1:
            break
    else:
        raise RewireError(f"batches({trial.seed}) ended after {step} steps, before the budget was spent: let it go on.")
    return Result(trial, curve, spikes.count, watch.moves(), watch.matrix()), model


def make(
    task: Task, contender: Contender, trial: Trial, device: torch.device, values: Values | None = None
) -> nn.Module:
    """The model of a run, in training mode: weights drawn from the seed, scaled, rewired.

    It is not validated here, which takes longer than a short run. `cost` validates it once.
    """
    torch.manual_seed(trial.seed)
    plain = task.model().to(device)
    if trial.setting.scales != Scaled():
        initialize(plain, trial.setting.scales)
    return contender.rewired(plain, values, validate=False).train()


def training_step(task: Task, model: nn.Module, optimizer: torch.optim.Optimizer, batch: object) -> float:
    """Make one training step; return the loss before it. Clipped gradients stay until the next step."""
    optimizer.zero_grad()
    loss = scalar(task.loss)(model, batch)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), task.clip)
    optimizer.step()
    return loss.item()


class _Watch:
    """Observes the connection weights of a model while it trains."""

    def __init__(self, model: nn.Module) -> None:
        learning = any(p.requires_grad for c in connections(model).values() for p in c.parameters())
        self.connections = connections(model) if learning else {}
        self.start = starts(self.connections)
        self.looks: list[Look] = []
        self.look(0)

    def look(self, step: int) -> None:
        found = [look(connection, self.start[trunk], step) for trunk, connection in self.connections.items()]
        if found:
            self.looks.append(together(found))

    def moves(self) -> Moves | None:
        return moves(self.looks) if self.looks else None

    def matrix(self) -> list[list[float]]:
        return next((c.matrix().tolist() for c in self.connections.values()), [])


class _Spikes:
    """Counts how often a loss jumps above its usual range: six standard deviations of its last steps."""

    def __init__(self) -> None:
        self.count, self.mean, self.square, self.steps, self.high = 0, 0.0, 0.0, 0, False

    def see(self, loss: float) -> None:
        off = loss - self.mean
        high = self.steps > 10 and not off <= 6 * math.sqrt(self.square)
        self.count += high and not self.high
        self.high = high
        if math.isfinite(loss) and not high:
            self.steps += 1
            share = max(0.05, 1 / self.steps)  # at first a plain mean
            self.mean += share * off
            self.square += share * (off * off - self.square) if self.steps > 1 else 0.0


@torch.no_grad()
def evaluate(task: Task, model: nn.Module, device: torch.device) -> float:
    """Mean loss of the validation batches, in evaluation mode; infinite if it is no number."""
    model.eval()
    losses = [scalar(task.loss)(model, to(batch, device)).item() for batch in task.validation]
    model.train()
    mean = sum(losses) / len(losses)
    return mean if math.isfinite(mean) else math.inf


def warm_up_and_decay(spent: float) -> float:
    """Factor on the learning rate: linear from a twentieth to 1 over a tenth of the budget, then a cosine to 0.1."""
    if spent < 0.1:
        return 0.05 + 9.5 * spent
    return 0.55 + 0.45 * math.cos(math.pi * (spent - 0.1) / 0.9)


def cost(task: Task, contender: Contender, device: torch.device) -> Cost:
    """The cost of a training step of ``contender``, timed beside the plain model.

    Raises:
        RewireError: the model cannot be connected like that. Here it is validated, too.
    """
    batch = to(next(iter(task.batches(0))), device)
    torch.manual_seed(0)
    model = task.model().to(device).train()
    inputs = inputs_of(model, lambda: task.loss(model, batch))
    models = {"plain": copy.deepcopy(model), "other": contender.rewired(model, example_inputs=inputs)}
    optimizers = {
        name: task.optimizer(parameter_groups(each, lr=1e-6, weight_decay=0.0)) for name, each in models.items()
    }
    kept = kept_for_backward(models["other"], lambda: task.loss(models["other"], batch))
    steps = {name: (lambda name=name: training_step(task, models[name], optimizers[name], batch)) for name in models}
    times = side_by_side(steps, _ROUNDS, device)
    ratio = times["other"].ratio(times["plain"]) if contender.settings else 1.0
    weights = sum(p.numel() for c in connections(models["other"]).values() for p in c.parameters() if p.requires_grad)
    started = time.perf_counter()
    evaluate(task, models["other"], device)
    return Cost(times["other"].median, ratio, kept, weights, time.perf_counter() - started)


def inputs_of(model: nn.Module, run: Callable[[], object]) -> Inputs:
    """The arguments of ``model`` in ``run``; those of the last call if there are several."""
    seen: list[Inputs] = []
    handle = model.register_forward_pre_hook(lambda _, args, kwargs: seen.append((args, kwargs)), with_kwargs=True)
    with handle, torch.no_grad():
        run()
    if not seen:
        raise RewireError(f"the loss does not call the model, {type(model).__name__}: there is nothing to compare.")
    return seen[-1]


def to(batch: object, device: torch.device) -> Any:
    """``batch`` with its tensors, and other objects that have ``to`` (such as a BatchEncoding), on ``device``."""
    return pytree.tree_map(lambda part: part.to(device) if hasattr(part, "to") else part, batch)
