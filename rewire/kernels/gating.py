"""Gates of hyper-connections that kernels make of what was read off the streams: see `gates`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rewire.kernels import operators
from rewire.kernels.mix import gradients, left_to_autograd

#: Streams and iterations of Sinkhorn-Knopp up to which a few tokens fit into the registers of a program.
MOST, MOST_ITERATIONS = 8, 64


class Gating(NamedTuple):
    """Which gates are made of values ``b + a s`` (static, scale, product of a token).

    Attributes:
        streams: n.
        iterations: of Sinkhorn-Knopp: gates are those of `ManifoldHyperConnections`. 0: those of
            `DynamicHyperConnections`, with ``tanh(s)`` for s.
        eps, magnitude: options of the former.
    """

    streams: int
    iterations: int = 0
    eps: float = 0.0
    magnitude: float = 1.0


def gates_of(
    gating: Gating | None,
    formula: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
    products: Tensor,
    static: Tensor,
    scale: Tensor,
) -> tuple[Tensor, Tensor]:
    """What a unit reads, [..., n, 1], and writes, [..., n + 1, n], the streams with: one kernel each way, if any.

    Args:
        gating: which gates; None: such as kernels do not make.
        formula: the same by operations of torch, of the next three.
        products: [..., K].
        static: [..., K], without the dimensions of tokens.
        scale: [K].
    """
    known = gating is not None and gating.streams <= MOST and gating.iterations <= MOST_ITERATIONS
    if not known or not operators.uses_kernels(products) or left_to_autograd(products, math.inf):
        return formula(products, static, scale)
    read, write = _Gates.apply(gating, formula, products, static, scale)
    return read, write


class _Gates(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gating: Gating, formula: Any, *given: Tensor) -> tuple[Tensor, Tensor]:
        ctx.gating, ctx.formula = gating, formula
        ctx.save_for_backward(*given)
        products, static, scale = given
        return operators.gates(products, static, scale, *gating)

    @staticmethod
    def backward(ctx: Any, of_read: Tensor, of_write: Tensor) -> tuple[Any, ...]:
        given = products, static, scale = ctx.saved_tensors
        if torch.is_grad_enabled():  # with create_graph=True
            of_all = gradients(lambda *x: _stacked(*ctx.formula(*x)), given, _stacked(of_read, of_write))
            return None, None, *of_all
        of_products, sums = operators.gates_backward(of_read, of_write, products, static, scale, *ctx.gating[1:])
        return None, None, of_products, sums[:-1].view(static.shape), sums[-1]


def _stacked(read: Tensor, write: Tensor) -> Tensor:
    return torch.cat([read.mT, write], dim=-2)
