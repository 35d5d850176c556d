"""States that all later reads mix with weights of which a part is computed from the state itself (GRN-v3, DCA).

Read t weighs state i with ``b_ti + relu(w_t . x_i)``. All that these weights depend on is known when the state is: it
is projected once, for all reads to come, and its claims (see `history`) are weighted with both parts. Reads of one way
begin in blocks. Backward is one
pass over the state and the gradients of its reads, and one of the projection, which adds up with it:

    dx_i = sum_t (b_ti + s_ti) g_t + sum_t ds_ti w_t        ds_ti = <x_i, g_t> where s_ti is not clamped, for each token
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from rewire.kernels import operators
from rewire.kernels.blocks import Blocks
from rewire.kernels.claims import Claims
from rewire.kernels.history import History, parts, suffixes
from rewire.kernels.mix import Mix, left_to_autograd, pending_mix
from rewire.kernels.several import mixes
from rewire.kernels.spec import MAX_OUTPUTS
from rewire.kernels.tokens import outside_autocast, read_off


class ScoredTable:
    """Weights of reads in turn: read t = 1, 2, .. is of the t states so far, in one way or several.

    Args:
        flat: b, float32 [K] or [K, D]: for each read in turn, for each of its ways, one entry for each of its states.
        queries: w, float32 [S, D]: one row for each way of each read.
        ways: of each read in turn.

    Attributes:
        rows: of each read, [ways, t] or [ways, t, D].
        constants: the same, detached.
        columns: of each state, b of the mixes that read it, [m] or [m, D]. A mix is one way of a read.
        queries: of each state, w of these mixes, [m, D].
        first: of each read, the number of its first mix.
        sources: that a mix reads, on average.
        blocks: reads that kernels begin together, where each has one way; states are gathered one by one.
    """

    def __init__(self, flat: Tensor, queries: Tensor, ways: Sequence[int]) -> None:
        self.first = [0, *itertools.accumulate(ways)]
        counts = [way * t for t, way in enumerate(ways, start=1)]
        rows = parts(flat, counts)
        self.rows = [row.unflatten(0, (way, -1)) for row, way in zip(rows, ways, strict=True)]
        self.constants = [row.detach() for row in self.rows]
        self.columns = parts(
            flat.index_select(0, _by_state(ways, flat.device)), [sum(ways[i:]) for i in range(len(ways))]
        )
        self.queries = suffixes(queries, self.first[:-1])
        self.sources = sum(counts) / sum(ways)
        # With several ways, what is begun would move more than it saves. Nor do registers hold the sums of more than
        # one state's weights per channel.
        self.blocks = Blocks.of(flat, len(ways), 1, None if len(ways) == sum(ways) else len(ways) + 1)


def _by_state(ways: Sequence[int], device: torch.device) -> Tensor:
    """Where the entries of each state in turn are in the flat weights; made on the device, of no list."""
    reads = 1
    runs: list[Tensor] = []  # not list[Tensor](), which Dynamo does not know
    for way, run in itertools.groupby(ways):
        length = len(list(run))
        runs.append(torch.arange(reads, reads + length, device=device).repeat_interleave(way))
        reads += length
    sizes = torch.cat(runs)  # of each mix, how many states it reads
    states = torch.arange(len(ways), device=device)
    reading = (sizes > states.unsqueeze(1)).sum(1)  # of each state, how many mixes read it
    entries = sum(way * t for t, way in enumerate(ways, start=1))  # known here: a GPU need not be waited for
    state = torch.repeat_interleave(states, reading, output_size=entries)
    mix = len(sizes) - (reading.cumsum(0)[state] - torch.arange(entries, device=device))
    return (sizes.cumsum(0) - sizes)[mix] + state


class ScoredHistory(History):
    """The states of a trunk so far, each with the scores of its later reads. Immutable.

    Attributes:
        scores: of each state those of the mixes that read it, [..., m]; as constants, where the state has claims.
    """

    __slots__ = ("scores",)

    table: ScoredTable  # type: ignore[assignment]
    claims: tuple[tuple[Tensor, ...], ...] | None  # type: ignore[assignment]

    def __init__(
        self,
        table: Any,
        states: tuple[Tensor, ...] = (),
        values: tuple[Tensor, ...] = (),
        claims: tuple[Any, ...] | None = (),
        scores: tuple[Tensor, ...] = (),
    ) -> None:
        super().__init__(table, states, values, claims)
        self.scores = scores

    def push(self, x: Tensor, begin: bool = True) -> Self:
        """The history with a further state: see `History.push`."""
        if self._left_to_autograd(x):
            return self._without_claims((*self.states, x))
        with outside_autocast(x.device):
            return self._claimed(x, begin)

    def _left_to_autograd(self, x: Tensor) -> bool:
        """Whether mixes of a further state x are."""
        another_shape = len(self.states) > 0 and x.shape != self.states[0].shape
        return self.claims is None or left_to_autograd(x, self.table.sources) or another_shape

    def _claimed(self, x: Tensor, begin: bool) -> Self:
        table, number = self.table, len(self.states)
        scores, x = self._scored(number, x)
        column = table.columns[number]
        *claims, x = Claims.apply(1, 1, column, scores, x)
        states, values, known = (*self.states, x), (*self.values, x.detach()), (*self.scores, scores.detach())
        history = type(self)(table, states, values, (*self.claims, tuple(claims)), known)  # type: ignore[misc]
        history.begun = self.begun
        return history._begin(begin)

    def _sums(self, reads: range) -> dict[int, Any]:  # each of one way
        states = len(self.values)
        rows = torch.stack([row[0, :states] for row in self.table.constants[reads.start : reads.stop]])
        of_states = [s.narrow(-1, reads.start - i, len(reads)) for i, s in enumerate(self.scores)]
        return dict(zip(reads, operators.mixes(self.values, rows, torch.stack(of_states, -1)), strict=True))

    def _without_claims(self, states: tuple[Tensor, ...]) -> Self:
        known = self.scores if self.claims is None else ()
        scores = (*known, *(self._scored(i, states[i])[0] for i in range(len(known), len(states))))
        return type(self)(self.table, states, (), None, scores)

    def read(self, number: int) -> Sequence[Tensor | Mix]:
        """The mixes of read ``number``, from 0."""
        table, first = self.table, self.table.first[number]
        rows, places = table.rows[number], [first - table.first[i] for i in range(number + 1)]
        ways = len(rows)
        scores = [s.narrow(-1, k, ways) for s, k in zip(self.scores, places, strict=True)]  # of each state, [..., ways]
        if self.claims is None:
            if ways == 1:
                return [pending_mix(self.states, rows[0], scores=scores)]
            return mixes(self.states, rows, torch.stack(scores, -1))[0]
        rows, begun = table.constants[number], self.begun.get(number)
        claims = [tuple(of[k + way] for of, k in zip(self.claims, places, strict=True)) for way in range(ways)]
        if begun is not None:
            before = table.blocks.before(number)
            weights = rows[0, before:] if number + 1 > before else None
            return [Mix(self.values[before:], weights, tuple(scores[before:]), (), claims[0], begun)]
        if ways == 1:
            return [Mix(self.values, rows[0], tuple(scores), (), claims[0])]
        if ways <= MAX_OUTPUTS and operators.uses_kernels(self.values[0]):
            return _Claiming.apply(self.values, rows, scores, len(claims[0]), *itertools.chain.from_iterable(claims))
        of_ways = zip(*[s.split(1, -1) for s in scores], strict=True)
        return [Mix(self.values, row, own, (), of) for row, own, of in zip(rows, of_ways, claims, strict=True)]

    def viewed(self, view: Callable[[Tensor], Tensor]) -> Self:
        return type(self)(self.table, claims=None)._without_claims(tuple(map(view, self.states)))

    def _scored(self, number: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """The scores of a state, and the state as who reads it next is to take it."""
        return read_off(x, self.table.queries[number].T, clamped=True)


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
