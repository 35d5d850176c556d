"""States that all later reads attend over, with weights that a softmax makes of a score of each (Attention Residuals).

Read t is ``r_t = sum_i a_ti x_i`` with ``a_ti = exp(s_ti - m_t) / d_t`` and ``s_ti = w_t . rmsnorm(x_i)``: m_t is the
largest of these scores, d_t the sum of the numerators, or their mean where the weights of n states are to add up to n.
Of the other states' part in a gradient one number is enough for each token, as in FlashAttention-2 (arXiv 2307.08691,
section 3.1.2). With g_t, the gradient of r_t,

    dx_i = sum_t a_ti g_t + what the norm and the products make of ds_ti
    ds_ti = a_ti (<x_i, g_t> - e_t)
    e_t = sum_j a_tj <x_j, g_t> / n_t = <r_t, g_t> / n_t

where n_t is what the weights add up to. So a state's gradient, like that of `history`, is one pass over the state and
the gradients of its reads, once these are done, and a read's own backward sees ``r_t`` and ``g_t`` alone.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rewire.kernels import operators, plain
from rewire.kernels.mix import Attended, Mix, gradients, pending_mix, softmax
from rewire.kernels.scored import ScoredHistory
from rewire.kernels.tokens import project_normed

EPS = 1e-6  # of the norm


class AttendedTable:
    """Queries of reads in turn: read t = 1, 2, .. is of the t states so far, the first of one state, without a query.

    Args:
        queries: w, float32 [T, D], of the reads 2 to T + 1.
        scaled: whether the weights of n states add up to n, not to 1.

    Attributes:
        queries: of each state those of the reads that have it, [m, D].
        scaled: as above.
        sources: that a read has, on average.
        block: reads that kernels begin together: none.
    """

    block = 0

    def __init__(self, queries: Tensor, scaled: bool) -> None:
        self.queries = [queries[_first(state) :] for state in range(len(queries) + 1)]
        self.scaled, self.sources = scaled, (len(queries) + 3) / 2


def _first(state: int) -> int:
    """The first query of a state's: the first two states are read together."""
    return max(0, state - 1)


class AttendedHistory(ScoredHistory):
    """The states of a trunk so far, each with the scores of its later reads. Immutable.

    Attributes:
        tallies: of each state, where it has claims, for each of its reads a tensor [3, ...] whose values mean nothing,
            and whose gradient is what the state's gradient needs to know of the read, ``(m_t, d_t, e_t)``.
    """

    __slots__ = ("tallies",)

    table: AttendedTable  # type: ignore[assignment]

    def __init__(self, *fields: Any, tallies: tuple[tuple[Tensor, ...], ...] = (), **others: Any) -> None:
        super().__init__(*fields, **others)
        self.tallies = tallies

    def _claimed(self, x: Tensor) -> AttendedHistory:
        assert self.claims is not None
        queries = self.table.queries[len(self.states)]
        *found, x, scores = _Claims.apply(queries.T, x)
        claims, tallies = found[: len(queries)], found[len(queries) :]
        return AttendedHistory(
            self.table,
            (*self.states, x),
            (*self.values, x.detach()),
            (*self.claims, tuple(claims)),
            (*self.scores, scores),
            tallies=(*self.tallies, tuple(tallies)),
        )

    def read(self, number: int) -> Sequence[Tensor | Mix]:
        """The sum of read ``number``, from 0."""
        if number == 0:
            return [self.states[0]]
        places = [number - 1 - _first(i) for i in range(number + 1)]
        own = tuple([s.select(-1, k) for s, k in zip(self.scores, places, strict=True)])
        if self.claims is None:
            shares, _ = softmax(torch.stack(own), self.table.scaled)
            return [pending_mix(self.states, None, scores=shares.unsqueeze(-1).unbind())]
        with torch.no_grad():
            logits = torch.stack(own)
            if operators.uses_kernels(self.values[0]):
                shares, statistics = operators.softmax(logits, len(own) if self.table.scaled else 1)
            else:
                shares, statistics = softmax(logits, self.table.scaled)
        claims, tallies = (
            tuple([of[k] for of, k in zip(each, places, strict=True)]) for each in (self.claims, self.tallies)
        )
        attended = Attended(statistics, self.values, own, self.table.scaled)
        weights = shares.unsqueeze(-1).unbind()
        return [Mix(self.values, None, weights, claims=claims, attended=attended, tallies=tallies)]

    def _scores(self, number: int, x: Tensor) -> Tensor:
        return project_normed(x, self.table.queries[number].T, EPS)


class _Claims(torch.autograd.Function):
    """Claims of m later reads on a state, their tallies, the state, whose gradient joins the sum, and its scores.

    ``queries`` is [D, m]. Reads take the scores as constants; only gradients of gradients come back for them.
    """

    @staticmethod
    def forward(ctx: Any, queries: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        project = operators.project if operators.uses_kernels(x) else plain.project
        scores, inverse = project(x, queries, EPS)
        ctx.save_for_backward(queries, x, scores, inverse)
        ctx.set_materialize_grads(False)
        reads, lead = queries.shape[1], x.shape[:-1]
        claims = x.new_empty_strided((reads, *x.shape), [0] * (1 + x.dim())).unbind()  # one element
        tallies = scores.new_empty_strided((reads, 3, *lead), [0] * (1 + x.dim())).unbind()
        return (*claims, *tallies, x.view_as(x), scores)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        queries, x, scores, inverse = ctx.saved_tensors
        reads = queries.shape[1]
        of_reads, of_tallies, other, of_scores = grads[:reads], grads[reads : 2 * reads], *grads[2 * reads :]
        added = [] if other is None else [other]
        like = next((grad for grad in of_reads if grad is not None), None)
        if like is None and of_scores is None:
            return None, other
        given = [] if like is None else [torch.zeros_like(like) if grad is None else grad for grad in of_reads]
        tallies = _stacked(of_tallies) if given else None
        if torch.is_grad_enabled():  # with create_graph=True
            return _differentiable(given, tallies, x, queries, of_scores, added)
        by_kernels = operators.uses_kernels(x)
        if tallies is not None:
            if by_kernels:
                dx, found = operators.gather_attended(given, x, scores, tallies, added)
            else:
                shares, mean = _shares(scores, tallies)
                dx, _, dots = plain.combine_with_token_dots(given, x, None, shares, added)
                found = shares * (dots - mean)
            of_scores, added = found if of_scores is None else found + of_scores, [dx]
        assert of_scores is not None
        backward = operators.project_backward if by_kernels else plain.project_backward
        dx, of_queries = backward(of_scores, x, queries, scores, inverse, added[0] if added else None)
        return of_queries.T, dx


def _stacked(tallies: Sequence[Tensor | None]) -> Tensor:
    """[m, 3, ...]; of a read that has no gradient, one that makes its weight 0."""
    like = next(tally for tally in tallies if tally is not None)
    if any(tally is None for tally in tallies):
        none = torch.stack([like.new_full(like.shape[1:], value) for value in (torch.inf, 1.0, 0.0)])
        tallies = [none if tally is None else tally for tally in tallies]
    return torch.stack(tallies)  # type: ignore[arg-type]


def _shares(scores: Tensor, tallies: Tensor) -> tuple[Tensor, Tensor]:
    """``a_ti`` and ``e_t`` of a state's m reads, [..., m]."""
    largest, divisor, mean = tallies.unbind(1)  # [m, ...]
    shares = (scores.movedim(-1, 0) - largest).exp() / divisor
    return shares.movedim(0, -1), mean.movedim(0, -1)


def _differentiable(
    grads: Sequence[Tensor],
    tallies: Tensor | None,
    x: Tensor,
    queries: Tensor,
    of_scores: Tensor | None,
    added: Sequence[Tensor],
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients by operations that autograd knows."""
    of_all, terms = [] if of_scores is None else [of_scores], list(added)
    if tallies is not None:
        shares, mean = _shares(project_normed(x, queries, EPS), tallies)
        given = torch.stack(list(grads), -2).to(shares.dtype)  # [..., m, D]
        of_all.append(shares * ((given * x.unsqueeze(-2)).sum(-1) - mean))
        terms.append((shares.unsqueeze(-1) * given).sum(-2).to(x.dtype))
    found = functools.reduce(torch.add, of_all)
    of_x, of_queries = gradients(lambda x, queries: project_normed(x, queries, EPS), (x, queries), found)
    terms += [] if of_x is None else [of_x]
    return of_queries, functools.reduce(torch.add, terms) if terms else None
