"""The n streams of hyper-connections: projections, reads and writes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rewire.kernels import operators, switch
from rewire.mixes import tokens
from rewire.mixes.again import Saved, is_sparing, remember, remember_written, spared, sparing
from rewire.mixes.autograd import by_product, by_torch, exact_products, gradients, left_to_autograd
from rewire.mixes.claims import added_up, by_read, claim_on
from rewire.mixes.mix import Mix, fused, mix, through_norm
from rewire.mixes.several import differentiable, in_one_pass, several
from rewire.mixes.tokens import by_autograd, outside_autocast, read_off, read_off_at_once
from rewire.mixes.traced import whole_in_graphs

#: Given to a read of streams, so that its part of their gradient is computed in the backward of `read_off_streams`.
Claim = tuple[Tensor, Tensor]


class Projected:
    """The projection of streams that was computed when they were written, and a claim on them: see `read_off_streams`.

    A plain class: FSDP2 casts every tensor in tuples and dataclasses that a block gets.

    Attributes:
        products: float32 [..., n, K], or [..., K].
        claim: two tensors with arbitrary values.
    """

    __slots__ = ("claim", "products")

    def __init__(self, products: Tensor, claim: Claim) -> None:
        self.products, self.claim = products, claim

    def viewed(self, view: Callable[[Tensor], Tensor]) -> Projected:
        """The projection of reshaped streams."""
        grad, factors = self.claim
        return Projected(view(self.products), (view(grad), view(factors)))


@spared
def read_off_streams(streams: Tensor, weight: Tensor, eps: float | None) -> tuple[Tensor, Tensor, Claim | None]:
    """`read_off` of streams [..., n, D], or of a token's concatenated streams if the weight is [n D, K].

    Returns:
        The scores [..., n, K], or [..., K]; the streams; and a claim on them for `read_streams`, whose gradients are
        then computed in the same pass: None without kernels.
    """
    (*lead, n, width), x = streams.shape, of_tokens(streams, weight)
    if n == 1 or not tokens.by_kernels(x, weight) or left_to_autograd(x, math.inf):
        scores, x = read_off(x, weight, eps)
        return scores, x.view(streams.shape), None
    with outside_autocast(x.device):
        scores, x, grad, factors = read_off_at_once(x, weight, eps, False, 0, (*lead, 1, width))
    return scores, x.view(streams.shape), (grad, factors)


def of_tokens(streams: Tensor, weight: Tensor) -> Tensor:
    """Streams [..., n, D] as the weight reads them: [..., n D] if it is [n D, K]."""
    return _of_copies(lambda x: x.flatten(-2), streams) if weight.shape[0] > streams.shape[-1] else streams


@spared
def read_streams(streams: Tensor, weights: Tensor, claim: Claim | None = None) -> tuple[Tensor | PendingRead, Tensor]:
    """`combine` without branches, and the streams for the next read: see `mixes`.

    Args:
        streams, weights: as in `combine`.
        claim: the claim from `read_off_streams`, for one read with k = 1.

    Returns:
        [..., k C], perhaps yet to be computed; and the streams.
    """
    if by_product(streams):
        if weights.shape[-1] == 1:  # a single result is faster as a sum
            return (streams * weights).sum(-2, dtype=streams.dtype), streams
        return _product(streams, weights.mT, ()).flatten(-2), streams
    if claim is not None and weights.shape[-1] == 1:
        return PendingRead(streams, weights, claim), streams
    result, handed_on = _read(streams, weights)
    remember_read(result, streams, weights)
    return result.flatten(-2), handed_on


def _read(streams: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """`combine` without branches, and the streams for the next read."""
    by_kernels = in_one_pass([streams], weights.shape[-1])
    if by_kernels is None or weights.shape[:-2] not in ((), streams.shape[:-2]):
        return _combined(streams, weights), streams
    table = (weights.mT, None) if weights.dim() == 2 else (None, weights.mT)
    result, streams = several(by_kernels, True, 0, table[0], table[1], [streams])
    return result, streams


def remember_read(result: Tensor, streams: Tensor, weights: Tensor, ctx: object = None) -> None:
    """Let backward recompute a read of streams with ``weights``."""
    if is_sparing():
        kept, weights = Saved(streams.detach()), weights.detach()
        remember(result, lambda: _read(kept(), weights)[0], ctx)


class PendingRead(Mix):
    """A `Mix` of streams that leaves their gradient to the function that made the claim."""

    __slots__ = ("claim", "factors", "streams")

    def __init__(self, streams: Tensor, factors: Tensor, claim: Claim) -> None:
        """
        Args:
            streams: [..., n, C].
            factors: weights of the read, float32 [..., n, 1].
            claim: a claim on the streams.
        """
        super().__init__()
        self.streams, self.factors, self.claim = streams, factors, claim

    def value(self) -> Tensor:
        with sparing(self.streams):
            return read_claimed(None, 0.0, self.streams, self.factors, None, None, self.claim)[0]

    def normed(
        self, module: Callable[[Tensor], Tensor], alone: Callable[[Tensor], Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        norm = fused(module, self.streams)
        if norm is None:
            total = self.value()
            return total, module(total) if alone is None else alone(total)
        with sparing(self.streams):
            terms = self.streams, self.factors, norm.weight, norm.bias, self.claim
            total, after = read_claimed(norm.kind, norm.eps, *terms)
        return total, after


@whole_in_graphs
def read_claimed(
    norm: str | None,
    eps: float,
    streams: Tensor,
    factors: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    claim: Sequence[Tensor],
) -> list[Tensor]:
    """The sum of a `PendingRead`, whose attributes these are, and its `Norm`, if there is one."""
    found = _Claimed.apply(None if norm is None else (norm, eps), streams, factors, weight, bias, *claim)
    return [found] if norm is None else list(found)


class _Claimed(torch.autograd.Function):
    """`read_claimed`."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Any:  # in one: see `claims._Claims`
        kind, streams, factors, weight, bias, *_ = given
        ctx.kind = kind
        ctx.set_materialize_grads(False)
        terms = streams.unbind(-2), None, factors.unbind(-2), (), None, streams.dtype
        if kind is None or weight is None:
            ctx.save_for_backward(streams, factors)
            total = operators.mix(*terms)
            remember_read(total, streams, factors, ctx)
            return total
        total, normed, rstd = operators.mix_norm(*terms, kind[0], weight, bias, kind[1])
        remember_read(total, streams, factors, ctx)
        ctx.save_for_backward(streams, factors, *([weight] if bias is None else [weight, bias]), total, rstd)
        return total, normed

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_normed: Tensor | None = None) -> tuple[Any, ...]:
        streams, factors, *rest = ctx.saved_tensors
        of_norm: list[Any] = []
        if grad_normed is not None:
            *scale, total, rstd = rest
            if by_torch(grad_normed):
                grad, of_norm = through_norm(ctx.kind, grad, grad_normed, total, scale)
            else:
                norm = ctx.kind[0], scale[0], len(scale) > 1
                grad, *of_norm = operators.mix_norm_backward(grad_normed, grad, total, rstd, *norm, (), None, ())
        if grad is None:
            return (None,) * 7
        grad = grad.unsqueeze(-2)
        if by_torch(grad):
            products = (grad.float() * streams.float()).sum(-1, keepdim=True)
        else:
            products = operators.products(grad, streams)
        return None, None, products, *of_norm, *[None] * (2 - len(of_norm)), grad, factors


@spared
def combine(streams: Tensor, weights: Tensor, branches: Sequence[Tensor] = ()) -> Tensor:
    """``H'_j = sum_i w_ij H_i + w_nj sum_f f_j``, in float32 (float64 for float64), rounded once.

    Without a kernel, in eager mode on a CPU, it is a matrix product for each token, and so are its gradients; so it is
    for branches with a part for each result. Not elsewhere: autocast or TF32 would round the products.

    Args:
        streams: H [..., n, C].
        weights: w [..., n + 1, k], from stream i, and in the last row from each branch, to row j of the result;
            [n + 1, k] if it does not depend on the token. Without branches there are n rows.
        branches: f [..., k, C] or, the same for all j, [..., 1, C].

    Returns:
        [..., k, C]
    """
    if by_product(streams) and len(branches) < 2 and all(_fits(f, streams) for f in branches):
        return _product(streams, weights.mT, branches)
    result = _combined(streams, weights, branches)
    remember_combined(result, streams, weights, branches)
    return result


def remember_combined(
    result: Tensor, streams: Tensor, weights: Tensor, branches: Sequence[Tensor], ctx: object = None
) -> None:
    """Let backward recompute new streams."""
    weights = weights.detach()
    remember_written(streams, result, lambda x, branches: _combined(x, weights, branches), branches, ctx)


def _combined(streams: Tensor, weights: Tensor, branches: Sequence[Tensor] = ()) -> Tensor:
    n, by_kernels = streams.shape[-2], in_one_pass([streams, *branches], weights.shape[-1])
    if by_kernels is False and exact_products(streams) and any(f.shape[-2] > 1 for f in branches):
        by_kernels = None  # the CPU's loop would multiply by zeros for each token
    if by_kernels is not None and weights.shape[:-2] in ((), streams.shape[:-2]):
        terms, table = [_terms(f, weights[..., n:, :]) for f in branches], weights.mT
        if len(terms) > 1 or any(len(parts) > 1 for parts, _ in terms):
            table = torch.cat([table[..., :n], *(columns for _, columns in terms)], -1)
        given = (table, None) if table.dim() == 2 else (None, table)
        parts = [part for parts, _ in terms for part in parts]
        return several(by_kernels, True, 0, given[0], given[1], [streams, *parts])[0]
    if exact_products(streams) and all(f.dtype == streams.dtype for f in branches):
        return _products(streams, weights, branches)
    sources = streams.unsqueeze(-2).unbind(-3)  # n of [..., 1, C]
    scores = weights.unsqueeze(-1).unbind(-3)  # n + 1 of [..., k, 1]
    return mix((*sources, *branches), None, scores=(*scores[:n], *scores[n:] * len(branches)))


def _terms(branch: Tensor, write: Tensor) -> tuple[Sequence[Tensor], Tensor]:
    """The parts of a branch [..., 1 or k, C], and their weights in the k results, [..., k, 1 or k]; diagonal for k.

    ``write`` is [..., 1, k].
    """
    if branch.shape[-2] == 1:
        return [branch.squeeze(-2)], write.mT  # its gradients are views; those of unbind are not
    return branch.unbind(-2), torch.diag_embed(write.squeeze(-2))


def _fits(branch: Tensor, streams: Tensor) -> bool:
    """Whether a branch [..., 1, C] can be concatenated to the streams."""
    return branch.dtype == streams.dtype and branch.shape == (*streams.shape[:-2], 1, streams.shape[-1])


def _product(streams: Tensor, table: Tensor, branches: Sequence[Tensor]) -> Tensor:
    """``table``, [..., k, n or n + 1], times the streams and at most one branch."""
    terms = torch.cat((streams, *branches), -2) if branches else streams
    if table.dim() != terms.dim():
        table = table.expand(*terms.shape[:-2], *table.shape[-2:])
    if table.dtype != terms.dtype:
        table = table.to(terms.dtype)
    return table.contiguous() @ terms


def _products(streams: Tensor, weights: Tensor, branches: Sequence[Tensor]) -> Tensor:
    """`combine` by matrix products, in the dtype of the streams; branches are added in the order of plain adds.

    All operands are contiguous: with strided ones torch computes each token's product separately, 20 times as slow.
    """
    k, (n, channels), tokens = weights.shape[-1], streams.shape[-2:], streams.shape[:-2]
    with outside_autocast(streams.device):
        whole = weights.mT.to(streams.dtype)
        table = whole[..., :n].expand(*tokens, k, n).reshape(-1, k, n).contiguous()
        flat = _flat(streams)
        if not branches:
            return torch.bmm(table, flat).view(*tokens, k, channels)
        factor = whole[..., n:].contiguous()
        first, *others = [factor @ f if f.shape[-2] == 1 else factor * f for f in branches]
        total = torch.baddbmm(first.reshape(-1, k, channels), table, flat).view(first.shape)
        return functools.reduce(torch.add, others, total)


def _flat(streams: Tensor) -> Tensor:
    """Streams [N, n, C], contiguous."""
    return _of_copies(lambda x: x.reshape(-1, *x.shape[-2:]).contiguous(), streams)


def _of_copies(function: Callable[[Tensor], Tensor], streams: Tensor) -> Tensor:
    """``function(streams)``, without keeping the expanded copies of one tensor with which a trunk starts."""
    made = function(streams)
    if streams.stride(-2) == 0 and is_sparing():
        kept = Saved(streams.detach())
        remember(made, lambda: function(kept()))
    return made


@spared
def write_and_read(
    streams: Tensor, table: Tensor, weights: Tensor, branches: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """`combine`, and a `read_streams` of the new streams, both in one pass over the old ones.

    The read is then computed from unrounded streams; but not without a kernel, or in float64, as ``table`` is float32.

    Args:
        streams: H [..., n, C].
        table: float32 [n + 1, n + 1]: row j has the weights of H and, in the last column, of each branch in H'_j; the
            last row has those in the read, the sum of the other rows with ``weights``.
        weights: float32 [n, 1], the weights of H' in the read.
        branches: f [..., C].

    Returns:
        H' [..., n, C], and the read, [..., C].
    """
    if streams.dtype == torch.float32 and by_product(streams) and len(branches) == 1:
        branch = branches[0].unsqueeze(-2)
        if _fits(branch, streams):
            both = _product(streams, table, (branch,))
            return both[..., :-1, :], both[..., -1, :].contiguous()  # blocks may take views of it
    by_kernels = None if streams.dtype == torch.float64 else in_one_pass([streams, *branches], len(table))
    if by_kernels is None:
        result, streams = read_streams(combine(streams, table[:-1].mT, [f.unsqueeze(-2) for f in branches]), weights)
        assert isinstance(result, Tensor)  # not a Mix, as there is no claim
        return streams, result
    if len(branches) > 1:
        table = torch.cat([table, *[table[:, -1:]] * (len(branches) - 1)], -1)

    def in_one(x: Tensor, branches: Sequence[Tensor], table: Tensor) -> tuple[Tensor, ...]:
        return tuple(several(by_kernels, True, 1, table, None, [x, *branches])[:2])

    written, result = in_one(streams, branches, table)
    if is_sparing():
        kept, others, fixed = Saved(streams.detach()), [Saved(f.detach()) for f in branches], table.detach()
        remember_written(streams, written, lambda x, branches: in_one(x, branches, fixed)[0], branches)
        remember(result, lambda: in_one(kept(), [f() for f in others], fixed)[1])
    return written, result


@spared
def write_and_project(
    streams: Tensor, weights: Tensor, branches: Sequence[Tensor], projection: Tensor, eps: float
) -> tuple[Tensor] | tuple[Tensor, Projected]:
    """`combine` together with the `read_off_streams` of the new streams, which saves a pass over them.

    Args:
        streams, weights, branches: as in `combine`, of streams [..., n, C].
        projection: float32 [C, K] for each stream, or [n C, K] for a token's concatenated streams.
        eps: epsilon of the norm.

    Returns:
        H' [..., n, C]; and with a kernel, their projection.
    """
    if not switch.uses_kernels(streams):
        return (combine(streams, weights, branches),)
    n, tensors = streams.shape[-2], [streams, *branches]
    # Concatenated streams make long rows, for which a separate kernel is faster.
    each, few = len(projection) == streams.shape[-1], projection.shape[1] <= operators.MOST_PRODUCTS
    fits = each and few and n == weights.shape[-1] <= operators.MOST_WRITTEN
    even = weights.shape[:-2] == streams.shape[:-2] and all(f.shape[-2] == 1 for f in branches)
    some = len(branches) > 0 and streams.numel() > 0 and projection.dtype == torch.float32
    if not (fits and even and some and in_one_pass(tensors, n)):
        return (combine(streams, weights, branches),)
    table, more = weights.mT, [weights[..., n:, :].mT] * (len(branches) - 1)
    table = torch.cat([table, *more], -1) if more else table
    with outside_autocast(streams.device):
        written, products, *claim = write_at_once(eps, projection, table, [streams, *[f.squeeze(-2) for f in branches]])
    return written, Projected(products, (claim[0], claim[1]))


@whole_in_graphs
def write_at_once(eps: float, projection: Tensor, table: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """New streams, their projection, and a claim on them, by one kernel: see `write_and_project`.

    Args:
        eps, projection: as there.
        table: the weights [..., k, n + number of branches].
        tensors: the streams, and then the branches, [..., C].
    """
    return list(_Written.apply(eps, projection, table, *tensors))


class _Written(torch.autograd.Function):
    """`write_at_once`; saves streams, branches, the new streams, and a few numbers for each token."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, ...]:  # in one: see `claims._Claims`
        eps, weight, table, *tensors = given
        streams, *branches = tensors
        written, products, inverse = operators.write_and_project(streams, branches, table, weight, eps)
        n = streams.shape[-2]
        remember_combined(written, streams, table[..., : n + 1].mT, [f.unsqueeze(-2) for f in branches], ctx)
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
        if grad is None or by_torch(grad):
            of_x, of_weight = None, None
            if grad is not None:
                of_x, of_weight = gradients(functools.partial(by_autograd, eps=ctx.eps), (written, weight), grad)
            total = added_up([carried, by_read(written, of_read, factors), of_x])
            if total is None:
                return None, of_weight, None, *[None] * (1 + len(branches))
            if by_torch(total):
                of_terms, _, of_table = differentiable([total], True, None, table, (streams, *branches))
            else:
                *of_terms, of_table = operators.mixes_backward([total], (streams, *branches), None, (table,), (), True)
            return None, of_weight, of_table, *of_terms
        *of_terms, of_table, of_weight = operators.write_and_project_backward(
            grad, carried, of_read, factors, written, products, inverse, streams, branches, table, weight
        )
        return None, of_weight.T, of_table, *of_terms
