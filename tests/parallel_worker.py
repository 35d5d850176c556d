"""One of two processes: gradients under tensor and sequence parallelism, compared with those of one process. A script."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from every_topology import EVERY, FAMILIES, mixed
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import rewire
from rewire.kernels import plain

plain.WORTHWHILE = 0  # as in conftest.py
WIDTH, HEADS, LENGTH = 32, 4, 10
#: One of each kind, and those that read queries, keys and values apart.
KINDS = [*FAMILIES, *(key for key in ("dca",) if key not in FAMILIES)]


class Attention(nn.Module):
    """The number of heads is that of the features that come: a part of them under tensor parallelism."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.o_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q, k, v = (part.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.self_attn = nn.LayerNorm(WIDTH), Attention()
        self.norm_2, self.mlp = nn.LayerNorm(WIDTH), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.norm_1(x))
        x = x + self.mlp(self.norm_2(x))
        return x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(23, WIDTH)
        self.layers = nn.ModuleList([Block() for _ in range(3)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 23)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def tokens() -> Tensor:
    return torch.randint(23, (2, LENGTH), generator=torch.Generator().manual_seed(3))


def make(key: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model = mixed(Model(), key, example_inputs=(tokens(),))
    return model.to(dtype)


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))


def sequence_parallel(model: nn.Module, tp: DeviceMesh, local: bool = True) -> nn.Module:
    """PyTorch's plan for sequence parallelism. Hidden states are plain tensors, or DTensors with ``local=False``."""
    plan: dict[str, ParallelStyle] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=local),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    whole: dict[str, Any] = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    for number in range(len(model.layers)):
        block = f"layers.{number}"
        plan |= {
            f"{block}.norm_1": SequenceParallel(use_local_output=local),
            f"{block}.self_attn": PrepareModuleInput(**whole),
            **{f"{block}.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
            f"{block}.self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1), use_local_output=local),
            f"{block}.norm_2": SequenceParallel(use_local_output=local),
            f"{block}.mlp": PrepareModuleInput(**whole),
            f"{block}.mlp.up": ColwiseParallel(),
            f"{block}.mlp.down": RowwiseParallel(output_layouts=Shard(1), use_local_output=local),
        }
    return parallelize_module(model, tp, plan)


def tensor_parallel(model: nn.Module, tp: DeviceMesh) -> nn.Module:
    """Hidden states are whole on each rank."""
    plan: dict[str, ParallelStyle] = {}
    for number in range(len(model.layers)):
        block = f"layers.{number}"
        plan |= {f"{block}.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
        plan |= {f"{block}.self_attn.o_proj": RowwiseParallel()}
        plan |= {f"{block}.mlp.up": ColwiseParallel(), f"{block}.mlp.down": RowwiseParallel()}
    return parallelize_module(model, tp, plan)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Of all parameters, of a loss that weighs every token and feature differently."""
    model.zero_grad()
    output = model(tokens())
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(4)).to(output.dtype)
    (full(output) * weight).square().mean().backward()
    return {name: full(p.grad).detach().clone() for name, p in model.named_parameters() if p.grad is not None}


def full(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def compare(expected: dict[str, Tensor], actual: dict[str, Tensor], tolerance: float, key: str) -> None:
    assert sorted(expected) == sorted(actual), sorted(set(expected) ^ set(actual))
    largest = max(float(value.norm()) for value in expected.values())
    worst = 0.0
    for name, value in expected.items():
        scale = max(float(value.norm()), 1e-3 * largest)
        error = float((value - actual[name]).norm()) / scale
        worst = max(worst, error)
        # connection weights, and so their gradients, stay float32 in a float64 model
        limit = max(tolerance, 1e-6) if "depth_connections" in name else tolerance
        if os.environ.get("SHOW"): print(key, name, f"{error:.1e}"); continue
        assert error <= limit, f"{key}: gradient of {name} differs by {error:.1e}"
        same = [torch.empty_like(value) for _ in range(2)]
        dist.all_gather(same, actual[name].contiguous())
        assert torch.equal(*same), f"{key}: the ranks' gradients of {name} differ"
    print(f"{key}: {worst:.1e}", flush=True)


TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


def exact(key: str, parallel: Callable[[nn.Module, DeviceMesh], object], dtype: torch.dtype) -> None:
    model = make(key, dtype)
    expected = gradients(copy.deepcopy(model))
    assert any("depth_connections" in name and bool(value.any()) for name, value in expected.items())
    parallel(model, mesh())
    compare(expected, gradients(model), TOLERANCE[dtype], f"{key} {dtype}")


def local(model: nn.Module, tp: DeviceMesh) -> None:
    sequence_parallel(model, tp)
    rewire.parallelize(model, tp, sequence=True)


def dtensors(model: nn.Module, tp: DeviceMesh) -> None:
    sequence_parallel(model, tp, local=False)


def sequence_local() -> None:
    for key in ("ancre-ingoing", "muddformer"):
        exact(key, local, torch.float64)


def sequence_dtensors() -> None:
    for key in ("ancre-ingoing", "muddformer"):
        exact(key, dtensors, torch.float32)


def every_kind_local() -> None:
    for key in KINDS:
        exact(key, local, torch.float64)


def every_kind_dtensors() -> None:
    for key in KINDS:
        exact(key, dtensors, torch.float64)


def main(rank: str, meeting_point: str, scenarios: list[str]) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", RANK=rank, WORLD_SIZE="2")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting_point}", rank=int(rank), world_size=2)
    for scenario in scenarios:
        globals()[scenario]()
        print(scenario, "passed", flush=True)
    dist.barrier()
    os._exit(0)  # a forward that was refused may have left a collective behind


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
