"""Constant scales of shortcuts and branches that depend on the depth: DeepNorm, CompleteP."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import torch
from torch import Tensor

from rewire.mixes.mix import Mix, pending_mix
from rewire.topologies.base import Dims, FirstOrder, Granularity, Start, States, no_preserving_start
from rewire.topologies.program import Program, Term, recurrence
from rewire.topologies.registry import register_topology

Scales = tuple[float, float]  #: a and b


@register_topology("fixed-scale")
@dataclasses.dataclass(frozen=True)
class FixedScale(FirstOrder[Scales]):
    """Constant scales on shortcuts and branches, powers of the depth (DeepNorm, arXiv 2203.00555; CompleteP).

    ``x_t = a x_{t-1} + b f_t`` with ``a = shortcut * T^shortcut_power`` and ``b = branch * T^branch_power``, the same
    for all T units. Nothing is learned. Unit t reads ``x_{t-1}``, the only state; the trunk's output is ``x_T``.
    Post-norm blocks norm the sum. With one unit for each residual add, a transformer of L layers has ``T = 2 L``:

    - ``shortcut_power=0.25``: DeepNorm's ``(2 L)^(1/4)`` for encoder-only and decoder-only models with post-norm
      blocks. (Its initialisation is ``deepnorm``.) For encoder-decoder models, give numbers.
    - ``branch=2 * L_0, branch_power=-1``: ``L_0 / L``, the scale of branches in CompleteP (arXiv 2505.01618), where
      L_0 layers were tuned. (`rewire.init.MuP` does the same by starts and rates.)
    - ``branch_power=-0.5``: ``1 / sqrt(2 L)``.

    **Paper start.** There are no weights to start.

    **Preserving start.** Only if both scales are 1.

    Args:
        shortcut, branch: numbers, not 0.
        shortcut_power, branch_power: exponents of T.
    """

    granularity: ClassVar[Granularity] = "sublayer"

    shortcut: float = 1.0
    branch: float = 1.0
    shortcut_power: float = 0.0
    branch_power: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ValueError(f"{name}={value!r}: it has to be a number.")
        if not self.shortcut or not self.branch:
            raise ValueError("a scale of 0 would cut the trunk: shortcut and branch have to be other numbers.")

    def parameters(self, dims: Dims, start: Start) -> dict[str, Tensor]:
        """No parameters."""
        if start == "preserve" and self.weights({}, dims) != (1.0, 1.0):
            raise no_preserving_start(self, "its scales are constants other than 1")
        return {}

    def weights(self, parameters: dict[str, Tensor], dims: Dims) -> Scales:
        return self.shortcut * dims.depth**self.shortcut_power, self.branch * dims.depth**self.branch_power

    def merge(self, states: States, weights: Scales, t: int, *branches: Tensor) -> Mix:
        (x,), (a, b) = states, weights
        return pending_mix((x, *branches), (a, *[b] * len(branches)))

    def matrix(self, weights: Scales, dims: Dims) -> Tensor:
        """float32 [T, T]: a on the diagonal."""
        return weights[0] * torch.eye(dims.depth, dtype=torch.float32)

    def program(self, weights: Scales, dims: Dims) -> Program:
        a, b = weights
        return recurrence([[Term(f"x{i}", a)] for i in range(dims.depth)], [b] * dims.depth)
