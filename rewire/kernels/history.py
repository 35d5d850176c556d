"""States that all later sites mix, with the sums arranged so that each tensor is read as seldom as possible.

A site adds up ``w_si x_i`` over all states so far. Left to autograd, each site would read its states again in
backward, write a gradient for each of them, and add it to those of the other sites: five passes over memory for each
pair of a site and a state. Here it is one.

Think of the scaling ``w_si x_i`` as an operation of its own whose result is never stored: the *claim* of site s on
state i. The gradient of a sum is that of each of its terms, so a claim gets the site's gradient g_s as it is: nothing
is computed or copied. The scaling's own gradients, ``dx_i = sum_s w_si g_s`` and ``dw_si = <x_i, g_s>``, come in one
pass once all later sites are done: the transposed mix. It is ordinary autograd throughout, and so works with
checkpointing, ``retain_graph``, gradients of gradients, and whatever order forwards and backwards come in.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rewire.kernels import operators, plain
from rewire.kernels.mix import Mix, left_to_autograd

#: States whose gradients one kernel gathers, and mixes that it begins, in histories of at least `SHORTEST` states.
BLOCK = 4
SHORTEST = 9


class Table:
    """Weights of S mixes in turn, each of all states so far.

    Args:
        flat: float32 [K] or [K, D]: for each mix in turn, one entry for each of its states, ascending.
        mixes: S.
        first: states that the first mix reads; each further one reads one more.
        block: mixes that kernels begin together, and states whose gradients they gather together; by default what
            `best_block` says, and no blocks where there are no kernels.

    Attributes:
        rows: for each mix its weights, [n] or [n, D].
        begun, rest: the same, detached: those of the states before its block of mixes, and of the others.
        near: for each state, the weights with which mixes read it that do not read all of its block, [n] or [n, D].
        later: for each block of states, those of all mixes that do: of its first state, of its second, ..
        first, block: as above.
        sources: that a mix reads, on average.
    """

    def __init__(self, flat: Tensor, mixes: int, first: int = 1, block: int | None = None) -> None:
        states, self.first, self.sources = first + mixes - 1, first, first + (mixes - 1) / 2
        self.block = block = block or (best_block(mixes, first) if operators.uses_kernels(flat) else states + 1)
        counts = [first + s for s in range(mixes)]
        self.rows = parts(flat, counts)
        before = [first + s // block * block if s >= block else 0 for s in range(mixes)]
        halves = flat.detach().split([n for s in range(mixes) for n in (before[s], counts[s] - before[s])])
        self.begun, self.rest = halves[::2], halves[1::2]
        state, mix = torch.triu_indices(states, mixes, 1 - first, device=flat.device)
        start = mix * (mix - 1) // 2 + mix * first  # of each mix in the flat weights
        # Later are mixes that read the last state of the block. Sorted on the device: a mask would be waited for.
        order = (mix >= (state // block + 1) * block - first).byte().argsort(stable=True)
        later = [mixes - self.first_mix(last) for last in range(block - 1, states, block)]
        near = [min(mixes, self.first_mix(i // block * block + block - 1)) - self.first_mix(i) for i in range(states)]
        pieces = parts(flat.index_select(0, (start + state)[order]), [*near, *(block * n for n in later)])
        self.near, self.later = pieces[:states], pieces[states:]

    def first_mix(self, state: int) -> int:
        """The first that reads a state."""
        return max(0, state + 1 - self.first)


def parts(x: Tensor, counts: list[int], dim: int = 0) -> tuple[Tensor, ...]:
    """``x`` split along ``dim``.

    Copies in a compiled region: where one opens the stream, its table goes on to the next, and AOTAutograd cannot hand
    out several views of one split ("split_with_sizes expects split_sizes to sum exactly to 1").
    """
    parts = x.split(counts, dim)
    return tuple(part.clone() for part in parts) if torch.compiler.is_compiling() else parts


class History:
    """The states of a trunk so far. Immutable.

    In blocks of B, kernels read all earlier states once for the next B mixes, and all later gradients once for B
    states: L^2 / 2 reads become about L^1.5. Blocks of mixes begin at mixes B, 2 B, ...; blocks of states at states
    0, B, 2 B, ....

    A plain class, not a dataclass: FSDP2 rebuilds every dataclass that it meets in a block's inputs.

    Attributes:
        table: the weights with which states are mixed.
        states: x_0, x_1, ..., each [..., D]. Who else reads a state takes it from here: its gradient then joins the
            pass over the claims'.
        values: the same without their history of gradients.
        claims: for each state, or block of them, the first mix that claims it, and the claims of that mix and those
            that follow; None if some state has no claims, as when a compiled block pushed it: then all further mixes
            are left to autograd.
        waiting: the states of the present block as later blocks of mixes see them: their gradients come together.
        begun: float32 sums over all states before the present block of mixes, for each of its mixes.
    """

    __slots__ = ("begun", "claims", "states", "table", "values", "waiting")

    def __init__(
        self,
        table: Table,
        states: tuple[Tensor, ...],
        values: tuple[Tensor, ...],
        claims: tuple[tuple[int, tuple[Tensor, ...]], ...] | None,
        waiting: tuple[Tensor, ...] = (),
        begun: tuple[Tensor, ...] = (),
    ) -> None:
        self.table, self.states, self.values = table, states, values
        self.claims, self.waiting, self.begun = claims, waiting, begun

    @classmethod
    def empty(cls, table: Table) -> History:
        """The history before the first state."""
        return cls(table, (), (), ())

    def after(self, states: Sequence[Tensor]) -> History:
        """The history after further ``states``, of which earlier mixes were made elsewhere."""
        history = self
        for number, x in enumerate(states):
            history = history.push(x, begin=number >= len(states) - self.table.block)
        return history

    def push(self, x: Tensor, begin: bool = True) -> History:
        """The history with a further state.

        To be called by who reads the state, not by who makes it: the claims' backward needs the state, and under
        activation checkpointing would have the block that made it recomputed before its turn.

        Args:
            x: the state.
            begin: whether the mixes of a block that comes next will be made of this history.
        """
        table, number, claims = self.table, len(self.states), self.claims
        states = (*self.states, x)
        if claims is None or left_to_autograd(x, table.sources) or x.shape != states[0].shape:
            return History(table, states, (), None)
        values = (*self.values, x.detach())
        if number >= len(table.near):  # no mix reads it
            return History(table, states, values, claims)
        waiting, later, near = self.waiting, number // table.block, table.near[number]
        if near.shape[0]:
            # Twice: what comes back from later blocks is added here, too, and not to that from elsewhere before.
            *found, x, again = _Claims.apply(near, 2, x)
            claims, states = (*claims, (table.first_mix(number), tuple(found))), (*self.states, x)
        else:
            again = x
        if later < len(table.later):
            waiting = (*waiting, again)
            if len(waiting) == table.block:
                found = _Claims.apply(table.later[later], 0, *waiting)
                claims, waiting = (*claims, (table.first_mix(number), tuple(found))), ()
        return History(table, states, values, claims, waiting, self._begin(states) if begin else ())

    def mix(self, number: int, added: Sequence[Tensor] = ()) -> Mix:
        """Mix ``number`` (from 0) of the table, plus ``added``: to be computed when all its states are there."""
        if self.claims is None or (torch.compiler.is_compiling() and not operators.uses_kernels(self.states[0])):
            row = self.table.rows[number]
            return Mix(self.states[: len(row)], row, (), tuple(added))
        claims = tuple([of[number - first] for first, of in self.claims if 0 <= number - first < len(of)])
        weights, accumulator = self.table.rest[number], None
        if self.begun:
            accumulator = self.begun[number % self.table.block]
        elif self.table.begun[number].shape[0]:
            weights = torch.cat((self.table.begun[number], weights))
        read = self.table.first + number
        values = self.values[read - weights.shape[0] : read]
        return Mix(values, weights if values else None, (), tuple(added), claims, accumulator)

    def viewed(self, view: Callable[[Tensor], Tensor]) -> History:
        """The history in other dimensions; what was arranged for one pass over memory is left to autograd from here."""
        return History(self.table, tuple(map(view, self.states)), (), None)

    def _begin(self, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The sums over ``states`` for the mixes of the block that comes next, if one does now."""
        start, block = len(states) - self.table.first, self.table.block
        if start % block or start <= 0 or not operators.uses_kernels(states[0]):
            return self.begun
        rows = torch.stack(self.table.begun[start : start + block])
        with torch.no_grad():  # not as a decorator, which torch.compile cannot follow here
            return tuple(operators.mixes(states, rows))


class _Claims(torch.autograd.Function):
    """Claims of N later mixes on M states: N tensors whose values mean nothing, and whose gradients are the mixes'.

    Weights are float32 [M N] or [M N, D], states M of [..., D]. ``through`` more results are the state itself (M = 1),
    whose gradients join the sum.
    """

    @staticmethod
    def forward(ctx: Any, weights: Tensor, through: int, *states: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(weights, *states)
        ctx.set_materialize_grads(False)
        ctx.mixes = weights.shape[0] // len(states)
        x = states[0]
        claim = torch.empty_strided(x.shape, (0,) * x.dim(), dtype=x.dtype, device=x.device)  # one element
        return (*[claim.detach() for _ in range(ctx.mixes)], *[x.view_as(x) for _ in range(through)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        flat, *states = ctx.saved_tensors
        of_mixes, added = grads[: ctx.mixes], [grad for grad in grads[ctx.mixes :] if grad is not None]
        like = next((grad for grad in of_mixes if grad is not None), None)
        if like is None:
            return (None, None, functools.reduce(torch.add, added) if added else None, *[None] * (len(states) - 1))
        given = [torch.zeros_like(like) if grad is None else grad for grad in of_mixes]
        weights = flat.view(len(states), ctx.mixes, *flat.shape[1:])
        if torch.is_grad_enabled():  # with create_graph=True
            dx, dots = _differentiable(given, states, weights, added)
        elif operators.uses_kernels(like):
            *dx, dots = operators.gather(given, states, weights, added)
        else:
            dx, dots = plain.combine_with_dots(given, states, weights, added)
        return (dots.reshape(flat.shape), None, *dx)


def _differentiable(
    grads: Sequence[Tensor], states: Sequence[Tensor], weights: Tensor, added: Sequence[Tensor]
) -> tuple[list[Tensor], Tensor]:
    """What `gather` computes, by operations that autograd knows."""
    over = tuple(range(states[0].dim() - 1)) if weights.dim() == 3 else None
    dx = []
    for row, x in zip(weights, states, strict=True):
        terms = [w * g for w, g in zip(row, grads, strict=True)]
        dx.append(functools.reduce(torch.add, [*terms, *added]).to(x.dtype))
    dots = [torch.stack([(x * g).to(weights.dtype).sum(over) for g in grads]) for x in states]
    return dx, torch.stack(dots)


def best_block(mixes: int, first: int = 1) -> int:
    """B for a chain of mixes; more than all states if blocks do not pay.

    Within 5 % of the fewest bytes for chains of 10 to 100 mixes, the accumulators between chained kernels included
    (`traffic.bytes_of_history`; table in docs/kernels.md).
    """
    states = first + mixes - 1
    return BLOCK if states >= SHORTEST else states + 1
