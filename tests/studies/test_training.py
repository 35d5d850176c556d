from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import regression
import torch
from regression import task
from torch import nn

import rewire
from rewire.errors import RewireError
from rewire.studies.contenders import PLAIN, Scales, parse
from rewire.studies.task import Budget, Task, loss_of_model
from rewire.studies.training import cost, evaluate, inputs_of, make, train, warm_up_and_decay

CPU = torch.device("cpu")


def test_a_run_is_what_a_loop_by_hand_gives() -> None:
    torch.manual_seed(3)
    model = rewire.compile(regression.model(), "laurel-rw", validate=False)
    groups = rewire.parameter_groups(model, lr=0.01, weight_decay=task.weight_decay)
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    rates = [group["lr"] for group in groups]
    for step, batch in enumerate(itertools.islice(task.batches(3), 40)):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * warm_up_and_decay(step / 40)
        regression.loss(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), task.clip)
        optimizer.step()
        optimizer.zero_grad()
    points = list(train(task, parse("laurel-rw"), 0.01, Scales(), 3, Budget(steps=40), CPU))
    assert [point.step for point in points] == list(range(0, 41, 2))
    assert points[-1].loss == pytest.approx(evaluate(task, model, CPU), rel=1e-6)


def test_a_preserving_start_begins_with_the_plain_models_loss() -> None:
    first = [
        next(train(task, parse(name), 0.01, Scales(2.0, 0.5), 1, Budget(steps=1), CPU))
        for name in ("residual", "ancre-ingoing")
    ]
    assert first[0] == first[1]


def test_a_frozen_control_keeps_its_weights_and_trains_the_rest() -> None:
    contender = parse("ancre-ingoing:start=paper").control
    model = make(task, contender, Scales(), 0, CPU)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    optimizer = task.optimizer(rewire.parameter_groups(model, lr=0.1, weight_decay=0.1))
    regression.loss(model, next(task.batches(0))).backward()
    optimizer.step()
    moved = {name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])}
    assert moved == {name for name in before if "depth_connections" not in name} != set(before)


def test_a_control_that_stands_still_gets_gradients_and_trains_as_the_plain_model() -> None:
    contender = parse("ancre-ingoing").control
    assert contender is not None and contender.held == "still"
    model = make(task, contender, Scales(), 0, CPU)
    regression.loss(model, next(task.batches(0))).backward()
    (connection,) = rewire.connections(model).values()
    assert all(weight.grad is not None and weight.grad.any() for weight in connection.parameters())
    still, plain = (list(train(task, each, 0.01, Scales(), 0, Budget(steps=40), CPU)) for each in (contender, PLAIN))
    assert still[-1].loss == pytest.approx(plain[-1].loss, rel=1e-3) != plain[0].loss


def test_scales_multiply_the_first_weights_and_the_ends_of_branches() -> None:
    torch.manual_seed(0)
    model = regression.model()
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    Scales(embedding=4.0, branch=0.5).apply(model)
    factors = {name: (weight / before[name]).mean().item() for name, weight in model.named_parameters()}
    assert factors.pop("0.weight") == pytest.approx(4)
    assert {factors.pop(f"{n}.outer.weight") for n in (1, 2, 3)} == {0.5}
    assert set(factors.values()) == {1.0}


def test_a_budget_of_seconds_ends_the_run() -> None:
    points = list(train(task, PLAIN, 0.01, Scales(), 0, Budget(seconds=0.2), CPU))
    assert 0.2 <= points[-1].seconds < 0.4
    assert points[-1].step > 5


@pytest.mark.parametrize("settings", [{}, {"steps": 0}, {"seconds": -1.0}])
def test_a_budget_that_is_none(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="positive number of steps or seconds"):
        Budget(**settings)  # type: ignore[arg-type]


def test_losses_that_are_no_numbers_end_the_run() -> None:
    points = list(train(task, PLAIN, 1e30, Scales(), 0, Budget(steps=40), CPU))
    assert points[-1].loss == math.inf and points[-1].step < 40


def test_batches_that_end_too_early() -> None:
    short = dataclasses.replace(task, batches=lambda seed: itertools.islice(regression.batches(seed), 5))
    with pytest.raises(RewireError, match=r"batches\(0\) ended after 5 steps"):
        list(train(short, PLAIN, 0.01, Scales(), 0, Budget(steps=10), CPU))


def test_what_a_model_is_called_with() -> None:
    model = regression.model()
    batch = next(task.batches(0))
    (args, kwargs) = inputs_of(model, lambda: task.loss(model, batch))
    assert args == (batch[0],) and kwargs == {}
    with pytest.raises(RewireError, match="does not call the model"):
        inputs_of(model, lambda: None)


def test_the_cost_of_a_step() -> None:
    found = cost(task, parse("laurel-rw"), CPU)
    assert found.weights == 6 and found.time > 0
    assert found.kept > cost(task, PLAIN, CPU).kept


def test_the_default_loss_is_the_models_own() -> None:
    with pytest.raises(RewireError, match="a batch is a tuple"):
        loss_of_model(nn.Identity(), (1, 2))
    with pytest.raises(RewireError, match="Identity returned no loss"):
        loss_of_model(nn.Identity(), {"input": torch.ones(1)})


def test_a_task_without_validation() -> None:
    with pytest.raises(ValueError, match="nothing to compare losses on"):
        Task(regression.model, regression.batches, [])
    with pytest.raises(ValueError, match="learning_rate=0"):
        dataclasses.replace(task, learning_rate=0)
