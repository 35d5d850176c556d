"""States over which all later reads attend: the weights are a softmax of scores of the states (Attention Residuals).

Read t is ``r_t = sum_i a_ti x_i`` with ``a_ti = exp(s_ti - m_t) / d_t`` and ``s_ti = w_t . rmsnorm(x_i)``: m_t is the
largest of these scores, d_t the sum of the numerators, or their mean if the weights of n states are to add up to n.
For a state's gradient, one number per token sums up the other states, as in FlashAttention-2 (arXiv 2307.08691,
section 3.1.2). With g_t, the gradient of r_t,

    dx_i = sum_t a_ti g_t + the gradient of ds_ti through the product and the norm
    ds_ti = a_ti (<x_i, g_t> - e_t)
    e_t = sum_j a_tj <x_j, g_t> / n_t = <r_t, g_t> / n_t

where n_t is the sum of the weights. So a state's gradient, as in `claimed`, takes one pass over the state and the
gradients of its reads, once these are done, and a read's own backward needs only ``r_t`` and ``g_t``.

In blocks (see `blocks.Blocks`), the sums of a block's reads are begun together over all states before the block, as in
online softmax: ``y_t = sum_i exp(s_ti - m) x_i`` in float32, with m the largest score so far. Each read then takes y_t
as one more state, with numerator ``exp(m - m_t)``.

In groups, a state is the sum of several units' outputs, and reads inside the group see the sum so far as one more
state, which no other read has. Gradients of a group's reads come together, for all states that exist when it begins;
these are passed on to the next group. So only few gradients and states are held at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rewire.kernels import operators, switch
from rewire.mixes.autograd import by_product, by_torch
from rewire.mixes.blocks import BLOCK, Blocks
from rewire.mixes.by_state import ByState, first_mixes
from rewire.mixes.claimed import Claimed, ClaimedHistory, Table
from rewire.mixes.claims import gathered, joining, present, stand_ins, unclaimed
from rewire.mixes.history import History, Row, Scores
from rewire.mixes.mix import Attended, Mix, pending_mix, softmax, summed_by_product
from rewire.mixes.tokens import inverse_rms
from rewire.mixes.traced import whole_in_graphs

EPS = 1e-6  # of the norm in scores


class AttendedTable(Table):
    """Queries of successive reads; read t is of the t states so far, and reads before ``first`` have no query.

    Args:
        queries: w, float32 [K, D], of the reads from ``first`` on.
        scaled: whether the weights of n states add up to n, not to 1.
        block: as in `Blocks`; by default `blocks.best_block`, and no blocks without kernels.
        group: number of reads until there is another state.
        ways: number of queries of each of these reads; by default one.
        normed: whether to append to the scores of a state also its inverse norm.
        rank: number of channels that scores use, the last ones; None: all.
        only_scores: whether the weights are another function of the scores (`AttendedHistory.scores_of`) than one
            softmax over all states: then mixes are left to autograd.
        first: the t of the first read that has a query, 2 or more.

    Attributes:
        blocks: how the reads are arranged.
        first: for each read, the number of its first query; the first read has none.
        starts: for each state, the number of the first query of a read that has it.
        queries: for each state, the queries of the reads that have it, [m, D].
        own: for each read, its queries, [ways, D].
        by_state: None: all weights come from scores.
        scaled, normed, only_scores, rank: the arguments.
    """

    def __init__(
        self,
        queries: Tensor,
        scaled: bool = False,
        block: int | None = None,
        group: int = 1,
        ways: Sequence[int] | None = None,
        normed: bool = False,
        only_scores: bool = False,
        rank: int | None = None,
        first: int = 2,
    ) -> None:
        of_reads = [0, *([1] * len(queries) if ways is None else ways)]
        self.blocks = Blocks.of(queries, len(of_reads), first - 1, block, group)
        self.first = first_mixes(of_reads)
        self._ask(queries, of_reads)
        self.by_state = ByState(*[(None,) * max(len(of_reads), self.blocks.states)] * 4)
        self.scaled, self.normed, self.only_scores = scaled, normed, only_scores
        self.rank = rank

    def history(self) -> AttendedHistory:
        return AttendedHistory(self) if self.only_scores else ClaimedAttendedHistory(self)


class AttendedHistory(History):
    """The states of a trunk so far, each with the scores of its later reads."""

    __slots__ = ()

    norm_eps, clamped = EPS, False

    def _ways(self, number: int) -> Sequence[Tensor | Mix]:
        if number == 0:
            return [self.states[0]]
        shares, _ = softmax(self._stacked(number), self.table.scaled)
        if by_product(self.states[0]):
            return [summed_by_product(self.states, shares.squeeze(-1).movedim(0, -1))]
        return [pending_mix(self.states, None, scores=shares.unbind())]

    def scores_of(self, row: Row) -> Tensor:
        """``w_t . rmsnorm(x_i)`` for each state x_i and each of the read's queries w_t, [n, ..., ways]."""
        return self._stacked(row.number)

    @property
    def inverse_norms(self) -> Tensor:
        """The factor ``1 / rms`` of each state's rmsnorm, [n, ..., 1]; only with ``normed``."""
        return torch.stack([scores[..., -1:] for scores in self.scores])

    def _stacked(self, number: int) -> Tensor:
        return torch.stack(self._scores_of(number))

    def _scored(self, number: int, x: Tensor, alone: bool = False) -> tuple[Tensor | None, Tensor]:
        scores, read = super()._scored(number, self._keys(x), alone)
        x = read if self.table.rank is None else x
        if self.table.normed and scores is not None:
            scores = torch.cat([scores, inverse_rms(x, EPS)], -1)
        return scores, x

    def _keys(self, x: Tensor) -> Tensor:
        return x if self.table.rank is None else x[..., -self.table.rank :]


class ClaimedAttendedHistory(ClaimedHistory, AttendedHistory):
    """An `AttendedHistory` whose states gather their gradients.

    Attributes:
        claims: with a *tally* of each read: a tensor [3, ...] with arbitrary values, whose gradient is
            ``(m_t, d_t, e_t)``, which the states' gradients need.
        begun: for each read of the present block the sum with which it begins, m, and the sum of the numerators.
    """

    __slots__ = ()

    by_autograd = AttendedHistory
    constant_scores = False  # for gradients of gradients: the tallies depend on the scores

    table: AttendedTable

    def _ways(self, number: int) -> Sequence[Tensor | Mix]:
        if number == 0:
            return [self.states[0]]
        places, query = self._places(number), self.table.first[number]
        with torch.no_grad():  # not as a decorator, which torch.compile cannot follow here
            values, shares, statistics = self._shares(number, places)
        of_read = [(of.claims[query - of.first], of.tallies[query - of.first]) for of in self._claims_of(query)]
        claims, tallies = zip(*of_read, strict=True)
        attended = Attended(statistics, self.values, self.scores, places, self.table.scaled)
        return [Mix(values, None, shares.unsqueeze(-1).unbind(), claims=claims, attended=attended, tallies=tallies)]

    def _scored_apart(self, number: int, near: int, x: Tensor) -> tuple[Tensor | None, Scores, Scores, Tensor]:
        *scores, read = super()._scored_apart(number, near, self._keys(x))
        return *scores, read if self.table.rank is None else x  # type: ignore[return-value]

    def _shares(self, number: int, places: Sequence[int]) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
        """The tensors that a read adds up, [..., D] each; their weights, [n, ...]; the statistics of its softmax."""
        begun = self.begun.get(number)
        before = 0 if begun is None else self.table.blocks.before(number)
        own = [scores.select(-1, k) for scores, k in zip(self.scores[before:], places[before:], strict=True)]
        if not switch.uses_kernels(self.values[0]):
            return (self.values, *softmax(torch.stack(own), self.table.scaled))
        total, statistics = begun or (None, None)
        count = len(places) if self.table.scaled else 1
        return (*([] if total is None else [total]), *self.values[before:]), *operators.softmax(own, statistics, count)

    def _sums(self, mixes: range) -> dict[int, tuple[Tensor, Tensor]]:
        first = self._places(mixes.start)
        of_states = [s.narrow(-1, k, len(mixes)).movedim(-1, 0) for s, k in zip(self.scores, first, strict=True)]
        numerators, statistics = operators.softmax(of_states, None, 0)  # [n, B, ...], [2, B, ...]
        totals = operators.mixes(self.values, None, (numerators.movedim((1, 0), (-2, -1)),), (), (), torch.float32)
        return dict(zip(mixes, zip(totals, statistics.unbind(1), strict=True), strict=True))

    def _claim(
        self, first: int, through: int, weights: Any, scores: Sequence[Tensor], states: Sequence[Tensor]
    ) -> tuple[Claimed, tuple[Tensor, ...]]:
        found = claim_attended(through, len(states), [*scores, *states])
        n = scores[0].shape[-1]
        return Claimed(first, tuple(found[:n]), tuple(found[n : 2 * n])), tuple(found[2 * n :])


@whole_in_graphs
def claim_attended(through: int, count: int, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Claims of N later reads on M states, their tallies, and the states.

    Args:
        through: how often each state is returned (once if M > 1).
        count: M.
        tensors: the scores of each state, [..., N], and then the states, [..., D].
    """
    return list(_Claims.apply(through, count, *tensors))


class _Claims(torch.autograd.Function):
    """`claim_attended`."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, ...]:  # in one: see `claims._Claims`
        through, count, *tensors = given
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        scores, states = tensors[0], tensors[-count:]
        x, ctx.states, ctx.reads = states[0], count, scores.shape[-1]
        claims, tallies = stand_ins(x, x.shape, ctx.reads), stand_ins(scores, (3, *x.shape[:-1]), ctx.reads)
        # detach() is not a view to autograd, which forbids in-place writes to views among several results
        return (*claims, *tallies, *[x.detach() for x in states for _ in range(through)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        tensors, reads = ctx.saved_tensors, ctx.reads
        scores, states = tensors[: ctx.states], tensors[ctx.states :]
        given, carried = present(grads[:reads]), grads[2 * reads :]
        if not given:
            return (None, None, *[None] * len(scores), *unclaimed(states, carried))
        added = joining(states, carried)
        tallies = _complete(grads[reads : 2 * reads])
        if switch.uses_kernels(states[0]) and not by_torch(given[0]):
            return (None, None, *_gradients_by_kernels(given, states, scores, tallies, added))
        logits = torch.stack(scores, -2)  # [..., M, N]
        largest, divisor, mean = torch.stack(tallies).movedim(0, -1).unsqueeze(-2).unbind(0)  # [..., 1, N]
        shares = (logits - largest).exp() / divisor
        dx, _, dots = gathered(given, states, None, shares.unbind(-2), added)
        return (None, None, *(shares * (torch.stack(list(dots), -2) - mean)).unbind(-2), *dx)


def _gradients_by_kernels(
    grads: Sequence[Tensor],
    states: Sequence[Tensor],
    scores: Sequence[Tensor],
    tallies: Sequence[Tensor],
    added: Sequence[Tensor],
) -> list[Tensor]:
    """Gradients of each state's scores, then of the states."""
    of_scores: list[Tensor] = []  # not list[Tensor](), which Dynamo does not know
    of_states: list[Tensor] = []
    for first in range(0, len(states), BLOCK):
        some = slice(first, first + BLOCK)
        theirs = added if len(states) == 1 else added[some]
        *found, dots = operators.gather_attended(grads, states[some], scores[some], tallies, theirs)
        of_scores, of_states = [*of_scores, *dots.unbind(-2)], [*of_states, *found]
    return [*of_scores, *of_states]


def _complete(tallies: Sequence[Tensor | None]) -> list[Tensor]:
    """The tallies; a read without a gradient gets one that makes its weights 0."""
    known = [tally for tally in tallies if tally is not None]
    if len(known) == len(tallies):
        return known
    none = torch.stack([torch.full_like(known[0][0], value) for value in (torch.inf, 1.0, 0.0)])
    return [none if tally is None else tally for tally in tallies]
