"""Claims: tensors that stand for a mix's scalings of states in autograd's graph. `claimed` explains them."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rewire.kernels import operators, switch
from rewire.kernels.cpu import plain
from rewire.kernels.sums.spec import MAX_OUTPUTS
from rewire.mixes.again import remember_sums
from rewire.mixes.autograd import by_torch
from rewire.mixes.blocks import BLOCK
from rewire.mixes.traced import whole_in_graphs


@whole_in_graphs
def claim(through: int, count: int, weights: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Claims of N later mixes on M states: N tensors with arbitrary values, whose gradients are those of the mixes.

    Args:
        through: how often each state is returned, too (once if M > 1); its gradients are added in the same pass.
        count: M.
        weights: float32 [M N] or [M N, D].
        tensors: each state's weights per token, [..., N], if there are any, and then the states, [..., D].
    """
    return list(_Claims.apply(through, count, weights, *tensors))


class _Claims(torch.autograd.Function):
    """`claim`."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, ...]:
        # One *given: without gradients, Dynamo omits ctx if a call has as many arguments as forward has parameters.
        through, count, weights, *tensors = given
        ctx.save_for_backward(weights, *tensors)
        ctx.set_materialize_grads(False)
        ctx.states, ctx.mixes = count, weights.shape[0] // count
        states = tensors[-count:]
        claims = stand_ins(states[0], states[0].shape, ctx.mixes)
        # detach() is not a view to autograd, which forbids in-place writes to views among several results
        return (*claims, *[x.detach() for x in states for _ in range(through)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        flat, *tensors = ctx.saved_tensors
        scores, states = tensors[: -ctx.states], tensors[-ctx.states :]
        given, carried = present(grads[: ctx.mixes]), grads[ctx.mixes :]
        if not given:
            return (None, None, None, *[None] * len(scores), *unclaimed(states, carried))
        added = joining(states, carried)
        weights = flat.view(len(states), ctx.mixes, *flat.shape[1:])
        dx, dots, of_scores = gathered(given, states, weights, scores, added)
        return (None, None, None if dots is None else dots.reshape(flat.shape), *of_scores, *dx)


@whole_in_graphs
def claimed_mixes(
    values: Sequence[Tensor], rows: Tensor, scores: Sequence[Tensor], n: int, claims: Sequence[Tensor]
) -> list[Tensor]:
    """Several mixes of states in one pass; their gradients go only to their claims.

    Args:
        values: the states, detached.
        rows, scores: their weights, as in `operators.mixes`.
        n: number of claims of each mix.
        claims: the claims, ordered by mix.
    """
    return list(_ClaimedMixes.apply(values, rows, scores, n, *claims))


class _ClaimedMixes(torch.autograd.Function):
    """`claimed_mixes`."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, ...]:
        values, rows, scores, n, *_ = given
        ctx.n = n
        ctx.set_materialize_grads(False)

        def add_up(values: Sequence[Tensor], rows: Tensor, *scores: Tensor) -> Sequence[Tensor]:
            found: Sequence[Tensor] = operators.mixes(values, rows, scores, (), (), None)
            return found

        found = tuple(add_up(values, rows, *scores))
        remember_sums(found, values, (rows, *scores), add_up, ctx)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, None, None, None, *(grad for grad in grads for _ in range(ctx.n)))


def unclaimed(states: Sequence[Tensor], carried: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """The gradients of states if no mix has one: those of other uses."""
    if len(states) == 1:
        return [added_up(carried)]
    return carried or [None] * len(states)


def joining(states: Sequence[Tensor], carried: Sequence[Tensor | None]) -> list[Tensor]:
    """Gradients of other uses, for `gathered`: any number for a single state, else one for each state, or none."""
    added = [grad for grad in carried if grad is not None]
    if len(states) == 1 or not added:
        return added
    return [torch.zeros_like(x) if grad is None else grad for x, grad in zip(states, carried, strict=True)]


def stand_ins(like: Tensor, shape: Sequence[int], count: int) -> tuple[Tensor, ...]:
    """Expanded tensors of that shape, with one element of memory, in the dtype of ``like``."""
    return like.new_empty_strided((count, *shape), [0] * (1 + len(shape))).unbind()


def claim_on(x: Tensor, scores: Tensor, shape: Sequence[int]) -> tuple[Tensor, ...]:
    """A claim on streams, for a read [..., 1, D] of that shape: two tensors with arbitrary values (see `claimed`).

    In backward the first gets the read's gradient, and the second the read's factors, [..., n, 1]: their product is
    part of the gradient of x.
    """
    factors = (*shape[:-2], x.numel() // math.prod(shape), 1)
    return *stand_ins(x, shape, 1), *stand_ins(scores, factors, 1)


def by_read(x: Tensor, grad: Tensor | None = None, factors: Tensor | None = None) -> Tensor | None:
    """The gradient of a read of streams x, if there was one."""
    return None if grad is None or factors is None else (factors * grad).to(x.dtype).reshape(x.shape)


def present(grads: Sequence[Tensor | None]) -> list[Tensor]:
    """Gradients, with zeros for those that are None; empty if all are None."""
    like = next((grad for grad in grads if grad is not None), None)
    return [] if like is None else [torch.zeros_like(like) if grad is None else grad for grad in grads]


def added_up(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """The sum of the tensors that are not None, if any."""
    known = [x for x in tensors if x is not None]
    return functools.reduce(torch.add, known) if known else None


def gathered(
    grads: Sequence[Tensor],
    states: Sequence[Tensor],
    weights: Tensor | None,
    scores: Sequence[Tensor],
    added: Sequence[Tensor],
) -> tuple[Sequence[Tensor], Tensor | None, Sequence[Tensor]]:
    """Gradients of M states that N mixes read: ``dx_m = sum_n (w_mn + s_mn) g_n + sum_j a_j``.

    Args:
        grads: g_n, N of [..., D].
        states: x_m, M of [..., D].
        weights: w, float32 [M, N] or [M, N, D].
        scores: s, each state's weights per token, [..., N]; or none.
        added: a_j [..., D], gradients of other uses: any number for a single state; else one for each, or none.

    Returns:
        The gradients of the states; those of weights and of scores, ``<x_m, g_n>``, if these are given.
    """
    if by_torch(grads[0]):
        return _differentiable(grads, states, weights, scores, added)
    if switch.opaque(states[0]):
        return _by_kernels(grads, states, weights, scores, added)
    if not scores:
        assert weights is not None
        return (*plain.combine_with_dots(grads, states, weights, added), ())
    dx, dots, of_scores = plain.combine_with_token_dots(grads, states, weights, torch.stack(list(scores), -2), added)
    return dx, dots, of_scores.unbind(-2)


def _by_kernels(
    grads: Sequence[Tensor],
    states: Sequence[Tensor],
    weights: Tensor | None,
    scores: Sequence[Tensor],
    added: Sequence[Tensor],
) -> tuple[list[Tensor], Tensor | None, list[Tensor]]:
    """`gathered` by kernels, for some states at a time: for fewer with weights per channel, which take registers."""
    most = BLOCK if weights is not None and weights.dim() == 3 else MAX_OUTPUTS
    dx: list[Tensor] = []  # not list[Tensor](), which Dynamo does not know
    of_weights: list[Tensor] = []
    of_scores: list[Tensor] = []
    for first in range(0, len(states), most):
        some = slice(first, first + most)
        n, theirs = len(states[some]), added if len(states) == 1 else added[some]
        found = operators.mixes(
            grads, None if weights is None else weights[some], scores[some], theirs, states[some], states[0].dtype
        )
        dx += found[:n]
        of_weights += [] if weights is None else [found[n]]
        of_scores += found[-1].unbind(-2) if scores else []
    dots = None if weights is None else of_weights[0] if len(of_weights) == 1 else torch.cat(of_weights)
    return dx, dots, of_scores


def _differentiable(
    grads: Sequence[Tensor],
    states: Sequence[Tensor],
    weights: Tensor | None,
    scores: Sequence[Tensor],
    added: Sequence[Tensor],
) -> tuple[list[Tensor], Tensor | None, list[Tensor]]:
    """`gathered` by differentiable operations."""
    precise = torch.promote_types(states[0].dtype, torch.float32)
    given, dx, products = [g.to(precise) for g in grads], list[Tensor](), list[list[Tensor]]()
    for m, x in enumerate(states):
        factors = [[] if weights is None else weights[m], scores[m].split(1, -1) if scores else []]
        terms = [w * g for of_kind in factors for w, g in zip(of_kind, given, strict=False)]
        carried = added if len(states) == 1 else added[m : m + 1]
        dx.append(functools.reduce(torch.add, [*terms, *carried]).to(x.dtype))
        products.append([x * g for g in given])
    of_scores = [torch.stack([product.sum(-1) for product in of_state], -1) for of_state in products] if scores else []
    if weights is None:
        return dx, None, of_scores
    over = tuple(range(states[0].dim() - (weights.dim() == 3)))  # all but the channels, or all
    dots = [torch.stack([product.sum(over) for product in of_state]) for of_state in products]
    return dx, torch.stack(dots).to(weights.dtype), of_scores
