"""Gradient-preserving activation scaling: scales states down, but not their gradients (arXiv 2506.22049)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from rewire.errors import check_choice
from rewire.mixes.mix import mix
from rewire.topologies.base import Dims, FirstOrder, Granularity, Start, States, repeatable, total
from rewire.topologies.registry import register_topology

Scaled = Literal["sum", "shortcut"]


@register_topology("gpas")
@dataclasses.dataclass(frozen=True)
class GPAS(FirstOrder[Tensor]):
    """GPAS: scales each new state down, but not its gradient (arXiv 2506.22049).

    ``x_t = y_t - silu(a_t) sg(y_t)`` with ``y_t = x_{t-1} + f_t``, a learned scalar a_t, and the stop-gradient ``sg``:
    values are scaled by ``1 - silu(a_t)``, and the gradient of ``y_t`` is that of ``x_t``. Unit t reads ``x_{t-1}``,
    the only state; the trunk's output is ``x_T``.

    A norm after the sum would remove the scale. For post-norm blocks the authors use ``scaled="shortcut"``:
    ``x_t = norm(x_{t-1} - silu(a_t) sg(x_{t-1}) + f_t)``.

    In the authors' code the two sums of a block share one a; here each has its own.

    **Both starts** are the paper's: ``a = 0``, the original network, bitwise in float32 and float64. a learns from the
    first step on, as silu's slope there is 1/2. (The authors clip its gradient to 0.01 at 7B parameters.)

    Args:
        scaled: what to scale, "sum" or "shortcut".
    """

    granularity: ClassVar[Granularity] = "sublayer"  # after attention and MLP
    of_states: ClassVar[frozenset[str]] = frozenset({"gates"})

    scaled: Scaled = "sum"

    def __post_init__(self) -> None:
        check_choice("scaled", self.scaled, get_args(Scaled))

    def parameters(self, dims: Dims, start: Start) -> dict[str, Tensor]:
        """``gates``, float32 [T]: a_1..a_T."""
        return {"gates": torch.zeros(dims.depth)}

    def weights(self, parameters: dict[str, Tensor], dims: Dims) -> Tensor:
        """silu(a), float32 [T]."""
        return torch.nn.functional.silu(parameters["gates"])

    @repeatable
    def merge(self, states: States, weights: Tensor, t: int, *branches: Tensor) -> Tensor:
        (x,), gate = states, weights[t - 1]
        if self.scaled == "sum":
            return _scaled(total((x, *branches)), gate)
        return total((_scaled(x, gate), *branches))

    def matrix(self, weights: Tensor, dims: Dims) -> Tensor:
        """float32 [T, T]: ``1 - silu(a_t)`` on the diagonal."""
        return torch.diag(1 - weights)


def _scaled(x: Tensor, gate: Tensor) -> Tensor:
    """``(1 - gate) x``, with the gradient of an unscaled x."""
    return mix((x.detach(),), (-gate,), added=(x,))
