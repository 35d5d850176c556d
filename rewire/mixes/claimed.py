"""States that all later sites mix, with backward passes that read each tensor as rarely as possible.

A site adds up ``w_si x_i`` over all states so far. With plain autograd, each site would read its states again in
backward, write a gradient for each of them, and add it to those of the other sites: five passes over memory for each
pair of a site and a state. Here it is one.

Think of the scaling ``w_si x_i`` as a separate operation whose result is never stored: the *claim* of site s on state
i. Each term of a sum has the gradient of the sum, so a claim gets the site's gradient g_s: nothing is computed or
copied. The scaling's own gradients, ``dx_i = sum_s w_si g_s`` and ``dw_si = <x_i, g_s>``, come in one pass once all
later sites are done: the transposed mix. All of this is ordinary autograd, and so works with checkpointing,
``retain_graph``, gradients of gradients, and any order of forwards and backwards.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from rewire.kernels import operators, switch
from rewire.kernels.sums.spec import MAX_OUTPUTS
from rewire.mixes.again import sparing
from rewire.mixes.autograd import left_to_autograd, under_transforms
from rewire.mixes.blocks import Blocks
from rewire.mixes.by_state import ByState, first_mixes, parts
from rewire.mixes.claims import claim, claimed_mixes
from rewire.mixes.history import Free, History, Row, Scores
from rewire.mixes.mix import Mix
from rewire.mixes.tokens import read_off_apart

#: How often a source with one weight counts in comparisons with `plain.WORTHWHILE`: measured on a CPU, the compiled
#: loop beats torch from an eighth of the elements on.
_WORTH = 8


class Table(Free):
    """Weights of successive reads, each of all states so far. A read has one or more *ways*; a *mix* is one of them.

    With queries, ``relu(w . x_i)`` is added to the weight of state x_i, for each token (GRN-v3). As this depends only
    on the state, it is projected once for all later reads.

    Args:
        flat: b, float32 [K] or [K, D]: for each read, for each of its ways, one entry for each of its states.
        ways: number of ways of each read; or an int, the number of reads with one way each.
        first, group: as in `Blocks`.
        block: as in `Blocks`; by default `best_block`, and no blocks without kernels or with several ways.
        queries: w, float32 [S, D]: one row for each way of each read.

    Attributes:
        blocks: how the reads are arranged.
        first: for each read, the number of its first mix; then the number of mixes.
        rows: for each read its weights, [ways, n] or [ways, n, D].
        begun, rest: the same, flat and detached: weights of the states before its block of reads, and of the others.
        by_state: the weights by state, with gradients, for the claims.
        starts: with queries, for each state the first mix that reads it.
        queries: for each state, the queries of the mixes that read it, [m, D]; empty without queries.
        own: in groups, for each read its own queries, [ways, D], for a state that only it reads.
        worth: how often a source counts when deciding whether its sums are worth hand-written gradients.
    """

    def __init__(
        self,
        flat: Tensor,
        ways: int | Sequence[int],
        first: int = 1,
        block: int | None = None,
        group: int = 1,
        queries: Tensor | None = None,
    ) -> None:
        ways = [1] * ways if isinstance(ways, int) else ways
        self.blocks = blocks = Blocks.of(flat, len(ways), first, block, group, max(ways))
        self.first = first_mixes(ways)
        counts = [blocks.count(number) for number in range(len(ways))]
        rows = parts(flat, [way * n for way, n in zip(ways, counts, strict=True)])
        self.rows = [row.unflatten(0, (way, -1)) for row, way in zip(rows, ways, strict=True)]
        before = [blocks.before(number) for number in range(len(ways))]
        halves = [(way * n, way * (all_ - n)) for way, n, all_ in zip(ways, before, counts, strict=True)]
        pieces = flat.detach().split([*itertools.chain.from_iterable(halves)])
        self.begun, self.rest = pieces[::2], pieces[1::2]
        self.by_state = ByState.of(flat, blocks, ways)
        self.worth = _WORTH if flat.dim() == 1 and queries is None else 1
        self._ask(queries, ways)

    def __getitem__(self, t: int) -> Row:
        """The weights of read t, whose states are ``x_0 .. x_{t-1}``, for `History.mix`."""
        return Row(self, t - self.blocks.first)

    def _ask(self, queries: Tensor | None, ways: Sequence[int]) -> None:
        """Set the queries, if there are any, ordered by state."""
        blocks = self.blocks
        if queries is not None:
            self.starts = [self.first[blocks.first_mix(state)] for state in range(blocks.states)]
            self.queries = suffixes(queries, self.starts)
            if blocks.group > 1:
                self.own = parts(queries, list(ways))

    def history(self) -> History:
        return ClaimedHistory(self)


def suffixes(x: Tensor, starts: Sequence[int]) -> tuple[Tensor, ...]:
    """``x[start:]`` for each start; their gradients are added up at once, or as torch.compile does it."""
    if under_transforms() or torch.compiler.is_compiling():
        return tuple([x[start:] for start in starts])
    found: tuple[Tensor, ...] = _Suffixes.apply(x, tuple(starts))
    return found


class _Suffixes(torch.autograd.Function):
    """Adds up gradients in one tensor; autograd would make one as large as ``x`` for each suffix, and add these."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, starts: tuple[int, ...]) -> tuple[Tensor, ...]:
        ctx.starts, ctx.shape = starts, x.shape
        ctx.set_materialize_grads(False)
        return tuple([x[start:] for start in starts])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        given = [(start, grad) for start, grad in zip(ctx.starts, grads, strict=True) if grad is not None]
        if not given:
            return None, None
        none = given[0][1].new_zeros(ctx.shape)
        padded = torch.cat([part for start, grad in given for part in (none[:start], grad)])
        return padded.view(len(given), *ctx.shape).sum(0), None


class Claimed(NamedTuple):
    """Claims of successive mixes, on one state or several.

    Attributes:
        first: number of the first of these mixes.
        claims: one for each mix.
        tallies: one for each mix if the weights are a softmax: see `attended`.
    """

    first: int
    claims: tuple[Tensor, ...]
    tallies: tuple[Tensor, ...] = ()


class ClaimedHistory(History):
    """A history whose states gather their gradients: see the module's docstring.

    In blocks of B (see `Blocks`), kernels read all earlier states once for the next B mixes, and all later gradients
    once for several states: L^2 / 2 reads become about L^1.5.

    In groups, the mixes of a group, or of a span of it, claim all complete states together, and these are passed on to
    the next ones. So only few gradients and states are held at a time.

    If a state cannot be claimed, the history goes on as one that is left to autograd.

    Attributes:
        states: as in any history; gradients of other uses of a state are added in the same pass as those of claims.
        values: the states, detached.
        claims: the claims on each state, or on several together.
        scores: in groups, the scores for the present span.
        waiting: the states of the present block for later blocks of mixes, each with its scores for these: their
            gradients come together. In groups, the scores of each state for each span.
        begun: for each mix of the present block, its sum over all states before that block.
        before: for a read inside a group, the history without the newest state.
    """

    __slots__ = ("before", "begun", "claims", "values", "waiting")

    by_autograd: ClassVar[type[History]] = History
    constant_scores: ClassVar[bool] = True  #: Whether reads detach scores, whose gradients the claims compute.

    def __init__(
        self,
        table: Any,
        states: tuple[Tensor, ...] = (),
        values: tuple[Tensor, ...] = (),
        claims: tuple[Claimed, ...] = (),
        scores: Scores = (),
        waiting: tuple[tuple[Tensor, ...], ...] = (),
        begun: dict[int, Any] | None = None,
    ) -> None:
        super().__init__(table, states, scores)
        self.values, self.claims, self.waiting, self.begun = values, claims, waiting, begun or {}
        self.before: ClaimedHistory | None = None

    @property
    def kept(self) -> History:
        return self if self.before is None else self.before

    def _ways(self, number: int) -> Sequence[Tensor | Mix]:
        table, first = self.table, self.table.first[number]
        rows, scores = table.rows[number], self._scores_of(number)
        ways, count = rows.shape[:2]
        by_torch = len(scores) == 0 and torch.compiler.is_compiling() and not switch.opaque(self.states[0])
        if by_torch:
            return super()._ways(number)
        of_read = self._claims_of(first)
        claims = [tuple([of.claims[first - of.first + way] for of in of_read]) for way in range(ways)]
        weights, accumulator = table.rest[number], self.begun.get(number)
        if ways == 1:
            if accumulator is None and table.begun[number].shape[0]:
                weights = torch.cat((table.begun[number], weights))
            begun = count - weights.shape[0]
            values = self.values[begun:count]
            return [Mix(values, weights if values else None, scores[begun:], (), claims[0], accumulator)]
        weights = weights.unflatten(0, (ways, -1))
        if scores and ways <= MAX_OUTPUTS and switch.uses_kernels(self.values[0]):
            with sparing(self.values[0]):
                each = [*itertools.chain.from_iterable(claims)]
                return claimed_mixes(self.values, weights, scores, len(claims[0]), each)
        of_ways = zip(*[of_state.split(1, -1) for of_state in scores], strict=True) if scores else [()] * ways
        return [Mix(self.values, row, own, (), of) for row, own, of in zip(weights, of_ways, claims, strict=True)]

    def _places(self, number: int) -> list[int]:
        if self.table.blocks.group == 1:
            return super()._places(number)
        # Scores and the first claims are those of the span.
        joined, place = self.table.blocks.joined(number), self.table.first[number] - self.claims[0].first
        return [place] * (len(self.states) - joined) + [0] * joined

    def push(self, x: Tensor, begin: bool = True) -> History:
        if self._left_to_autograd(x):
            return self._without_claims((*self.states, x))
        if len(self.states) >= self.table.blocks.states:  # no mix reads it
            return self._with(x, None, self.claims, self.waiting)
        return self._next_group(x) if self.table.blocks.group > 1 else self._next(x)._begin(begin)

    def _next(self, x: Tensor) -> Self:
        """The history with a further state, which near mixes claim by itself, and later ones with its block."""
        table, blocks, number, claims = self.table, self.table.blocks, len(self.states), self.claims
        read, waiting = blocks.first_mix(number), self.waiting
        first, end, stop = table.first[read], table.first[read + blocks.near(number)], table.first[-1]
        scores, near, later, x = self._scored_apart(number, end - first, x)
        again = x
        if end > first:
            # Twice, so that gradients from later blocks are added here, rather than earlier to those of other uses.
            claimed, (x, again) = self._claim(first, 2, table.by_state.near[number], near, (x,))
            claims = (*claims, claimed)
        if stop > end:
            waiting = (*waiting, (again, *later))
            if len(waiting) == blocks.gathered:
                states, *of_states = zip(*waiting, strict=True)
                weights, scored = table.by_state.later[number // blocks.gathered], of_states[0] if of_states else ()
                claimed, _ = self._claim(end, 0, weights, scored, states)
                claims, waiting = (*claims, claimed), ()
        return self._with(x, scores, claims, waiting)

    def _next_group(self, x: Tensor) -> Self:
        """The history with a further state, which all reads of the next group have."""
        table, number = self.table, len(self.states)
        blocks = table.blocks
        scores, x = self._scored(number, x)
        spans = blocks.spans()[number * blocks.spans_of_group :]
        sizes = [table.first[reads.stop] - table.first[reads.start] for reads in spans]
        waiting = self.waiting if scores is None else (*self.waiting, scores.split(sizes, -1))
        history = type(self)(table, (*self.states, x), (*self.values, x.detach()), (), (), waiting)
        return history._next_span(blocks.first_mix(number))

    def _next_span(self, number: int) -> Self:
        """The history with claims of the mixes in the span of read ``number``."""
        table, blocks = self.table, self.table.blocks
        span, of_group = blocks.span_of(number), blocks.spans_of_group
        own = tuple([of[span - state * of_group] for state, of in enumerate(self.waiting)])
        first = table.first[blocks.spans()[span].start]
        claimed, states = self._claim(first, 1, table.by_state.spans[span], own, self.states)
        return type(self)(table, states, self.values, (claimed,), tuple(map(self._kept, own)), self.waiting)

    def _joined(self, number: int, x: Tensor) -> History:
        table, before = self.table, self
        if not self._claims_of(table.first[number]):
            before = self._next_span(number)
        if self._left_to_autograd(x):
            return before._without_claims(before.states)._joined(number, x)
        scores, x = self._scored(number, x, alone=True)
        of_read = () if scores is None else (scores,)
        claimed, (x,) = self._claim(table.first[number], 1, table.by_state.joined[number], of_read, (x,))
        history = before._with(x, scores, (*before.claims, claimed), before.waiting)
        history.joined, history.before = True, before
        return history

    def _left_to_autograd(self, x: Tensor) -> bool:
        """Whether mixes with a further state x are left to autograd."""
        another_shape = len(self.states) > 0 and x.shape != self.states[0].shape
        static = not self._asks  # weights per token are fused with their computation
        return another_shape or left_to_autograd(x, self.table.blocks.sources * self.table.worth, static)

    def _none(self) -> History:
        return self.by_autograd(self.table)

    def _scored_apart(self, number: int, near: int, x: Tensor) -> tuple[Tensor | None, Scores, Scores, Tensor]:
        """`_scored`, also with the scores of the first ``near`` queries and of the others: see `read_off_apart`."""
        if not self._asks:
            return None, (), (), x
        queries = self.table.queries[number].T
        (scores, first, others), x = read_off_apart(x, queries, near, self.norm_eps, self.clamped)
        return scores, (first,), (others,), x

    def _claim(
        self, first: int, through: int, weights: Any, scores: Sequence[Tensor], states: Sequence[Tensor]
    ) -> tuple[Claimed, tuple[Tensor, ...]]:
        """Claims of the mixes from ``first`` on, and the states, each ``through`` times."""
        found = claim(through, len(states), weights, [*scores, *states])
        mixes = len(found) - through * len(states)
        return Claimed(first, tuple(found[:mixes])), tuple(found[mixes:])

    def _claims_of(self, mix: int) -> list[Claimed]:
        """The entries of ``claims`` that have one of this mix."""
        return [of for of in self.claims if 0 <= mix - of.first < len(of.claims)]

    def _with(self, x: Tensor, scores: Tensor | None, claims: tuple[Claimed, ...], waiting: tuple[Any, ...]) -> Self:
        """The history with one more state."""
        known = self.scores if scores is None else (*self.scores, self._kept(scores))
        values = (*self.values, x.detach())
        return type(self)(self.table, (*self.states, x), values, claims, known, waiting, self.begun)

    def _kept(self, scores: Tensor) -> Tensor:
        return scores.detach() if self.constant_scores else scores

    def _begin(self, begin: bool) -> Self:
        """The history, with the begun sums of the next block of mixes if that starts now."""
        mixes = self.table.blocks.beginning(len(self.states))
        if begin and mixes and switch.uses_kernels(self.states[0]):
            with torch.no_grad():  # not as a decorator, which torch.compile cannot follow here
                self.begun = self._sums(mixes)
        return self

    def _sums(self, reads: range) -> dict[int, Any]:
        """For each of these reads, of one way, its sum over all states so far."""
        rows = torch.stack(self.table.begun[reads.start : reads.stop])
        of_states = zip(self.scores, self._places(reads.start), strict=True) if self.scores else ()
        scores = [s.narrow(-1, k, len(reads)) for s, k in of_states]
        return dict(zip(reads, operators.mixes(self.values, rows, scores, (), (), torch.float32), strict=True))
