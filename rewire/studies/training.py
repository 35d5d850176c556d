"""One training run, and what a step costs."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rewire.bench.harness import kept_for_backward, side_by_side
from rewire.errors import RewireError
from rewire.runtime.connection import connections
from rewire.studies.contenders import Contender, Scales
from rewire.studies.task import Budget, Task
from rewire.torch_internals import pytree
from rewire.training import parameter_groups

#: Evaluations of a run, after the one at its start.
EVALUATIONS = 20
#: Training steps of each model that are timed, in turn with the plain one.
_ROUNDS = 20


class Point(NamedTuple):
    """The validation loss at some moment of a run, and the seconds of training until then."""

    step: int
    seconds: float
    loss: float


class Cost(NamedTuple):
    """What a training step costs.

    Attributes:
        time: median, as a multiple of the plain model's, timed in turn with it.
        kept: bytes of activations that a forward keeps for its backward.
        weights: number of learned connection weights.
    """

    time: float
    kept: int
    weights: int


def train(
    task: Task,
    contender: Contender,
    rate: float,
    scales: Scales,
    seed: int,
    budget: Budget,
    device: torch.device,
    tick: Callable[[float], object] = lambda spent: None,
) -> Iterator[Point]:
    """Train a fresh model; a point before the first step, then one at each twentieth of the budget.

    A loss that is not finite ends the run; its last point has an infinite one.

    Args:
        tick: called after each step with the part of the budget that is spent.

    Raises:
        RewireError: the model cannot be connected like that, or there were too few batches.
    """
    model = make(task, contender, scales, seed, device)
    own = 0.0 if contender.held == "still" else None
    optimizer = task.optimizer(parameter_groups(model, lr=rate, weight_decay=task.weight_decay, connection_lr=own))
    step, seconds, spent, evaluated = 0, 0.0, 0.0, 0
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: warm_up_and_decay(spent))
    yield Point(0, 0.0, evaluate(task, model, device))
    for batch in task.batches(seed):
        started = time.perf_counter()
        loss = training_step(task, model, optimizer, to(batch, device))
        seconds += time.perf_counter() - started
        step += 1
        spent = budget.spent(step, seconds)
        schedule.step()
        tick(spent)
        if not math.isfinite(loss):
            yield Point(step, seconds, math.inf)
            return
        if (due := int(spent * EVALUATIONS)) > evaluated:
            evaluated = due
            yield Point(step, seconds, evaluate(task, model, device))
        if spent == 1:
            return
    raise RewireError(f"batches({seed}) ended after {step} steps, before the budget was spent: it has to go on.")


def make(task: Task, contender: Contender, scales: Scales, seed: int, device: torch.device) -> nn.Module:
    """The model of a run: its weights drawn from the seed, scaled, rewired; in training mode.

    It is not validated: that takes longer than a short run, and is done once, where `cost` is measured.
    """
    torch.manual_seed(seed)
    plain = task.model().to(device)
    scales.apply(plain)
    return contender.rewired(plain, validate=False).train()


def training_step(task: Task, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> float:
    """One step; the loss before it."""
    loss = task.loss(model, batch)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), task.clip)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@torch.no_grad()
def evaluate(task: Task, model: nn.Module, device: torch.device) -> float:
    """Mean loss of the validation batches, in evaluation mode; infinite if it is no number."""
    model.eval()
    losses = [task.loss(model, to(batch, device)).item() for batch in task.validation]
    model.train()
    mean = sum(losses) / len(losses)
    return mean if math.isfinite(mean) else math.inf


def warm_up_and_decay(spent: float) -> float:
    """Factor on the learning rate: a line from a twentieth to 1 up to a tenth of the budget, a cosine down to 0.1."""
    if spent < 0.1:
        return 0.05 + 9.5 * spent
    return 0.55 + 0.45 * math.cos(math.pi * (spent - 0.1) / 0.9)


def cost(task: Task, contender: Contender, device: torch.device) -> Cost:
    """What a training step of ``contender`` costs beside one of the plain model.

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
    times = side_by_side(steps, _ROUNDS, device) if contender.settings else {}
    weights = sum(p.numel() for c in connections(models["other"]).values() for p in c.parameters() if p.requires_grad)
    return Cost(times["other"].ratio(times["plain"]) if times else 1.0, kept, weights)


def inputs_of(model: nn.Module, run: Callable[[], object]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of ``model`` in ``run``, the last ones if it is called several times."""
    seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    handle = model.register_forward_pre_hook(lambda _, args, kwargs: seen.append((args, kwargs)), with_kwargs=True)
    with handle, torch.no_grad():
        run()
    if not seen:
        raise RewireError(f"the loss does not call the model, {type(model).__name__}: there is nothing to compare.")
    return seen[-1]


def to(batch: Any, device: torch.device) -> Any:
    """``batch``, its tensors on ``device``."""
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), batch)


def reached(curve: Iterable[Point], goal: float) -> Point | None:
    """The first point of a run that is as good as ``goal``."""
    return next((point for point in curve if point.loss <= goal), None)
