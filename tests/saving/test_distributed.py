"""Checkpoints of torch.distributed.checkpoint, in one process. Several: tests/test_distributed.py."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from models import PreNorm, Stack
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.optim import AdamW

import rewire
from rewire.saving.distributed import LoadPlanner

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # torch: no process group, one process is assumed


def plain(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Stack(PreNorm)


def rewired(topology: str = "ancre-ingoing", seed: int = 0, **settings: Any) -> nn.Module:
    return rewire.compile(plain(seed), topology, validate=False, **settings)


def optimizer_of(model: nn.Module, lr: float) -> AdamW:
    return AdamW(rewire.parameter_groups(model, lr=lr, weight_decay=0.1, connection_lr=10 * lr))


def train(model: nn.Module, optimizer: AdamW, steps: int = 2) -> None:
    torch.manual_seed(7)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(2, 9, 8)).square().mean().backward()
        optimizer.step()


def save(folder: Path, model: nn.Module, optimizer: AdamW, options: StateDictOptions) -> None:
    weights, state = get_state_dict(model, optimizer, options=options)
    dcp.save({"model": weights, "optim": state}, checkpoint_id=folder)


def load(folder: Path, model: nn.Module, optimizer: AdamW, options: StateDictOptions) -> None:
    weights, state = get_state_dict(model, optimizer, options=options)
    dcp.load({"model": weights, "optim": state}, checkpoint_id=folder, planner=LoadPlanner())
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state, options=options)


@pytest.fixture(params=[False, True], ids=["nested", "flat"])
def options(request: pytest.FixtureRequest) -> StateDictOptions:
    """How the optimizer's state is written."""
    return StateDictOptions(flatten_optimizer_state_dict=request.param)


def test_a_plain_checkpoint_loads(tmp_path: Path, options: StateDictOptions, caplog: pytest.LogCaptureFixture) -> None:
    base = plain()
    saved = AdamW(base.parameters(), lr=1e-2, weight_decay=0.3)
    train(base, saved)
    save(tmp_path, base, saved, options)

    model = rewired(seed=1)
    start = rewire.connections(model)["layers"].matrix()
    optimizer = optimizer_of(model, lr=0.5)
    with caplog.at_level(logging.WARNING):
        load(tmp_path, model, optimizer, options)
    assert "connection weights stay as they are" in caplog.text
    assert torch.equal(rewire.connections(model)["layers"].matrix(), start)
    weights = dict(model.named_parameters())
    for name, weight in base.named_parameters():
        assert torch.equal(weights[name], weight)
        for kind in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.state[weights[name]][kind], saved.state[weight][kind]), (name, kind)
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(1e-2, 0.3), (500.0, 0.0)]


def test_a_plain_checkpoint_of_as_many_groups(tmp_path: Path) -> None:
    """The group of connections does not take the settings of another group of that number."""
    base, options = plain(), StateDictOptions()
    matrices, vectors = ([p for p in base.parameters() if (p.dim() > 1) == wide] for wide in (True, False))
    saved = AdamW([{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}], lr=1e-2)
    train(base, saved)
    save(tmp_path, base, saved, options)
    model = rewired()
    matrices, vectors, learned = (
        [p for name, p in model.named_parameters() if choose(name, p)]
        for choose in (
            lambda name, p: p.dim() > 1 and "depth_connections" not in name,
            lambda name, p: p.dim() == 1 and "depth_connections" not in name,
            lambda name, p: "depth_connections" in name,
        )
    )
    own = {"params": learned, "lr": 7.0, "weight_decay": 0.0}
    optimizer = AdamW([{"params": matrices}, {"params": vectors}, own], lr=1.0)
    load(tmp_path, model, optimizer, options)
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [
        (1e-2, 0.3),
        (1e-2, 0.0),
        (7.0, 0.0),
    ]


def test_a_rewired_checkpoint_loads(tmp_path: Path, options: StateDictOptions) -> None:
    model = rewired()
    optimizer = optimizer_of(model, lr=1e-2)
    train(model, optimizer)
    save(tmp_path, model, optimizer, options)
    other = rewired(seed=1)
    resumed = optimizer_of(other, lr=0.5)
    load(tmp_path, other, resumed, options)
    train(model, optimizer)
    train(other, resumed)
    for (name, expected), actual in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(actual, expected), name


@pytest.mark.parametrize("without_optimizer", [False, True])
def test_another_rewiring_is_refused(tmp_path: Path, without_optimizer: bool) -> None:
    model = rewired("denseformer")
    save(tmp_path, model, optimizer_of(model, lr=1e-2), StateDictOptions())
    other = rewired("grn-v3", seed=1)
    before = [p.detach().clone() for p in other.parameters()]
    weights, optim = get_state_dict(other, optimizer_of(other, lr=1e-2))
    state = {"model": weights} if without_optimizer else {"model": weights, "optim": optim}
    with pytest.raises(CheckpointException, match=r"(?s)RewireError.*rewired in another way.*-layers.alpha \[9\]"):
        dcp.load(state, checkpoint_id=tmp_path, planner=LoadPlanner())
    assert all(map(torch.equal, before, other.parameters()))


def test_what_else_lacks_is_an_error(tmp_path: Path) -> None:
    state = plain().state_dict()
    del state["layers.1.attn.out.weight"]
    dcp.save({"model": state}, checkpoint_id=tmp_path)
    with pytest.raises(CheckpointException, match=r"Missing key in checkpoint state_dict: model.layers.1.attn.out"):
        dcp.load({"model": rewired().state_dict()}, checkpoint_id=tmp_path, planner=LoadPlanner())


def test_a_rewired_checkpoint_into_the_plain_model(tmp_path: Path) -> None:
    """Torch's own way: what nobody asks for is not read."""
    model = rewired()
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path)
    base = plain(seed=1)
    dcp.load({"model": base.state_dict()}, checkpoint_id=tmp_path, planner=LoadPlanner())
    assert torch.equal(base.out.weight, model.out.weight)
