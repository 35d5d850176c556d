"""Learned scales on the branches of plain residual connections: ReZero, SkipInit and LayerScale."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from rewire.errors import check_positive
from rewire.mixes.mix import mix
from rewire.topologies.base import Dims, FirstOrder, Granularity, Start, States, repeatable
from rewire.topologies.program import Program, Term, branch_of, recurrence
from rewire.topologies.registry import register_topology


@register_topology("rezero")
@dataclasses.dataclass(frozen=True)
class BranchScale(FirstOrder[Tensor]):
    """ReZero: a learned scalar on each branch, 0 at the start (arXiv 2003.04887, Equation 1).

    ``x_t = x_{t-1} + alpha_t f_t``. Unit t reads ``x_{t-1}``, the only state; the trunk's output is ``x_T``. In
    post-norm blocks the scale is inside of the norm, ``norm(x + alpha f)``.

    **Paper start.** ``alpha = 0``: the trunk is the identity. The branches have gradients from the second step on, when
    alpha has moved. If they also start at zero output, neither they nor alpha ever have one: do not combine the two.

    **Preserving start.** ``alpha = 1``: the original network, bitwise. Nothing is saturated, so alpha has its full
    gradient (from the second step on, if the branches start at zero output).
    """

    granularity: ClassVar[Granularity] = "sublayer"  # all three papers have one scale for each residual add
    of_states: ClassVar[frozenset[str]] = frozenset({"scales"})

    def parameters(self, dims: Dims, start: Start) -> dict[str, Tensor]:
        """``scales``, float32 [T]: alpha_1..alpha_T."""
        return {"scales": torch.full((dims.depth,), 1.0 if start == "preserve" else 0.0)}

    def weights(self, parameters: dict[str, Tensor], dims: Dims) -> Tensor:
        """alpha, float32, in the shape of `parameters`."""
        return parameters["scales"].float()

    @repeatable
    def merge(self, states: States, weights: Tensor, t: int, *branches: Tensor) -> Tensor:
        x = states[0]
        for branch in branches:  # one by one, in the model's own order: bitwise equality at alpha = 1
            x = mix((branch,), (weights[t - 1],), added=(x,))
        return x

    def matrix(self, weights: Tensor, dims: Dims) -> Tensor:
        """float32 [T + 1, T + 1], in terms of increments (ignoring post-norm's norms).

        Row t - 1 is the read of unit t, the last one the output: 1 for ``x_0``, ``alpha_i`` for ``f_i``.
        """
        scales = weights if weights.dim() == 1 else weights.mean(1)
        return torch.cat([scales.new_ones(1), scales]).expand(dims.depth + 1, -1).tril()

    def program(self, weights: Tensor, dims: Dims) -> Program:
        scales = weights.tolist() if weights.dim() == 1 else weights.unbind()
        program = recurrence([[Term(f"x{i}", 1.0)] for i in range(dims.depth)], scales)
        columns = ["x0", *(branch_of(t) for t in range(1, dims.depth + 1))]
        return program._replace(rows=tuple(f"x{t}" for t in range(dims.depth + 1)), columns=tuple(columns))


@register_topology("skipinit")
def skipinit() -> BranchScale:
    """SkipInit: a learned scalar on each branch, 0 at the start (arXiv 2002.10444).

    The same connection as ``rezero``; the papers also change the branches' norms, which are left unchanged here.
    """
    return BranchScale()


@register_topology("layerscale")
@dataclasses.dataclass(frozen=True)
class LayerScale(BranchScale):
    """LayerScale: a learned scale per channel on each branch, small at the start (arXiv 2103.17239).

    ``x_t = x_{t-1} + alpha_t * f_t`` with ``alpha_t`` in R^D (CaiT, Section 2). States, post-norm and preserving
    start: see `BranchScale`.

    **Paper start.** ``alpha = eps`` in all channels. CaiT uses 0.1 up to 18 blocks, 1e-5 up to 24, and 1e-6 for deeper
    models. Two units of the trunk (attention and feed-forward) are counted as one block.

    Args:
        eps: the paper start, a positive number; None: CaiT's value for the depth.
    """

    needs_width: ClassVar[bool] = True

    eps: float | None = None

    def __post_init__(self) -> None:
        check_positive("eps", self.eps, 1e-5, optional=True)

    def parameters(self, dims: Dims, start: Start) -> dict[str, Tensor]:
        """``scales``, float32 [T, D]: alpha_1..alpha_T."""
        value = 1.0 if start == "preserve" else self.eps or _cait(dims.depth)
        return {"scales": torch.full((dims.depth, dims.width), value)}


def _cait(depth: int) -> float:
    """CaiT's eps for a trunk of ``depth`` units, two to a block."""
    blocks = depth / 2
    return 0.1 if blocks <= 18 else 1e-5 if blocks <= 24 else 1e-6
