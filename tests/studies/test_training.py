from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import regression
import torch
from regression import task
from torch import nn

import rewire
from rewire.diagnostics.losses import loss_of_model
from rewire.errors import RewireError
from rewire.studies.contenders import PLAIN, Contender, parse
from rewire.studies.task import Budget, Task
from rewire.studies.training import (
    Result,
    Setting,
    Trial,
    _Spikes,
    cost,
    evaluate,
    inputs_of,
    make,
    to,
    train,
    warm_up_and_decay,
)

CPU = torch.device("cpu")


def run(contender: Contender, setting: Setting, budget: Budget, seed: int = 0, length: float = 1.0) -> Result:
    return train(task, contender, Trial(setting, seed, length), budget, CPU)[0]


def test_a_run_is_what_a_loop_by_hand_gives() -> None:
    torch.manual_seed(3)
    model = rewire.compile(regression.model(), "laurel-rw", validate=False)
    groups = rewire.parameter_groups(model, lr=0.01, weight_decay=task.weight_decay)
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    rates = [group["lr"] * (2 if n else 1) for n, group in enumerate(groups)]  # the connections' twice as high
    for step, batch in enumerate(itertools.islice(task.batches(3), 40)):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * warm_up_and_decay(step / 40)
        regression.loss(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), task.clip)
        optimizer.step()
        optimizer.zero_grad()
    found = run(parse("laurel-rw"), Setting(0.01, connections=2.0), Budget(steps=40), 3)
    assert [point.step for point in found.curve] == list(range(0, 41, 4))
    assert found.loss == pytest.approx(evaluate(task, model, CPU), rel=1e-6)
    (matrix,) = rewire.coefficients(model).values()
    torch.testing.assert_close(torch.tensor(found.matrix), matrix)


def test_a_preserving_start_begins_with_the_plain_models_loss() -> None:
    setting = Setting(0.01, embedding=2.0, branch=0.5)
    first = [run(parse(name), setting, Budget(steps=1)).curve[0] for name in ("residual", "ancre-ingoing")]
    assert first[0] == first[1]


def test_a_longer_run_has_a_longer_schedule() -> None:
    short, long = (run(PLAIN, Setting(0.01), Budget(steps=40), length=length) for length in (1.0, 1.5))
    assert (short.curve[-1].step, long.curve[-1].step) == (40, 60)
    assert short.curve[1] != long.curve[1]


def test_a_held_control_keeps_its_weights_and_trains_the_rest() -> None:
    contender = parse("ancre-ingoing:start=paper").holding("start")
    model = make(task, contender, Trial(Setting(0.1), 0), CPU)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    optimizer = task.optimizer(rewire.parameter_groups(model, lr=0.1, weight_decay=0.1))
    regression.loss(model, next(task.batches(0))).backward()
    optimizer.step()
    moved = {name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])}
    assert moved == {name for name in before if "depth_connections" not in name} != set(before)


def test_scales_multiply_the_first_weights_and_the_ends_of_branches() -> None:
    plain, scaled = (
        dict(make(task, PLAIN, Trial(setting, 0), CPU).named_parameters())
        for setting in (Setting(0.1), Setting(0.1, embedding=4.0, branch=0.5))
    )
    factors = {name: (scaled[name] / weight).mean().item() for name, weight in plain.items()}
    assert factors.pop("0.weight") == pytest.approx(4)
    assert {factors.pop(f"{n}.outer.weight") for n in (1, 2, 3)} == {0.5}
    assert set(factors.values()) == {1.0}


def test_where_the_weights_went() -> None:
    slow, fast = (
        run(parse("ancre-ingoing"), Setting(0.01, connections=c), Budget(steps=60)).moves for c in (0.01, 30.0)
    )
    assert slow and fast and slow.moved < 0.1 < 5 < fast.moved
    assert not slow.saturated and slow.settled > fast.settled
    assert run(PLAIN, Setting(0.01), Budget(steps=5)).moves is None


def test_spikes_are_counted_once_each() -> None:
    spikes = _Spikes()
    for step in range(200):
        spikes.see(1 + 0.1 * math.sin(7 * step) + (5 if step in (50, 51, 52, 120) else 0))
    assert spikes.count == 2
    spikes.see(math.nan)
    assert spikes.count == 3


def test_a_budget_of_seconds_ends_the_run() -> None:
    curve = run(PLAIN, Setting(0.01), Budget(seconds=0.2)).curve
    assert 0.2 <= curve[-1].seconds < 0.4
    assert curve[-1].step > 5


@pytest.mark.parametrize(
    "settings", [{}, {"steps": 0}, {"steps": "5"}, {"seconds": -1.0}, {"seconds": math.nan}, {"seconds": math.inf}]
)
def test_a_budget_that_is_none(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="positive number of steps or seconds"):
        Budget(**settings)


def test_losses_that_are_no_numbers_end_the_run() -> None:
    found = run(PLAIN, Setting(1e30), Budget(steps=40))
    assert found.loss == math.inf and found.curve[-1].step < 40


def test_batches_that_end_too_early() -> None:
    short = dataclasses.replace(task, batches=lambda seed: itertools.islice(regression.batches(seed), 5))
    with pytest.raises(RewireError, match=r"batches\(0\) ended after 5 steps"):
        train(short, PLAIN, Trial(Setting(0.01), 0), Budget(steps=10), CPU)


def test_what_a_model_is_called_with() -> None:
    model = regression.model()
    batch = next(task.batches(0))
    (args, kwargs) = inputs_of(model, lambda: task.loss(model, batch))
    assert args == (batch[0],) and kwargs == {}
    with pytest.raises(RewireError, match="does not call the model"):
        inputs_of(model, lambda: None)


def test_batches_that_know_how_to_go_to_a_device() -> None:
    """BatchEncoding, of transformers' tokenizers, is a dict to nobody but itself."""
    transformers = pytest.importorskip("transformers")
    tokens = transformers.BatchEncoding({"input_ids": torch.ones(1, 2)})
    moved = to({"tokens": tokens, "label": torch.ones(1), "name": "a"}, torch.device("meta"))
    assert moved["tokens"]["input_ids"].is_meta and moved["label"].is_meta and moved["name"] == "a"


def test_the_cost_of_a_step() -> None:
    found = cost(task, parse("laurel-rw"), CPU)
    assert found.weights == 6 and found.time > 0 and 0 < found.seconds < 1
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": regression.model()}, "model is a Sequential: give a function"),
        ({"batches": [next(task.batches(0))]}, "batches is a list"),
        ({"validation": iter(task.validation)}, "validation is a list_iterator"),
        ({"validation": torch.ones(8, 4)}, "validation is a Tensor"),
    ],
)
def test_parts_of_a_task_of_other_types(change: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        dataclasses.replace(task, **change)
    with pytest.raises(ValueError, match="learning_rate='1e-3'"):
        dataclasses.replace(task, learning_rate="1e-3")


def one_net() -> Callable[[], nn.Module]:
    net = regression.model()
    return lambda: net


def one_iterator() -> Callable[[int], Iterator[object]]:
    generator = regression.batches(0)
    return lambda seed: generator


def drawn_elsewhere() -> nn.Module:
    net = regression.model()
    for weight in net.parameters():
        nn.init.constant_(weight, random.random())
    return net


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": one_net()}, "the same weights at each call"),
        ({"model": drawn_elsewhere}, "other weights at each call with the same seed"),
        ({"model": lambda: None}, "gives a NoneType"),
        ({"batches": one_iterator()}, r"batches\(0\) gives another first batch"),
        ({"batches": lambda seed: []}, r"batches\(0\) has no batch"),
    ],
)
def test_runs_that_would_have_no_pairs(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    """A net that is handed out again went on from the last run's weights, in silence."""
    with pytest.raises(RewireError, match=message):
        rewire.study(dataclasses.replace(task, **change), ["skipinit"], steps=5, out=tmp_path, progress=False)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda model, batch: regression.loss(model, batch).item(), "is a float"),
        (lambda model, batch: model(batch[0]), r"is a tensor of shape \[\d+, 1\]"),
    ],
)
def test_losses_that_are_no_scalars(loss: Any, message: str) -> None:
    with pytest.raises(RewireError, match=message):
        train(dataclasses.replace(task, loss=loss), PLAIN, Trial(Setting(0.01), 0), Budget(steps=1), CPU)
    with pytest.raises(RewireError, match=message):
        rewire.ablate(rewire.compile(regression.model(), "denseformer", validate=False), task.validation, loss=loss)
