"""The plain residual network, as a topology: what the model computed before."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from torch import Tensor

from rewire.topologies.base import Dims, Granularity, Start, States, Topology, one_hot_previous
from rewire.topologies.program import Program, Term, recurrence
from rewire.topologies.registry import register_topology


@register_topology("residual")
@dataclasses.dataclass(frozen=True)
class Residual(Topology):
    """Plain residual connections, ``x_t = x_{t-1} + f_t`` (He et al., 2016); bitwise the original model."""

    granularity: ClassVar[Granularity] = "sublayer"

    def parameters(self, dims: Dims, start: Start) -> dict[str, Tensor]:
        return {}

    def weights(self, parameters: dict[str, Tensor], dims: Dims) -> Any:
        return None

    def read(self, states: States, weights: Any, t: int) -> Tensor:
        return states[0]

    def merge(self, states: States, weights: Any, t: int, *branches: Tensor) -> Tensor:
        x = states[0]
        for branch in branches:  # in the model's own order: bitwise equality
            x = x + branch
        return x

    def push(self, states: States, weights: Any, t: int, x: Tensor) -> States:
        return (x,)

    def finish(self, states: States, weights: Any, dims: Dims) -> Tensor:
        return states[0]

    def matrix(self, weights: Any, dims: Dims) -> Tensor:
        return one_hot_previous(dims.depth)

    def program(self, weights: Any, dims: Dims) -> Program:
        return recurrence([[Term(f"x{i}", 1.0)] for i in range(dims.depth)])
