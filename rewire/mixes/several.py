"""Several weighted sums of the same states: queries, keys and values; the streams of hyper-connections."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rewire.kernels import operators
from rewire.kernels.cpu import native
from rewire.kernels.sums.spec import MAX_OUTPUTS
from rewire.mixes.autograd import gradients, left_to_autograd
from rewire.mixes.claims import added_up
from rewire.mixes.mix import mix
from rewire.mixes.tokens import Claim, Projected, by_autograd, by_read, claim_on, of_tokens, outside_autocast


def mixes(
    sources: Sequence[Tensor], weights: Tensor | None, scores: Tensor | None = None
) -> tuple[list[Tensor], Sequence[Tensor]]:
    """``y_m = sum_i (w_mi + s_mi) x_i`` for each m, each source being read once.

    Args:
        sources: N of [..., D], of one shape.
        weights: float32 [M, N] or, per channel, [M, N, D]; None: zero.
        scores: weights per token, float32 [..., M, N].

    Returns:
        M of [..., D], rounded once, in the dtype of plain adds; and the sources, as who reads them next is to take
        them: where this is one pass over memory, gradients from there join it.
    """
    outputs = len(weights) if weights is not None else scores.shape[-2]  # type: ignore[union-attr]
    lead = sources[0].shape[:-1]
    even = len({x.shape for x in sources}) == 1 and (scores is None or scores.shape[:-2] == lead)
    by_kernels = _by_kernels(sources, outputs)
    if even and by_kernels is not None:
        found = _Several.apply(by_kernels, False, 0, weights, scores, *sources)
        return list(found[:outputs]), found[outputs:]
    per_token = [None] * outputs if scores is None else [way.split(1, dim=-1) for way in scores.unbind(-2)]
    of_all = [None] * outputs if weights is None else weights
    return [mix(sources, w, scores=s) for w, s in zip(of_all, per_token, strict=True)], sources


def read(streams: Tensor, weights: Tensor, claim: Claim | None = None) -> tuple[Tensor, Tensor]:
    """`combine` without branches, and the streams, as who reads them next is to take them: see `mixes`.

    Args:
        streams, weights: as in `combine`.
        claim: what `tokens.read_off_streams` returned with the streams, for one read of them with k = 1.
    """
    if claim is not None and weights.shape[-1] == 1:
        return _Claimed.apply(streams, weights, *claim), streams
    by_kernels = _by_kernels([streams], weights.shape[-1])
    if by_kernels is not None and weights.shape[:-2] in ((), streams.shape[:-2]):
        static = weights.dim() == 2
        table = (weights.mT, None) if static else (None, weights.mT)
        result, streams = _Several.apply(by_kernels, True, 0, *table, streams)
        return result, streams
    return combine(streams, weights), streams


class _Claimed(torch.autograd.Function):
    """A read of streams whose part of their gradient is not computed here, but by who gave out the claim."""

    @staticmethod
    def forward(ctx: Any, streams: Tensor, weights: Tensor, *claim: Tensor) -> Tensor:
        ctx.save_for_backward(streams, weights)
        result: Tensor = operators.several(streams, (), None, weights.mT)[0]
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        streams, weights = ctx.saved_tensors
        if torch.is_grad_enabled():  # with create_graph=True
            products = (grad.float() * streams.float()).sum(-1, keepdim=True)
        else:
            products = operators.products(grad, streams)
        return None, products, grad, weights


def combine(streams: Tensor, weights: Tensor, branches: Sequence[Tensor] = ()) -> Tensor:
    """``H'_j = sum_i w_ij H_i + w_nj sum_f f_j``, in float32 (float64 for float64), rounded once.

    Without a kernel, in eager mode on a CPU, it is a matrix product for each token, and so are its gradients; also for
    branches with a part for each result. Nowhere else: autocast or TF32 would round them.

    Args:
        streams: H [..., n, C].
        weights: w [..., n + 1, k], from stream i, and in the last row from each branch, to row j of the result;
            [n + 1, k] if it does not depend on the token. Without branches there are n rows.
        branches: f [..., k, C] or, the same for all j, [..., 1, C].

    Returns:
        [..., k, C]
    """
    n, by_kernels = streams.shape[-2], _by_kernels([streams, *branches], weights.shape[-1])
    if by_kernels is False and _exact_products(streams) and any(f.shape[-2] > 1 for f in branches):
        by_kernels = None  # the loop would multiply by zeros, per token
    if by_kernels is not None and weights.shape[:-2] in ((), streams.shape[:-2]):
        terms, table = [_terms(f, weights[..., n:, :]) for f in branches], weights.mT
        if len(terms) > 1 or any(len(parts) > 1 for parts, _ in terms):
            table = torch.cat([table[..., :n], *(columns for _, columns in terms)], -1)
        given = (table, None) if table.dim() == 2 else (None, table)
        parts = [part for parts, _ in terms for part in parts]
        result: Tensor = _Several.apply(by_kernels, True, 0, *given, streams, *parts)[0]
        return result
    if _exact_products(streams) and all(f.dtype == streams.dtype for f in branches):
        return _products(streams, weights, branches)
    sources = streams.unsqueeze(-2).unbind(-3)  # n of [..., 1, C]
    scores = weights.unsqueeze(-1).unbind(-3)  # n + 1 of [..., k, 1]
    return mix((*sources, *branches), None, scores=(*scores[:n], *scores[n:] * len(branches)))


def _terms(branch: Tensor, write: Tensor) -> tuple[Sequence[Tensor], Tensor]:
    """The parts of a branch [..., 1 or k, C], and what k results take of them, [..., k, 1 or k]: each its own one.

    ``write`` is [..., 1, k].
    """
    if branch.shape[-2] == 1:
        return [branch.squeeze(-2)], write.mT  # whose gradients are views, which those of unbind are not
    return branch.unbind(-2), torch.diag_embed(write.squeeze(-2))


def write_and_read(
    streams: Tensor, table: Tensor, weights: Tensor, branches: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """`combine`, and a `read` of the new streams: one pass over the old ones writes both.

    Then the read is not of streams that were rounded. Without a kernel, and for float64, which ``table`` does not have,
    it is.

    Args:
        streams: H [..., n, C].
        table: float32 [n + 1, n + 1]: in row j what H'_j takes of H and, in the last column, of each branch; in the
            last row what the read takes of them, the sum of the other rows with ``weights``.
        weights: float32 [n, 1], what the read takes of H'.
        branches: f [..., C].

    Returns:
        H' [..., n, C], and the read, [..., C].
    """
    by_kernels = None if streams.dtype == torch.float64 else _by_kernels([streams, *branches], len(table))
    if by_kernels is None:
        result, streams = read(combine(streams, table[:-1].mT, [f.unsqueeze(-2) for f in branches]), weights)
        return streams, result.squeeze(-2)
    if len(branches) > 1:
        table = torch.cat([table, *[table[:, -1:]] * (len(branches) - 1)], -1)
    written, result, *_ = _Several.apply(by_kernels, True, 1, table, None, streams, *branches)
    return written, result


def write_and_project(
    streams: Tensor, weights: Tensor, branches: Sequence[Tensor], projection: Tensor, eps: float
) -> tuple[Tensor] | tuple[Tensor, Projected]:
    """`combine`, and what `tokens.read_off_streams` would read off the new streams: one pass over them less.

    Args:
        streams, weights, branches: as in `combine`, of streams [..., n, C].
        projection: float32 [C, K], of each stream, or [n C, K], of all of a token side by side.
        eps: of the norm.

    Returns:
        H' [..., n, C]; and, where there is a kernel, what it has read off.
    """
    n, tensors = streams.shape[-2], [streams, *branches]
    fits = n == weights.shape[-1] <= operators.MOST_WRITTEN and projection.shape[1] <= operators.MOST_PRODUCTS
    even = weights.shape[:-2] == streams.shape[:-2] and all(f.shape[-2] == 1 for f in branches)
    some = len(branches) > 0 and streams.numel() > 0 and projection.dtype == torch.float32
    if not (fits and even and some and _by_kernels(tensors, n)):
        return (combine(streams, weights, branches),)
    table, more = weights.mT, [weights[..., n:, :].mT] * (len(branches) - 1)
    table = torch.cat([table, *more], -1) if more else table
    with outside_autocast(streams.device):
        written, products, *claim = _Written.apply(eps, projection, table, streams, *[f.squeeze(-2) for f in branches])
    return written, Projected(products, (claim[0], claim[1]))


def _exact_products(x: Tensor) -> bool:
    """Whether a matrix product of tensors like ``x`` is as exact as sums are, and faster."""
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return x.dtype == torch.float64 or (x.dtype == torch.float32 and torch.get_float32_matmul_precision() != "medium")


def _products(streams: Tensor, weights: Tensor, branches: Sequence[Tensor]) -> Tensor:
    """`combine` by matrix products, in the dtype of the streams; branches are added in the order of plain adds.

    All of them contiguous: of strided ones torch computes a product for each token by itself, 20 times as slow.
    """
    k, (n, channels), tokens = weights.shape[-1], streams.shape[-2:], streams.shape[:-2]
    with outside_autocast(streams.device):
        whole = weights.mT.to(streams.dtype)
        table = whole[..., :n].expand(*tokens, k, n).reshape(-1, k, n).contiguous()
        flat = streams.reshape(-1, n, channels).contiguous()
        if not branches:
            return torch.bmm(table, flat).view(*tokens, k, channels)
        factor = whole[..., n:].contiguous()
        first, *others = [factor @ f if f.shape[-2] == 1 else factor * f for f in branches]
        total = torch.baddbmm(first.reshape(-1, k, channels), table, flat).view(first.shape)
        return functools.reduce(torch.add, others, total)


def _by_kernels(tensors: Sequence[Tensor], outputs: int) -> bool | None:
    """What makes several sums of such tensors in one pass: kernels, or the compiled loop of a CPU; None: nothing."""
    first = tensors[0]
    if left_to_autograd(first, len(tensors)) or any(type(x) not in (Tensor, nn.Parameter) for x in tensors[1:]):
        return None  # branches that are still on their way from other ranks: their views have no memory
    if operators.uses_kernels(first):
        return True if outputs <= MAX_OUTPUTS else None
    return False if native.knows(first) and all(x.dtype == first.dtype for x in tensors) else None


class _Several(torch.autograd.Function):
    """`mixes` in one pass; ``stacked``: the first tensor [..., n, D] is n sources, and so is the first result.

    The last ``apart`` mixes are results of their own even then.

    All tensors are handed on. What comes back for them joins their gradients in one pass, which autograd would add in
    three: a unit that reads n states, one after the other, would move 3n states for that.
    """

    @staticmethod
    def forward(
        ctx: Any,
        by_kernels: bool,
        stacked: bool,
        apart: int,
        weights: Tensor | None,
        scores: Tensor | None,
        *tensors: Tensor,
    ) -> Any:
        ctx.by_kernels, ctx.stacked = by_kernels, stacked
        ctx.save_for_backward(weights, scores, *tensors)
        ctx.set_materialize_grads(False)
        several = operators.several if by_kernels else native.several
        done = several(*_apart(stacked, tensors), weights, scores, apart)
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
        if torch.is_grad_enabled():  # with create_graph=True
            of_tensors, of_weights, of_scores = _differentiable(given, ctx.stacked, weights, scores, tensors)
            return (None, None, None, of_weights, of_scores, *map(_sum, of_tensors, carried))
        known = [x for x in carried if x is not None]
        joined = known if len(known) == len(carried) else []
        backward = operators.several_backward if ctx.by_kernels else native.several_backward
        found = backward(given, *_apart(ctx.stacked, tensors), weights, scores, joined)
        dots = iter(found[len(tensors) :])
        of_weights = None if weights is None else next(dots)
        of_scores = None if scores is None else next(dots)
        if not joined:
            return (None, None, None, of_weights, of_scores, *map(_sum, found, carried))
        return (None, None, None, of_weights, of_scores, *found[: len(tensors)])


class _Written(torch.autograd.Function):
    """Keeps for backward streams and branches, the new streams, and a few numbers for each token.

    Returns the new streams, what is read off them, and a claim on them, as `tokens.read_off_streams` does.
    """

    @staticmethod
    def forward(ctx: Any, eps: float, weight: Tensor, table: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        streams, *branches = tensors
        written, products, inverse = operators.write_and_project(streams, branches, table, weight, eps)
        ctx.eps = eps
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(weight, table, written, products, inverse, *tensors)
        *lead, _, width = streams.shape
        return written, products, *claim_on(written, products, (*lead, 1, width))

    @staticmethod
    def backward(
        ctx: Any, carried: Tensor | None, grad: Tensor | None, of_read: Tensor | None, factors: Tensor | None
    ) -> tuple[Any, ...]:
        weight, table, written, products, inverse, streams, *branches = ctx.saved_tensors
        if grad is None or torch.is_grad_enabled():  # with create_graph=True
            x = of_tokens(written, weight)
            of_x, of_weight = None, None
            if grad is not None:
                of_x, of_weight = gradients(functools.partial(by_autograd, eps=ctx.eps), (x, weight), grad)
                of_x = of_x.view(written.shape)
            total = added_up([carried, by_read(written, of_read, factors), of_x])
            if total is None:
                return None, of_weight, None, *[None] * (1 + len(branches))
            if torch.is_grad_enabled():
                of_terms, _, of_table = _differentiable([total], True, None, table, (streams, *branches))
            else:
                *of_terms, of_table = operators.several_backward([total], streams, branches, None, table, [])
            return None, of_weight, of_table, *of_terms
        *of_terms, of_table, of_weight = operators.write_and_project_backward(
            grad, carried, of_read, factors, written, products, inverse, streams, branches, table, weight
        )
        return None, of_weight.T, of_table, *of_terms


def _apart(stacked: bool, tensors: Sequence[Tensor]) -> tuple[Tensor | None, Sequence[Tensor]]:
    """The streams, and the other sources."""
    return (tensors[0], tensors[1:]) if stacked else (None, tensors)


def _sum(x: Tensor | None, y: Tensor | None) -> Tensor | None:
    return y if x is None else x if y is None else x + y


def _sources(stacked: bool, tensors: Sequence[Tensor]) -> list[Tensor]:
    return [*tensors[0].unbind(-2), *tensors[1:]] if stacked else list(tensors)


def _differentiable(
    grads: Sequence[Tensor],
    stacked: bool,
    weights: Tensor | None,
    scores: Tensor | None,
    tensors: Sequence[Tensor],
) -> tuple[Sequence[Tensor | None], Tensor | None, Tensor | None]:
    """Gradients of `_Several` by operations that autograd knows."""
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
