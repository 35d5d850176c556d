"""Gates of hyper-connections: what is read off the streams, and what kernels make of it (`projection`, `gates`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rewire.kernels import operators
from rewire.kernels.claims import added_up
from rewire.kernels.mix import gradients, left_to_autograd
from rewire.kernels.tokens import (
    Claim,
    by_autograd,
    by_kernels,
    by_read,
    claim_on,
    of_tokens,
    outside_autocast,
    read_off_streams,
)

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


def read_off_gates(
    gating: Gating | None,
    formula: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
    streams: Tensor,
    weight: Tensor,
    static: Tensor,
    scale: Tensor,
    eps: float | None,
    known: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor, Tensor, Claim | None]:
    """What a unit reads, [..., n, 1], and writes, [..., n + 1, n], the streams with.

    Args:
        gating: which gates; None: such as kernels do not make.
        formula: the same by operations of torch, of what is read off, static and scale.
        streams, weight, eps: as in `tokens.read_off_streams`.
        static: [..., K], without the dimensions of tokens.
        scale: [K].
        known: what `several.write_and_project` has read off the streams with this weight, if anything.

    Returns:
        The gates; the streams and a claim on them, as `tokens.read_off_streams` returns them.
    """
    (*lead, n, width), x = streams.shape, of_tokens(streams, weight)
    fits = gating is not None and n <= MOST and gating.iterations <= MOST_ITERATIONS and x.dim() > 1
    if not fits or left_to_autograd(x, math.inf) or not by_kernels(x, weight):
        products, streams, claim = read_off_streams(streams, weight, eps)
        return *formula(products, static, scale), streams, claim
    with outside_autocast(x.device):
        given = x, weight, static, scale
        read, write, x, grad, factors = _Gated.apply(gating, formula, eps, (*lead, 1, width), tuple(known), *given)
    return read, write, x.view(streams.shape), (grad, factors)


class _Gated(torch.autograd.Function):
    """Keeps for backward the streams as they are, what was read off them, and of the norm a number for each row.

    With a claim on the streams, as of `tokens.read_off_streams`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        gating: Gating,
        formula: Any,
        eps: float | None,
        shape: tuple[int, ...],
        known: tuple[Tensor, ...],
        *given: Tensor,
    ) -> tuple[Tensor, ...]:
        x, weight, static, scale = given
        products, inverse = known or operators.project(x, weight, eps)
        ctx.gating, ctx.formula, ctx.eps = gating, formula, eps
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*given, products, inverse)
        return *operators.gates(products, static, scale, *gating), x.view_as(x), *claim_on(x, products, shape)

    @staticmethod
    def backward(
        ctx: Any,
        of_read: Tensor | None,
        of_write: Tensor | None,
        carried: Tensor | None,
        grad: Tensor | None,
        factors: Tensor | None,
    ) -> tuple[Any, ...]:
        x, weight, static, scale, products, inverse = ctx.saved_tensors
        if of_read is None and of_write is None:
            return *[None] * 5, added_up([carried, by_read(x, grad, factors)]), None, None, None
        of_read, of_write = _both(of_read, of_write, products, ctx.gating)
        if torch.is_grad_enabled():  # with create_graph=True

            def again(x: Tensor, weight: Tensor, static: Tensor, scale: Tensor) -> Tensor:
                return _stacked(*ctx.formula(by_autograd(x, weight, ctx.eps), static, scale))

            of_x, *others = gradients(again, (x, weight, static, scale), _stacked(of_read, of_write))
            return *[None] * 5, added_up([of_x, carried, by_read(x, grad, factors)]), *others
        kept, of_streams = (x, weight, static, scale, products, inverse), (carried, grad, factors)
        of_x, of_weight, sums = operators.gates_backward(of_read, of_write, *kept, *of_streams, *ctx.gating[1:])
        return *[None] * 5, of_x, of_weight.T, sums[:-1].view(static.shape), sums[-1]


def _both(of_read: Tensor | None, of_write: Tensor | None, products: Tensor, gating: Gating) -> tuple[Tensor, Tensor]:
    """Gradients of the gates, zeros for those that there are not."""
    lead, n = products.shape[: -1 if gating.iterations else -2], gating.streams
    of_read = products.new_zeros((*lead, n, 1)) if of_read is None else of_read
    return of_read, products.new_zeros((*lead, n + 1, n)) if of_write is None else of_write


def _stacked(read: Tensor, write: Tensor) -> Tensor:
    return torch.cat([read.mT, write], dim=-2)
