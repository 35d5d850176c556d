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

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from rewire.kernels import operators
from rewire.kernels.blocks import Blocks
from rewire.kernels.claims import Claims
from rewire.kernels.mix import Mix, left_to_autograd, under_transforms


class Table:
    """Weights of mixes in turn, each of all states so far.

    Args:
        flat: float32 [K] or [K, D]: for each mix in turn, one entry for each of its states, ascending.
        mixes, first: as in `Blocks`.
        block: the same; by default what `best_block` says, and no blocks where there are no kernels.

    Attributes:
        blocks: how they are arranged.
        rows: for each mix its weights, [n] or [n, D].
        begun, rest: the same, detached: those of the states before its block of mixes, and of the others.
        near: for each state, the weights with which mixes read it that do not read all of its block, [n] or [n, D].
        later: for each block of states, those of all mixes that do: of its first state, of its second, ..
    """

    def __init__(self, flat: Tensor, mixes: int, first: int = 1, block: int | None = None) -> None:
        self.blocks = blocks = Blocks.of(flat, mixes, first, block)
        states, counts = blocks.states, [first + s for s in range(mixes)]
        self.rows = parts(flat, counts)
        before = [blocks.before(s) for s in range(mixes)]
        halves = flat.detach().split([n for s in range(mixes) for n in (before[s], counts[s] - before[s])])
        self.begun, self.rest = halves[::2], halves[1::2]
        state, mix = torch.triu_indices(states, mixes, 1 - first, device=flat.device)
        start = mix * (mix - 1) // 2 + mix * first  # of each mix in the flat weights
        # Later are mixes that read the last state of the block. Sorted on the device: a mask would be waited for.
        order = (mix >= (state // blocks.block + 1) * blocks.block - first).byte().argsort(stable=True)
        later = [blocks.later(last) for last in range(blocks.block - 1, states, blocks.block)]
        near = [blocks.near(i) for i in range(states)]
        pieces = parts(flat.index_select(0, (start + state)[order]), [*near, *(blocks.block * n for n in later)])
        self.near, self.later = pieces[:states], pieces[states:]


def parts(x: Tensor, counts: list[int], dim: int = 0) -> tuple[Tensor, ...]:
    """``x`` split along ``dim``.

    Copies in a compiled region: where one opens the stream, its table goes on to the next, and AOTAutograd cannot hand
    out several views of one split ("split_with_sizes expects split_sizes to sum exactly to 1").
    """
    parts = x.split(counts, dim)
    return tuple(part.clone() for part in parts) if torch.compiler.is_compiling() else parts


def suffixes(x: Tensor, starts: Sequence[int]) -> tuple[Tensor, ...]:
    """``x[start:]`` for each; their gradients are added up at once."""
    if under_transforms():
        return tuple([x[start:] for start in starts])
    found: tuple[Tensor, ...] = _Suffixes.apply(x, tuple(starts))
    return found


class _Suffixes(torch.autograd.Function):
    """Autograd would make as many tensors as large as ``x``, and add them one by one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, starts: tuple[int, ...]) -> tuple[Tensor, ...]:
        ctx.starts, ctx.shape = starts, x.shape
        ctx.set_materialize_grads(False)
        return tuple([x[start:].clone() if torch.compiler.is_compiling() else x[start:] for start in starts])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        given = [(start, grad) for start, grad in zip(ctx.starts, grads, strict=True) if grad is not None]
        if not given:
            return None, None
        none = given[0][1].new_zeros(ctx.shape)
        padded = torch.cat([part for start, grad in given for part in (none[:start], grad)])
        return padded.unflatten(0, (len(given), -1)).sum(0), None


class History:
    """The states of a trunk so far. Immutable.

    In blocks of B (see `Blocks`), kernels read all earlier states once for the next B mixes, and all later gradients
    once for B states: L^2 / 2 reads become about L^1.5.

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
        begun: of each mix of the present block the sum over all states before that block, in float32.
    """

    __slots__ = ("begun", "claims", "states", "table", "values", "waiting")

    def __init__(
        self,
        table: Table,
        states: tuple[Tensor, ...],
        values: tuple[Tensor, ...],
        claims: tuple[tuple[int, tuple[Tensor, ...]], ...] | None,
        waiting: tuple[Tensor, ...] = (),
        begun: dict[int, Any] | None = None,
    ) -> None:
        self.table, self.states, self.values = table, states, values
        self.claims, self.waiting, self.begun = claims, waiting, begun or {}

    @classmethod
    def empty(cls, table: Table) -> History:
        """The history before the first state."""
        return cls(table, (), (), ())

    def after(self, states: Sequence[Tensor]) -> History:
        """The history after further ``states``, of which earlier mixes were made elsewhere."""
        history = self
        for number, x in enumerate(states):
            history = history.push(x, begin=number >= len(states) - self.table.blocks.block)
        return history

    def push(self, x: Tensor, begin: bool = True) -> History:
        """The history with a further state.

        To be called by who reads the state, not by who makes it: the claims' backward needs the state, and under
        activation checkpointing would have the block that made it recomputed before its turn.

        Args:
            x: the state.
            begin: whether the mixes of a block that comes next will be made of this history.
        """
        table, blocks, number, claims = self.table, self.table.blocks, len(self.states), self.claims
        states = (*self.states, x)
        if claims is None or left_to_autograd(x, blocks.sources) or x.shape != states[0].shape:
            return History(table, states, (), None)
        values = (*self.values, x.detach())
        if number >= len(table.near):  # no mix reads it
            return History(table, states, values, claims)
        waiting, later, near = self.waiting, number // blocks.block, table.near[number]
        if near.shape[0]:
            # Twice: what comes back from later blocks is added here, too, and not to that from elsewhere before.
            *found, x, again = Claims.apply(2, 1, near, x)
            claims, states = (*claims, (blocks.first_mix(number), tuple(found))), (*self.states, x)
        else:
            again = x
        if later < len(table.later):
            waiting = (*waiting, again)
            if len(waiting) == blocks.block:
                found = Claims.apply(0, len(waiting), table.later[later], *waiting)
                claims, waiting = (*claims, (blocks.first_mix(number), tuple(found))), ()
        return History(table, states, values, claims, waiting, self.begun)._begin(begin)

    def mix(self, number: int, added: Sequence[Tensor] = ()) -> Mix:
        """Mix ``number`` (from 0) of the table, plus ``added``: to be computed when all its states are there."""
        if self.claims is None or (torch.compiler.is_compiling() and not operators.uses_kernels(self.states[0])):
            row = self.table.rows[number]
            return Mix(self.states[: len(row)], row, (), tuple(added))
        claims = tuple([of[number - first] for first, of in self.claims if 0 <= number - first < len(of)])
        weights, accumulator = self.table.rest[number], self.begun.get(number)
        if accumulator is None and self.table.begun[number].shape[0]:
            weights = torch.cat((self.table.begun[number], weights))
        read = self.table.blocks.first + number
        values = self.values[read - weights.shape[0] : read]
        return Mix(values, weights if values else None, (), tuple(added), claims, accumulator)

    def viewed(self, view: Callable[[Tensor], Tensor]) -> History:
        """The history in other dimensions; what was arranged for one pass over memory is left to autograd from here."""
        return History(self.table, tuple(map(view, self.states)), (), None)

    def _begin(self, begin: bool) -> Self:
        """The history; with the sums of the mixes of the block that comes next, if one does now."""
        mixes = self.table.blocks.beginning(len(self.states))
        if begin and mixes and operators.uses_kernels(self.states[0]):
            with torch.no_grad():  # not as a decorator, which torch.compile cannot follow here
                self.begun = self._sums(mixes)
        return self

    def _sums(self, mixes: range) -> dict[int, Any]:
        """What each of these mixes begins with: all states so far."""
        rows = torch.stack(self.table.begun[mixes.start : mixes.stop])
        return dict(zip(mixes, operators.mixes(self.values, rows), strict=True))
