"""Small branches without norms, and the loops that run them with a topology and without one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rewire.topologies import Topology
from rewire.topologies.base import Dims, QKVInputs, States, materialize

WIDTH = 8
#: Called for each unit as (t, what it reads, the states that its open leaves, the states after its write).
Check = Callable[[int, Any, States, States], None]


def _mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))


def net(
    depth: int,
    dtype: torch.dtype = torch.float32,
    zero: bool = False,
    width: int = WIDTH,
    branch: Callable[[int], nn.Module] = _mlp,
) -> list[nn.Module]:
    """Branches of that width, always the same; with ``zero``, their last linear map is zero, as in many models."""
    torch.manual_seed(1)
    blocks = [branch(width) for _ in range(depth)]
    if zero:
        for block in blocks:
            *_, last = block.children()
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)
    return [block.to(dtype) for block in blocks]


def plain(x: Tensor, blocks: Sequence[Any]) -> Tensor:
    """The plain residual network."""
    for block in blocks:
        x = x + block(x)
    return x


def begin(topology: Topology, x: Tensor, weights: Any) -> States:
    """The states at the trunk's input; every test of a topology by itself gets them here."""
    return topology.start(x, weights)


def opened(topology: Topology, x: Tensor, weights: Any) -> States:
    """The states that the first write gets."""
    return topology.read(begin(topology, x, weights), weights, 1)[1]


def run(
    topology: Topology,
    weights: Any,
    x: Tensor,
    blocks: Sequence[Any],
    dims: Dims | None = None,
    check: Check | None = None,
) -> Tensor:
    """The output of a trunk. A branch that has separate q/k/v inputs is called as ``block(q, k, v, residual)``."""
    states = begin(topology, x, weights)
    for t, block in enumerate(blocks, start=1):
        read, opened = topology.read(states, weights, t)
        read = read if isinstance(read, QKVInputs) else materialize(read)
        branch = block(read.q, read.k, read.v, read.residual) if isinstance(read, QKVInputs) else block(read)
        states = topology.write(opened, weights, t, branch)
        if check is not None:
            check(t, read, opened, states)
    return topology.finish(states, weights, dims or Dims(len(blocks), x.shape[-1]))


def run_learned(topology: Topology, parameters: Any, x: Tensor, blocks: Sequence[Any]) -> Tensor:
    """`run` with the weights that these parameters make."""
    weights = topology.weights(parameters, Dims(len(blocks), x.shape[-1]))
    return run(topology, weights, x, blocks)


class Mixer(nn.Module):
    """A branch with four inputs, which stands for an attention."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, *ways: Tensor) -> Tensor:
        q, k, v, residual = ways
        return self.inner(torch.cat([q, 2 * k, 3 * v, residual.tanh()], -1))
