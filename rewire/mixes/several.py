"""Several weighted sums of the same states, such as queries, keys and values."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rewire.kernels import operators, switch
from rewire.kernels.cpu import native
from rewire.kernels.sums.spec import MAX_OUTPUTS
from rewire.mixes.again import remember_sums, sparing
from rewire.mixes.autograd import by_torch, gradients, left_to_autograd
from rewire.mixes.claims import added_up
from rewire.mixes.mix import mix
from rewire.mixes.traced import whole_in_graphs


def mixes(
    sources: Sequence[Tensor], weights: Tensor | None, scores: Tensor | None = None
) -> tuple[list[Tensor], Sequence[Tensor]]:
    """``y_m = sum_i (w_mi + s_mi) x_i`` for each m, reading each source once.

    Args:
        sources: N of [..., D], of one shape.
        weights: float32 [M, N] or, per channel, [M, N, D]; None: zero.
        scores: weights per token, float32 [..., M, N].

    Returns:
        M of [..., D], rounded once, in the dtype of plain adds; and the sources for the next read, whose gradients are
        then added in the same backward pass over memory.
    """
    outputs = len(weights) if weights is not None else scores.shape[-2]  # type: ignore[union-attr]
    shape = sources[0].shape  # torch.export's symbolic sizes have no hash
    even = all(x.shape == shape for x in sources) and (scores is None or scores.shape[:-2] == shape[:-1])
    by_kernels = in_one_pass(sources, outputs)
    if even and by_kernels is not None:

        def add_up(sources: Sequence[Tensor], weights: Tensor | None, scores: Tensor | None) -> Sequence[Tensor]:
            found: Sequence[Tensor] = several(by_kernels, False, 0, weights, scores, sources)
            return found

        with sparing(sources[0]):
            found = add_up(sources, weights, scores)
            made = found[:outputs]
            remember_sums(made, sources, (weights, scores), lambda *given: add_up(*given)[:outputs])
        return list(made), found[outputs:]
    per_token = [None] * outputs if scores is None else [way.split(1, dim=-1) for way in scores.unbind(-2)]
    of_all = [None] * outputs if weights is None else weights
    return [mix(sources, w, scores=s) for w, s in zip(of_all, per_token, strict=True)], sources


def in_one_pass(tensors: Sequence[Tensor], outputs: int) -> bool | None:
    """How to compute several sums of such tensors in one pass: True: kernels; False: a CPU's loop; None: no way."""
    first = tensors[0]
    if left_to_autograd(first, len(tensors)) or any(type(x) not in (Tensor, nn.Parameter) for x in tensors[1:]):
        return None  # collectives still running: views of their results have no memory
    if switch.uses_kernels(first):
        return True if outputs <= MAX_OUTPUTS else None
    return False if native.knows(first) and all(x.dtype == first.dtype for x in tensors) else None


@whole_in_graphs
def several(
    by_kernels: bool,
    stacked: bool,
    apart: int,
    weights: Tensor | None,
    scores: Tensor | None,
    tensors: Sequence[Tensor],
) -> list[Tensor]:
    """`mixes` in one pass, and all tensors, so that gradients of later uses are added in the same pass.

    Autograd would take three passes: if units read n states one after the other, it would move 3n states.

    Args:
        by_kernels: as `in_one_pass` says.
        stacked: whether the first tensor, [..., n, D], holds n sources, and the first result all mixes.
        apart: even then, number of last mixes that are separate results.
        weights, scores, tensors: as in `mixes`.
    """
    return list(_Several.apply(by_kernels, stacked, apart, weights, scores, *tensors))


class _Several(torch.autograd.Function):
    """`several`."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Any:  # in one: see `claims._Claims`
        by_kernels, stacked, apart, weights, scores, *tensors = given
        ctx.by_kernels, ctx.stacked = by_kernels, stacked
        ctx.save_for_backward(weights, scores, *tensors)
        ctx.set_materialize_grads(False)
        tables = () if scores is None else (scores,)
        if by_kernels:
            done = operators.mixes(tensors, weights, tables, (), (), None, stacked, apart)
        else:
            done = native.mixes(tensors, weights, scores, stacked, apart)
        ctx.shapes = [y.shape for y in done]
        return (*done, *[x.view_as(x) for x in tensors])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        weights, scores, *tensors = ctx.saved_tensors
        of_mixes, carried = grads[: -len(tensors)], grads[-len(tensors) :]
        like = next((g for g in of_mixes if g is not None), None)
        if like is None:
            return (None, None, None, None, None, *carried)
        given = [like.new_zeros(shape) if g is None else g for g, shape in zip(of_mixes, ctx.shapes, strict=True)]
        if by_torch(like):
            of_tensors, of_weights, of_scores = differentiable(given, ctx.stacked, weights, scores, tensors)
            return (None, None, None, of_weights, of_scores, *map(added_up, zip(of_tensors, carried, strict=True)))
        known = [x for x in carried if x is not None]
        joined = known if len(known) == len(carried) else []
        if ctx.by_kernels:
            tables = () if scores is None else (scores,)
            found = operators.mixes_backward(given, tensors, weights, tables, joined, ctx.stacked)
        else:
            found = native.mixes_backward(given, tensors, weights, scores, joined, ctx.stacked)
        dots = iter(found[len(tensors) :])
        of_weights = None if weights is None else next(dots)
        of_scores = None if scores is None else next(dots)
        if not joined:
            return (None, None, None, of_weights, of_scores, *map(added_up, zip(found, carried, strict=False)))
        return (None, None, None, of_weights, of_scores, *found[: len(tensors)])


def _sources(stacked: bool, tensors: Sequence[Tensor]) -> list[Tensor]:
    return [*tensors[0].unbind(-2), *tensors[1:]] if stacked else list(tensors)


def differentiable(
    grads: Sequence[Tensor],
    stacked: bool,
    weights: Tensor | None,
    scores: Tensor | None,
    tensors: Sequence[Tensor],
) -> tuple[Sequence[Tensor | None], Tensor | None, Tensor | None]:
    """Gradients of `several` by differentiable operations."""
    factors = [x for x in (weights, scores) if x is not None]
    precision = torch.promote_types(grads[0].dtype, torch.float32)
    upstream = torch.stack(_sources(stacked, grads), -2).to(precision)

    def total(*inputs: Tensor) -> Tensor:
        sources = torch.stack(_sources(stacked, inputs[len(factors) :]), -2).to(precision)  # [..., N, D]
        by_channel = weights is not None and weights.dim() == 3
        parts = [x if by_channel and n == 0 else x.unsqueeze(-1) for n, x in enumerate(inputs[: len(factors)])]
        return (functools.reduce(torch.add, parts) * sources.unsqueeze(-3)).sum(-2)  # [..., M, D]

    found = gradients(total, [*factors, *tensors], upstream)
    of_factors = iter(found[: len(factors)])
    of_weights, of_scores = (None if x is None else next(of_factors) for x in (weights, scores))
    return found[len(factors) :], of_weights, of_scores
