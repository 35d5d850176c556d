"""Gates of hyper-connections: projections of the streams, and the gates that kernels compute from these."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rewire.kernels import operators
from rewire.kernels.cpu import plain
from rewire.mixes.autograd import by_product, by_torch, gradients, left_to_autograd
from rewire.mixes.streams import Claim, Projected, of_tokens, read_off_streams
from rewire.mixes.tokens import by_kernels, outside_autocast
from rewire.mixes.traced import by_operator, whole_in_graphs

#: Most streams, and iterations of Sinkhorn-Knopp, for which some tokens fit into the registers of a program.
MOST, MOST_ITERATIONS = 8, 64


class Gating(NamedTuple):
    """Which gates to compute from values ``b + a s`` (b static, a scale, s a token's product).

    Attributes:
        streams: n.
        iterations: of Sinkhorn-Knopp, for the gates of `ManifoldHyperConnections`; 0: the gates of
            `DynamicHyperConnections`, with ``tanh(s)`` for s.
        eps, magnitude: options of `ManifoldHyperConnections`.
    """

    streams: int
    iterations: int = 0
    eps: float = 0.0
    magnitude: float = 1.0


def read_off_gates(
    gating: Gating | None,
    formula: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
    streams: Tensor,
    weight: Tensor,
    static: Tensor,
    scale: Tensor,
    eps: float | None,
    known: Projected | None = None,
) -> tuple[Tensor, Tensor, Tensor, Claim | None]:
    """The gates with which a unit reads, [..., n, 1], and writes, [..., n + 1, n], the streams.

    Args:
        gating: which gates; None: gates that kernels do not compute.
        formula: the same in torch operations, as a function of the scores, static and scale.
        streams, weight, eps: as in `streams.read_off_streams`.
        static: [..., K], without the dimensions of tokens.
        scale: [K].
        known: the projection by this weight, if `streams.write_and_project` returned it with the streams.

    Returns:
        The gates; the streams and a claim on them, as `streams.read_off_streams` returns them.
    """
    claim: Claim | None
    if by_product(streams):
        return *formula(plain.project(of_tokens(streams, weight), weight, eps)[0], static, scale), streams, None
    if known is None:
        products, streams, claim = read_off_streams(streams, weight, eps)
    else:
        products, claim = known.products, known.claim
    return *_gates(gating, formula, products, static, scale), streams, claim


def _gates(
    gating: Gating | None,
    formula: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
    products: Tensor,
    static: Tensor,
    scale: Tensor,
) -> tuple[Tensor, Tensor]:
    known = gating is not None and gating.streams <= MOST and gating.iterations <= MOST_ITERATIONS
    of_tokens = products.dim() > static.dim() and by_kernels(products, scale)
    with outside_autocast(products.device):
        if not known or not of_tokens or left_to_autograd(products, math.inf):
            return formula(products, static, scale)
        if by_operator():
            assert gating is not None
            return gates_in_graphs(*gating, products, static, scale)
        read, write = _Gates.apply(gating, formula, products, static, scale)
        return read, write


@whole_in_graphs
def gates_in_graphs(
    streams: int, iterations: int, eps: float, magnitude: float, products: Tensor, static: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """The gates of a `Gating` by kernels. Only gradients of gradients need the formula, which graphs do not have."""
    read, write = _Gates.apply(Gating(streams, iterations, eps, magnitude), None, products, static, scale)
    return read, write


class _Gates(torch.autograd.Function):
    """The gates by kernels; keeps only their inputs for backward."""

    @staticmethod
    def forward(
        ctx: Any, gating: Gating, formula: object, products: Tensor, static: Tensor, scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.gating, ctx.formula = gating, formula
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(products, static, scale)
        return operators.gates(products, static, scale, *gating)

    @staticmethod
    def backward(ctx: Any, of_read: Tensor | None, of_write: Tensor | None) -> tuple[Any, ...]:
        if of_read is None and of_write is None:
            return (None,) * 5
        products, static, scale = ctx.saved_tensors
        of_read, of_write = _both(of_read, of_write, products, ctx.gating)
        if by_torch(of_read):

            def again(*given: Tensor) -> Tensor:
                return _stacked(*ctx.formula(*given))

            return None, None, *gradients(again, (products, static, scale), _stacked(of_read, of_write))
        of_products, sums = operators.gates_backward(of_read, of_write, products, static, scale, *ctx.gating[1:])
        return None, None, of_products, sums[:-1].view(static.shape), sums[-1]


def _both(of_read: Tensor | None, of_write: Tensor | None, products: Tensor, gating: Gating) -> tuple[Tensor, Tensor]:
    """Gradients of both gates, with zeros for one that is None."""
    lead, n = products.shape[: -1 if gating.iterations else -2], gating.streams
    of_read = products.new_zeros((*lead, n, 1)) if of_read is None else of_read
    return of_read, products.new_zeros((*lead, n + 1, n)) if of_write is None else of_write


def _stacked(read: Tensor, write: Tensor) -> Tensor:
    return torch.cat([read.mT, write], dim=-2)
