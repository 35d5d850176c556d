"""States that all later reads mix with weights of which a part is computed from the state itself (GRN-v3, DCA).

Read t weighs state i with ``b_ti + relu(w_t . x_i)``. All that these weights depend on is known when the state is: it
is projected once, for all reads to come, and its claims (see `history`) are weighted with both parts. Reads of one way
begin in blocks. Backward is one pass over the state and the gradients of its reads, and one of the projection, which
adds up with it:

    dx_i = sum_t (b_ti + s_ti) g_t + sum_t ds_ti w_t        ds_ti = <x_i, g_t> where s_ti is not clamped, for each token
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from rewire.kernels import operators, switch
from rewire.kernels.sums.spec import MAX_OUTPUTS
from rewire.mixes.blocks import Blocks
from rewire.mixes.by_state import ByState, first_mixes, parts
from rewire.mixes.history import Free, History, Scores, suffixes
from rewire.mixes.mix import Mix, pending_mix
from rewire.mixes.several import mixes
from rewire.mixes.tokens import read_off, read_off_apart


class ScoredTable(Free):
    """Weights of reads in turn: read t = 1, 2, .. is of the t states so far, in one way or several.

    Args:
        flat: b, float32 [K] or [K, D]: for each read in turn, for each of its ways, one entry for each of its states.
        queries: w, float32 [S, D]: one row for each way of each read.
        ways: of each read in turn.
        group: reads until there is another state: see `Blocks`.

    Attributes:
        blocks: how reads are arranged; kernels begin them together where each has one way.
        rows: of each read, [ways, t] or [ways, t, D].
        constants: the same, detached.
        first: of each read, the number of its first mix. A mix is one way of a read.
        starts: of each state, the first mix that reads it.
        by_state: b, for the claims.
        queries: of each state, w of the mixes that read it, [m, D].
        own: of each read, its own, [ways, D]; where it may have a state alone, in groups.
    """

    def __init__(self, flat: Tensor, queries: Tensor, ways: Sequence[int], group: int = 1) -> None:
        blocks = Blocks.of(flat, len(ways), 1, group=group, ways=max(ways))
        if max(ways) > 1:  # what is begun would move more than it saves
            blocks = blocks._replace(block=len(ways) + 1)
        self.blocks = blocks
        self.first = first_mixes(ways)
        rows = parts(flat, [way * blocks.count(number) for number, way in enumerate(ways)])
        self.rows = [row.unflatten(0, (way, -1)) for row, way in zip(rows, ways, strict=True)]
        self.constants = [row.detach() for row in self.rows]
        self.by_state = ByState.of(flat, blocks, ways)
        self.starts = [self.first[blocks.first_mix(state)] for state in range(blocks.states)]
        self.queries = suffixes(queries, self.starts)
        self.own = parts(queries, list(ways)) if group > 1 else ()

    def history(self) -> ScoredHistory:
        return ScoredHistory(self)


class ScoredHistory(History):
    """The states of a trunk so far, each with the scores of its later reads. Immutable."""

    __slots__ = ()

    norm_eps: ClassVar[float | None] = None  # of a norm before the projection
    clamped: ClassVar[bool] = True

    table: ScoredTable

    def _ways(self, number: int) -> Sequence[Tensor | Mix]:
        table, first = self.table, self.table.first[number]
        rows, places = table.rows[number], self._places(number)
        ways = len(rows)
        scores = [s.narrow(-1, k, ways) for s, k in zip(self.scores, places, strict=True)]  # of each state, [..., ways]
        if self.claims is None:
            if ways == 1:
                return [pending_mix(self.states, rows[0], scores=scores)]
            return mixes(self.states, rows, torch.stack(scores, -1))[0]
        rows, begun = table.constants[number], self.begun.get(number)
        of_read = self._claims_of(first)
        claims = [tuple([of.claims[first - of.first + way] for of in of_read]) for way in range(ways)]
        if begun is not None:
            before = table.blocks.before(number)
            weights = rows[0, before:] if number + 1 > before else None
            return [Mix(self.values[before:], weights, tuple(scores[before:]), (), claims[0], begun)]
        if ways == 1:
            return [Mix(self.values, rows[0], tuple(scores), (), claims[0])]
        if ways <= MAX_OUTPUTS and switch.uses_kernels(self.values[0]):
            return _Claiming.apply(self.values, rows, scores, len(claims[0]), *itertools.chain.from_iterable(claims))
        of_ways = zip(*[s.split(1, -1) for s in scores], strict=True)
        return [Mix(self.values, row, own, (), of) for row, own, of in zip(rows, of_ways, claims, strict=True)]

    def _places(self, number: int) -> list[int]:
        """Where the scores of a read begin among those of each of its states."""
        blocks, first, joined = self.table.blocks, self.table.first[number], self.table.blocks.joined(number)
        complete = len(self.states) - joined
        if self.claims is None or blocks.group == 1:
            places = [first - start for start in self.table.starts[:complete]]
        else:  # scores are those of the span, as its claims are, which come first
            places = [first - self.claims[0].first] * complete
        return [*places, 0] if joined else places

    def _scored(self, number: int, x: Tensor, alone: bool = False) -> tuple[Tensor | None, Tensor]:
        queries = (self.table.own if alone else self.table.queries)[number]
        return read_off(x, queries.T, self.norm_eps, self.clamped)

    def _scored_apart(self, number: int, near: int, x: Tensor) -> tuple[Tensor | None, Scores, Scores, Tensor]:
        queries = self.table.queries[number].T
        (scores, first, others), x = read_off_apart(x, queries, near, self.norm_eps, self.clamped)
        return scores, (first,), (others,), x

    def _sums(self, mixes: range) -> dict[int, Any]:  # each of one way
        states = len(self.values)
        rows = torch.stack([row[0, :states] for row in self.table.constants[mixes.start : mixes.stop]])
        of_states = [s.narrow(-1, mixes.start - i, len(mixes)) for i, s in enumerate(self.scores)]
        return dict(zip(mixes, operators.mixes(self.values, rows, torch.stack(of_states, -1)), strict=True))

    def _without_claims(self, states: tuple[Tensor, ...]) -> Self:
        scores = [*self.scores] if self.claims is None else []
        known = [*states[: len(scores)]]
        for number, x in enumerate(states[len(scores) :], start=len(scores)):
            of_state, x = self._scored(number, x)
            known, scores = [*known, x], [*scores, *([] if of_state is None else [of_state])]
        return self._left(tuple(known), tuple(scores))


class _Claiming(torch.autograd.Function):
    """Several mixes of states in one pass, all of whose gradients are those of their claims.

    Claims are those of the first mix, of the second, .., n each.
    """

    @staticmethod
    def forward(
        ctx: Any, values: Sequence[Tensor], rows: Tensor, scores: Sequence[Tensor], n: int, *claims: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.n = n
        ctx.set_materialize_grads(False)
        return tuple(operators.ways(values, rows, scores))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, None, None, None, *(grad for grad in grads for _ in range(ctx.n)))
