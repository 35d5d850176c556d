"""One of two processes: trains a sharded, rewired model and saves it with torch.distributed.checkpoint. A script."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from mixing import mixed
from models import PreNorm, Stack, vectors
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import rewire
from rewire.kernels import plain

plain.WORTHWHILE = 0  # as in conftest.py


def sharded(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    for module in (*rewire.connections(model).values(), *model.layers, model):
        fully_shard(module, mesh=mesh)
    return model


def main(rank: str, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", RANK=rank, WORLD_SIZE="2")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting_point", rank=int(rank), world_size=2)
    torch.manual_seed(0)
    model = sharded(mixed(Stack(PreNorm)))
    optimizer = torch.optim.AdamW(rewire.parameter_groups(model, lr=0.05, weight_decay=0.1))
    model(vectors(batch=4).chunk(2)[int(rank)]).square().mean().backward()
    optimizer.step()
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=f"{folder}/checkpoint")
    try:
        rewire.save(model, f"{folder}/refused")
    except rewire.ShardedModel as error:
        print(error, flush=True)
    with torch.no_grad():
        output = model(vectors(batch=4))
    if rank == "0":
        torch.save(output, f"{folder}/output.pt")
    dist.barrier()
    os._exit(0)  # gloo's threads may abort the interpreter's own exit


if __name__ == "__main__":
    main(*sys.argv[1:])
