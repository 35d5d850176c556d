"""One of several processes: trains a sharded, rewired model, and saves or resumes. A script."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from mixing import mixed
from models import PreNorm, Stack, vectors
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from worker import folder, play

import rewire


def sharded(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*rewire.connections(model).values(), *model.layers, model):
        fully_shard(module, mesh=mesh)
    return model


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """With a state, but without Adam's quotients, which make of rounding errors whole steps."""
    return torch.optim.SGD(rewire.parameter_groups(model, lr=0.05, weight_decay=0.1), momentum=0.9)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One training step on this rank's rows."""
    rows = vectors(batch=4)
    rows = rows.chunk(dist.get_world_size())[dist.get_rank()] if dist.is_initialized() else rows
    optimizer.zero_grad()
    model(rows).square().mean().backward()
    optimizer.step()


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def save() -> None:
    """A checkpoint after one step; the weights after two."""
    torch.manual_seed(0)
    model = sharded(mixed(Stack(PreNorm)))
    optimizer = optimizer_of(model)
    step(model, optimizer)
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder() / "checkpoint")
    try:
        rewire.save(model, folder() / "refused")
    except rewire.WrappedModel as error:
        print(error, flush=True)
    step(model, optimizer)
    write(weights_of(model), folder() / "saver.pt")


def resume() -> None:
    """The second step, on other ranks than those that saved."""
    torch.manual_seed(1)
    model = sharded(mixed(Stack(PreNorm)))
    optimizer = optimizer_of(model)
    load(folder(), model, optimizer)
    step(model, optimizer)
    write(weights_of(model), folder() / "resumed.pt")


def load(saved: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    weights, states = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": states}
    dcp.load(state, checkpoint_id=saved / "checkpoint")
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def write(value: dict[str, Tensor], path: Path) -> None:
    if dist.get_rank() == 0:
        torch.save(value, path)


if __name__ == "__main__":
    play(globals())
