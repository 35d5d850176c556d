"""Several weighted sums of the same states: queries, keys and values; the streams of hyper-connections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rewire.kernels import operators
from rewire.kernels.mix import left_to_autograd, mix
from rewire.kernels.spec import MAX_OUTPUTS


def mixes(sources: Sequence[Tensor], weights: Tensor | None, scores: Tensor | None = None) -> list[Tensor]:
    """``y_m = sum_i (w_mi + s_mi) x_i`` for each m, each source being read once.

    Args:
        sources: N of [..., D], of one shape.
        weights: float32 [M, N] or, per channel, [M, N, D]; None: zero.
        scores: weights per token, float32 [..., M, N].

    Returns:
        M of [..., D], rounded once, in the dtype of plain adds.
    """
    outputs = len(weights) if weights is not None else scores.shape[-2]  # type: ignore[union-attr]
    if _by_kernels(sources[0], outputs):
        return list(_Several.apply(0, weights, scores, *sources))
    per_token = [None] * outputs if scores is None else [way.split(1, dim=-1) for way in scores.unbind(-2)]
    of_all = [None] * outputs if weights is None else weights
    return [mix(sources, w, scores=s) for w, s in zip(of_all, per_token, strict=True)]


def combine(streams: Tensor, weights: Tensor, branches: Sequence[Tensor] = (), write: Tensor | None = None) -> Tensor:
    """``H'_j = sum_i w_ij H_i + sum_f b_j f_j``, in float32 (float64 for float64), rounded once.

    Not by a matrix product, which autocast or TF32 would round.

    Args:
        streams: H [..., n, C].
        weights: w [..., n, k], from stream i to row j of the result; [n, k] if it does not depend on the token.
        branches: f [..., k, C] or, the same for all j, [..., 1, C].
        write: b [..., k].

    Returns:
        [..., k, C]
    """
    if _by_kernels(streams, weights.shape[-1]) and all(f.shape[-2] == 1 for f in branches):
        table = weights.mT if write is None else torch.cat([weights.mT, *[write.unsqueeze(-1)] * len(branches)], -1)
        static = table.dim() == 2
        given = (table if static else None, None if static else table, streams, *(f.squeeze(-2) for f in branches))
        result: Tensor = _Several.apply(streams.shape[-2], *given)
        return result
    sources = streams.unsqueeze(-2).unbind(-3)  # n of [..., 1, C]
    scores = weights.unsqueeze(-1).unbind(-3)  # n of [..., k, 1]
    if write is None:
        return mix(sources, None, scores=scores)
    return mix((*sources, *branches), None, scores=(*scores, *[write.unsqueeze(-1)] * len(branches)))


def _by_kernels(x: Tensor, outputs: int) -> bool:
    return operators.uses_kernels(x) and not left_to_autograd(x, 1) and outputs <= MAX_OUTPUTS


class _Several(torch.autograd.Function):
    """`mixes` by kernels; with ``stacked`` = n, the first tensor [..., n, D] is n sources, and so is the result."""

    @staticmethod
    def forward(ctx: Any, stacked: int, weights: Tensor | None, scores: Tensor | None, *tensors: Tensor) -> Any:
        ctx.stacked = stacked
        ctx.save_for_backward(weights, scores, *tensors)
        done = operators.several(_sources(stacked, tensors), weights, scores, stacked > 0)
        return done[0] if stacked else tuple(done)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        weights, scores, *tensors = ctx.saved_tensors
        sources = _sources(ctx.stacked, tensors)
        if torch.is_grad_enabled():  # with create_graph=True
            of_tensors, of_weights, of_scores = _differentiable(grads, ctx.stacked, weights, scores, tensors)
            return (None, of_weights, of_scores, *of_tensors)
        given = grads[0].unbind(-2) if ctx.stacked else grads
        found = operators.several_backward(given, sources, weights, scores, ctx.stacked)
        of_tensors, dots = found[: len(tensors)], iter(found[len(tensors) :])
        of_weights = None if weights is None else next(dots)
        of_scores = None if scores is None else next(dots)
        return (None, of_weights, of_scores, *of_tensors)


def _sources(stacked: int, tensors: Sequence[Tensor]) -> list[Tensor]:
    return [*tensors[0].unbind(-2), *tensors[1:]] if stacked else list(tensors)


def _differentiable(
    grads: Sequence[Tensor],
    stacked: int,
    weights: Tensor | None,
    scores: Tensor | None,
    tensors: Sequence[Tensor],
) -> tuple[Sequence[Tensor | None], Tensor | None, Tensor | None]:
    """Gradients of `_Several` by operations that autograd knows."""
    sources = torch.stack(_sources(stacked, tensors), -2).to(torch.float32)  # [..., N, D]
    factors = sum(x for x in (_dimensional(weights), None if scores is None else scores.unsqueeze(-1)) if x is not None)
    total = (factors * sources.unsqueeze(-3)).sum(-2)  # [..., M, D]
    inputs = [x for x in (weights, scores, *tensors) if x is not None and x.requires_grad]
    upstream = grads[0] if stacked else torch.stack(list(grads), -2)
    found = iter(torch.autograd.grad(total, inputs, upstream.to(total.dtype), create_graph=True))
    of = [next(found) if x is not None and x.requires_grad else None for x in (weights, scores, *tensors)]
    return of[2:], of[0], of[1]


def _dimensional(weights: Tensor | None) -> Tensor | None:
    """[M, N] or [M, N, D] with a dimension for channels."""
    return weights.unsqueeze(-1) if weights is not None and weights.dim() == 2 else weights
