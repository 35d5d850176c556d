"""Claims: what autograd sees in place of a mix's scalings of states. See `history` for what they are."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rewire.kernels import operators, plain


class Claims(torch.autograd.Function):
    """Claims of N later mixes on M states: N tensors whose values mean nothing, and whose gradients are the mixes'.

    ``weights`` are float32 [M N] or [M N, D]. ``tensors`` are the states, [..., D], after weights per token, [..., N]
    of each state, if there are any. ``through`` more results are the state itself (M = 1), and their gradients join.
    """

    @staticmethod
    def forward(ctx: Any, through: int, count: int, weights: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(weights, *tensors)
        ctx.set_materialize_grads(False)
        ctx.states, ctx.mixes = count, weights.shape[0] // count
        x = tensors[-count]
        return (*stand_ins(x, x.shape, ctx.mixes), *[x.view_as(x) for _ in range(through)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        flat, *tensors = ctx.saved_tensors
        scores, states = tensors[: -ctx.states], tensors[-ctx.states :]
        given, added = present(grads[: ctx.mixes]), [grad for grad in grads[ctx.mixes :] if grad is not None]
        if not given:
            return (None, None, None, *[None] * (len(tensors) - 1), added_up(added))
        weights = flat.view(len(states), ctx.mixes, *flat.shape[1:])
        dx, dots, of_scores = gathered(given, states, weights, _of_states(scores), added)
        by_token = () if of_scores is None else of_scores.unbind(-2)
        return (None, None, None if dots is None else dots.reshape(flat.shape), *by_token, *dx)


def _of_states(scores: Sequence[Tensor]) -> Tensor | None:
    """Weights per token of M states, [..., M, N], if there are any."""
    return torch.stack(list(scores), -2) if len(scores) > 1 else scores[0].unsqueeze(-2) if scores else None


def stand_ins(like: Tensor, shape: Sequence[int], count: int) -> tuple[Tensor, ...]:
    """Tensors of that shape without memory: one element, in the dtype of ``like``."""
    return like.new_empty_strided((count, *shape), [0] * (1 + len(shape))).unbind()


def present(grads: Sequence[Tensor | None]) -> list[Tensor]:
    """Gradients, zeros for those that there are not; none if there are none at all."""
    like = next((grad for grad in grads if grad is not None), None)
    return [] if like is None else [torch.zeros_like(like) if grad is None else grad for grad in grads]


def added_up(tensors: Sequence[Tensor]) -> Tensor | None:
    """Their sum, if there are any."""
    return functools.reduce(torch.add, tensors) if tensors else None


def gathered(
    grads: Sequence[Tensor],
    states: Sequence[Tensor],
    weights: Tensor | None,
    scores: Tensor | None,
    added: Sequence[Tensor],
) -> tuple[Sequence[Tensor], Tensor | None, Tensor | None]:
    """What N mixes send back to M states that they read: ``dx_m = sum_n (w_mn + s_mn) g_n + sum_j a_j``.

    Args:
        grads: g_n, N of [..., D].
        states: x_m, M of [..., D].
        weights: w, float32 [M, N] or [M, N, D].
        scores: s, weights per token, [..., M, N].
        added: a_j [..., D], gradients that came other ways: any number for a single state; beside weights per token,
            one for each state.

    Returns:
        The gradients of the states; those of weights and of scores, ``<x_m, g_n>``, where these are given.
    """
    if torch.is_grad_enabled():  # with create_graph=True
        return _differentiable(grads, states, weights, scores, added)
    if operators.uses_kernels(states[0]):
        found = operators.gather(grads, states, weights, added, scores)
        dots = iter(found[len(states) :])
        of_weights, of_scores = (None if given is None else next(dots) for given in (weights, scores))
        return found[: len(states)], of_weights, of_scores
    if scores is None:
        assert weights is not None
        return (*plain.combine_with_dots(grads, states, weights, added), None)
    return plain.combine_with_token_dots(grads, states, weights, scores, added)


def _differentiable(
    grads: Sequence[Tensor],
    states: Sequence[Tensor],
    weights: Tensor | None,
    scores: Tensor | None,
    added: Sequence[Tensor],
) -> tuple[list[Tensor], Tensor | None, Tensor | None]:
    """`gathered`, by operations that autograd knows."""
    precise = torch.promote_types(states[0].dtype, torch.float32)
    given, dx, products = [g.to(precise) for g in grads], list[Tensor](), list[list[Tensor]]()
    for m, x in enumerate(states):
        factors = [[] if weights is None else weights[m], [] if scores is None else scores[..., m, :].split(1, -1)]
        terms = [w * g for of_kind in factors for w, g in zip(of_kind, given, strict=False)]
        carried = added if len(states) == 1 else added[m : m + 1]
        dx.append(functools.reduce(torch.add, [*terms, *carried]).to(x.dtype))
        products.append([x * g for g in given])
    by_token = [torch.stack([product.sum(-1) for product in of_state], -1) for of_state in products]
    of_scores = None if scores is None else torch.stack(by_token, -2)
    if weights is None:
        return dx, None, of_scores
    over = tuple(range(states[0].dim() - (weights.dim() == 3)))  # all but the channels, or all
    dots = [torch.stack([product.sum(over) for product in of_state]) for of_state in products]
    return dx, torch.stack(dots).to(weights.dtype), of_scores
