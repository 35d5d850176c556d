"""The plain residual network as a topology, which computes the same as the original model."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import Tensor

from rewire.mixes.mix import Mix
from rewire.topologies.base import Dims, FirstOrder, Granularity, Start, States
from rewire.topologies.program import Program, Term, recurrence
from rewire.topologies.registry import register_topology


@register_topology("residual")
@dataclasses.dataclass(frozen=True)
class Residual(FirstOrder[None]):
    """Plain residual connections, ``x_t = x_{t-1} + f_t`` (arXiv 1512.03385, Equation 1); bitwise the original model.

    Unit t reads ``x_{t-1}``, the only state; the trunk's output is ``x_T``. Nothing is learned: both starts are the
    original model.

    Example:
        >>> rewired = rewire.compile(model, rewire.Residual(), example_inputs=(x,))
        >>> torch.equal(rewired(x), model(x))
        True
    """

    granularity: ClassVar[Granularity] = "sublayer"
    reads_newest: ClassVar[bool] = True

    def norms_again(self, dims: Dims) -> tuple[()]:
        return ()

    def parameters(self, dims: Dims, start: Start) -> dict[str, Tensor]:
        """No parameters."""
        return {}

    def weights(self, parameters: dict[str, Tensor], dims: Dims) -> None:
        return None

    def merge(self, states: States, weights: None, t: int, *branches: Tensor) -> Mix:
        return Mix(added=(*states, *branches))  # in the model's own order: bitwise equality

    def program(self, weights: None, dims: Dims) -> Program:
        return recurrence([[Term(f"x{i}", 1.0)] for i in range(dims.depth)])
