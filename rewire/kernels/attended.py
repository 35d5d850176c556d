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

In blocks (see `blocks.Blocks`), the reads of a block begin together, as in online softmax: of all states before it,
``y_t = sum_i exp(s_ti - m) x_i`` in float32, m being the largest score so far. Each read then takes y_t as one more
state, whose numerator is ``exp(m - m_t)``.

In groups, a state is the sum of what several units left, and reads before that is complete have it as far as it has
come: one state more, of no other read. Gradients of a group's reads then come together, for all states that there are
when it begins, which hand themselves on to the next group: few gradients wait at a time, as few states are held.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rewire.kernels import operators
from rewire.kernels.blocks import BLOCK, Blocks
from rewire.kernels.claims import added_up, gathered, present, stand_ins
from rewire.kernels.history import parts, suffixes
from rewire.kernels.mix import Attended, Mix, pending_mix, softmax
from rewire.kernels.scored import ScoredHistory
from rewire.kernels.tokens import outside_autocast, read_off

EPS = 1e-6  # of the norm


class AttendedTable:
    """Queries of reads in turn: read t = 1, 2, .. is of the t states so far, the first of one state, without a query.

    Args:
        queries: w, float32 [T, D], of the reads 2 to T + 1: the first of them is of two states.
        scaled: whether the weights of n states add up to n, not to 1.
        block: as in `Blocks`; by default what `blocks.best_block` says, and no blocks where there are no kernels.
        group: reads until there is another state.

    Attributes:
        blocks: how the reads that have a query are arranged.
        queries: of each state those of the reads that have it, [m, D].
        alone: in groups, of each read its own, [1, D].
        scaled: as above.
        sources: that a read has, on average.
    """

    def __init__(self, queries: Tensor, scaled: bool, block: int | None = None, group: int = 1) -> None:
        self.blocks = Blocks.of(queries, len(queries), 2, block, group)
        self.queries = suffixes(queries, [self.blocks.first_mix(state) for state in range(self.blocks.states)])
        self.alone = parts(queries, [1] * len(queries)) if group > 1 else ()
        self.scaled, self.sources = scaled, self.blocks.sources


class AttendedHistory(ScoredHistory):
    """The states of a trunk so far, each with the scores of its later reads. Immutable.

    Attributes:
        claims: for each state, or block of them, the first read with a query that claims it; the claims of that read
            and those that follow; and for each of these reads a tensor [3, ...] whose values mean nothing, and whose
            gradient is what the states' gradients need to know of the read, ``(m_t, d_t, e_t)``: its *tally*.
        waiting: the states of the present block as later reads see them, each with its scores for these; in groups, of
            each state the scores of the present group's reads, those of the next group's, ..
        begun: for each read of the present block the sum that it begins with, and m and the sum of the numerators.
    """

    __slots__ = ()

    table: AttendedTable  # type: ignore[assignment]
    claims: tuple[tuple[int, tuple[Tensor, ...], tuple[Tensor, ...]], ...] | None  # type: ignore[assignment]
    waiting: tuple[tuple[Tensor, ...], ...]  # type: ignore[assignment]
    begun: dict[int, tuple[Tensor, Tensor]]

    def _claimed(self, x: Tensor, begin: bool) -> AttendedHistory:
        assert self.claims is not None
        if self.table.blocks.group > 1:
            return self._next_group(x)
        blocks, number, claims, waiting = self.table.blocks, len(self.states), self.claims, self.waiting
        first, near, later = blocks.first_mix(number), blocks.near(number), blocks.later(number)
        scores, x = self._scored(number, x)
        of_near, of_later = scores.split([near, later], -1) if near and later else (scores, scores)
        again = x
        if near:
            # Twice: what comes back from later blocks is added here, too.
            found = _Claims.apply(2, 1, of_near, x)
            claims, (x, again) = (*claims, (first, found[:near], found[near:-2])), found[-2:]
        if later:
            waiting = (*waiting, (again, of_later))
            if len(waiting) == blocks.block:
                states, of_states = zip(*waiting, strict=True)
                found = _Claims.apply(0, len(states), *of_states, *states)
                claims, waiting = (*claims, (first, found[:later], found[later:])), ()
        history = AttendedHistory(
            self.table, (*self.states, x), (*self.values, x.detach()), claims, (*self.scores, scores)
        )
        history.waiting, history.begun = waiting, self.begun
        return history._begin(begin)

    def _next_group(self, x: Tensor) -> AttendedHistory:
        """The history with a further state, whose reads come until there is another."""
        blocks, number = self.table.blocks, len(self.states)
        scores, x = self._scored(number, x)
        starts = [*map(blocks.first_mix, range(number, blocks.states)), blocks.mixes]
        reads, *_ = sizes = [end - start for start, end in itertools.pairwise(starts)]
        waiting = (*(of_groups[1:] for of_groups in self.waiting), scores.split(sizes, -1))
        own = tuple([of_groups[0] for of_groups in waiting])
        found = _Claims.apply(1, number + 1, *own, *self.states, x)
        claims, tallies, states = found[:reads], found[reads : 2 * reads], found[2 * reads :]
        history = AttendedHistory(self.table, states, (*self.values, x.detach()), ((starts[0], claims, tallies),), own)
        history.waiting = waiting
        return history

    def read(self, number: int) -> Sequence[Tensor | Mix]:
        """The sum of read ``number``, from 0."""
        return [self.states[0] if number == 0 else self._read(number - 1, self._columns(number - 1))]

    def read_with(self, number: int, x: Tensor) -> tuple[Tensor | Mix, Tensor]:
        """`read`, of one state more, which no other read has; and that state, as who reads it next is to take it."""
        query = number - 1
        with outside_autocast(x.device):
            scores, x = read_off(x, self.table.alone[query].T, EPS)
            if self._left_to_autograd(x):
                known = self._without_claims(self.states)
                states, claims = (*known.states, x), None
            else:
                claim, tally, x = _Claims.apply(1, 1, scores, x)
                known, states, claims = self, (*self.states, x), (*self.claims, (query, (claim,), (tally,)))  # type: ignore[misc]
        with_x = AttendedHistory(self.table, states, (*self.values, x.detach()), claims, (*known.scores, scores))
        return with_x._read(query, [*self._columns(query), 0]), x

    def _columns(self, query: int) -> list[int]:
        """Of each state the place of that query among those that it has scores of."""
        count, first = len(self.states), self.table.blocks.first_mix
        if self.table.blocks.group > 1 and self.claims is not None:
            return [query - first(count - 1)] * count
        return [query - first(i) for i in range(count)]

    def _read(self, query: int, columns: Sequence[int]) -> Mix:
        if self.claims is None:
            own = [scores.select(-1, k) for scores, k in zip(self.scores, columns, strict=True)]
            shares, _ = softmax(torch.stack(own), self.table.scaled)
            return pending_mix(self.states, None, scores=shares.unsqueeze(-1).unbind())
        with torch.no_grad():  # not as a decorator, which torch.compile cannot follow here
            values, shares, statistics = self._shares(columns, self.begun.get(query))
        of_read = [
            (of[query - first], tally[query - first]) for first, of, tally in self.claims if query - first < len(of)
        ]
        claims, tallies = zip(*of_read, strict=True)
        attended = Attended(statistics, self.values, self.scores, columns, self.table.scaled)
        return Mix(values, None, shares.unsqueeze(-1).unbind(), claims=claims, attended=attended, tallies=tallies)

    def _shares(
        self, columns: Sequence[int], begun: tuple[Tensor, Tensor] | None
    ) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
        """What a read adds up, [..., D] each; with which weights, [n, ...]; and the statistics of its softmax."""
        if not operators.uses_kernels(self.values[0]):
            own = [scores.select(-1, k) for scores, k in zip(self.scores, columns, strict=True)]
            return (self.values, *softmax(torch.stack(own), self.table.scaled))
        before = 0 if begun is None else self.table.blocks.before(columns[0])
        own = [scores.select(-1, k) for scores, k in zip(self.scores[before:], columns[before:], strict=True)]
        total, statistics = begun or (None, None)
        count = len(columns) if self.table.scaled else 1
        return (*([] if total is None else [total]), *self.values[before:]), *operators.softmax(own, statistics, count)

    def _sums(self, reads: range) -> dict[int, tuple[Tensor, Tensor]]:
        first = self.table.blocks.first_mix
        of_states = [
            scores.narrow(-1, reads.start - first(i), len(reads)).movedim(-1, 0) for i, scores in enumerate(self.scores)
        ]
        numerators, statistics = operators.softmax(of_states, None, 0)  # [n, B, ...], [2, B, ...]
        totals = operators.mixes(self.values, None, numerators.movedim((1, 0), (-2, -1)))
        return dict(zip(reads, zip(totals, statistics.unbind(1), strict=True), strict=True))

    def _scored(self, number: int, x: Tensor) -> tuple[Tensor, Tensor]:
        return read_off(x, self.table.queries[number].T, EPS)


class _Claims(torch.autograd.Function):
    """Claims of N later reads on M states, their tallies, and ``through`` times the states themselves: once, if M > 1.

    ``tensors`` are the scores of each state, [..., N], and then the states, [..., D].
    """

    @staticmethod
    def forward(ctx: Any, through: int, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        scores, states = tensors[0], tensors[-count:]
        x, ctx.states, ctx.reads = states[0], count, scores.shape[-1]
        claims, tallies = stand_ins(x, x.shape, ctx.reads), stand_ins(scores, (3, *x.shape[:-1]), ctx.reads)
        return (*claims, *tallies, *[x.view_as(x) for x in states for _ in range(through)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        tensors, reads = ctx.saved_tensors, ctx.reads
        scores, states = tensors[: ctx.states], tensors[ctx.states :]
        given, carried = present(grads[:reads]), grads[2 * reads :]
        if not given:
            of_states = [added_up([grad for grad in carried if grad is not None])] if len(states) == 1 else carried
            return (None, None, *[None] * len(scores), *(of_states or [None] * len(states)))
        added = [grad for grad in carried if grad is not None]
        if len(states) > 1 and added:
            added = [torch.zeros_like(x) if grad is None else grad for x, grad in zip(states, carried, strict=True)]
        tallies = _complete(grads[reads : 2 * reads])
        if operators.uses_kernels(states[0]) and not torch.is_grad_enabled():
            return (None, None, *_gradients_by_kernels(given, states, scores, tallies, added))
        logits = torch.stack(scores, -2)  # [..., M, N]
        largest, divisor, mean = torch.stack(tallies).movedim(0, -1).unsqueeze(-2).unbind(0)  # [..., 1, N]
        shares = (logits - largest).exp() / divisor
        dx, _, dots = gathered(given, states, None, shares, added)
        assert dots is not None
        return (None, None, *(shares * (dots - mean)).unbind(-2), *dx)


def _gradients_by_kernels(
    grads: Sequence[Tensor],
    states: Sequence[Tensor],
    scores: Sequence[Tensor],
    tallies: Sequence[Tensor],
    added: Sequence[Tensor],
) -> list[Tensor]:
    """Gradients of the scores of each state, and of the states."""
    of_scores: list[Tensor] = []  # not list[Tensor](), which Dynamo does not know
    of_states: list[Tensor] = []
    for first in range(0, len(states), BLOCK):
        some = slice(first, first + BLOCK)
        theirs = added if len(states) == 1 else added[some]
        *found, dots = operators.gather_attended(grads, states[some], scores[some], tallies, theirs)
        of_scores, of_states = [*of_scores, *dots.unbind(-2)], [*of_states, *found]
    return [*of_scores, *of_states]


def _complete(tallies: Sequence[Tensor | None]) -> list[Tensor]:
    """Of a read that has no gradient, one that makes its weight 0."""
    known = [tally for tally in tallies if tally is not None]
    if len(known) == len(tallies):
        return known
    none = torch.stack([torch.full_like(known[0][0], value) for value in (torch.inf, 1.0, 0.0)])
    return [none if tally is None else tally for tally in tallies]
