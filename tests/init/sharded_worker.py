"""One of two processes: initialises a model that FSDP2 has sharded, and compares with one that is whole. A script."""

from __future__ import annotations

import torch
import torch.distributed as dist
from models import PreNorm, Stack
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from worker import play

import rewire


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def shard(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def compare(sharded: nn.Module, init: str) -> None:
    whole = Stack(PreNorm)
    filled = {weight.name for weight, _ in rewire.initialize(whole, init, generator=generator()).applied}
    for name, parameter in sharded.named_parameters():
        assert name not in filled or torch.equal(parameter.full_tensor(), whole.get_parameter(name)), name


def like_whole() -> None:
    for init in ("idinit", "orthogonal"):
        model = Stack(PreNorm)
        roles = rewire.roles(model)
        sharded = shard(model)
        rewire.initialize(sharded, init, generator=generator(), roles=roles)
        compare(sharded, init)
    with torch.device("meta"):
        model = Stack(PreNorm)
    roles = rewire.roles(model)
    sharded = shard(model)
    sharded.to_empty(device="cpu")
    rewire.initialize(sharded, "mzas", generator=generator(), roles=roles)
    compare(sharded, "mzas")
    torch.manual_seed(dist.get_rank())  # without a generator the first rank's values count
    rewire.initialize(sharded, "kaiming", roles=roles)
    torch.manual_seed(0)
    whole = Stack(PreNorm)
    torch.manual_seed(0)
    rewire.initialize(whole, "kaiming", roles=roles)
    assert torch.equal(sharded.layers[1].attn.qkv.weight.full_tensor(), whole.layers[1].attn.qkv.weight)


if __name__ == "__main__":
    play(globals())
