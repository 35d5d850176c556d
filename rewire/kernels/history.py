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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rewire.kernels import operators, plain
from rewire.kernels.mix import Mix, left_to_autograd, under_transforms

#: States whose gradients one kernel gathers, and mixes that it begins, in histories of at least `SHORTEST` states.
BLOCK = 4
SHORTEST = 9


class Blocks(NamedTuple):
    """Which of S mixes in turn read which states, and which of them are made together.

    Blocks of mixes begin at mixes B, 2 B, ...; blocks of states at states 0, B, 2 B, ....

    Attributes:
        mixes: S.
        first: states that the first mix reads; each further one reads one more.
        block: B, mixes that kernels begin together, and states whose gradients they gather together.
    """

    mixes: int
    first: int
    block: int

    @classmethod
    def of(cls, like: Tensor, mixes: int, first: int, block: int | None) -> Blocks:
        """By default of `best_block`, and none where no kernels run on tensors like this."""
        best = best_block(mixes, first) if operators.uses_kernels(like) else first + mixes
        return cls(mixes, first, block or best)

    @property
    def states(self) -> int:
        """That some mix reads."""
        return self.first + self.mixes - 1

    @property
    def sources(self) -> float:
        """That a mix reads, on average."""
        return self.first + (self.mixes - 1) / 2

    def first_mix(self, state: int) -> int:
        """The first that reads a state."""
        return max(0, state + 1 - self.first)

    def near(self, state: int) -> int:
        """How many mixes read a state, but not all of its block of states."""
        return min(self.mixes, self.first_mix(self.last(state))) - self.first_mix(state)

    def later(self, state: int) -> int:
        """How many mixes read all of a state's block."""
        return max(0, self.mixes - self.first_mix(self.last(state)))

    def last(self, state: int) -> int:
        """The last state of the block."""
        return state // self.block * self.block + self.block - 1

    def before(self, mix: int) -> int:
        """States before a mix's block of mixes: their part of its sum is begun with that block."""
        start = mix // self.block * self.block
        return self.first + start if self.beginning(self.first + start) else 0

    def beginning(self, states: int) -> range:
        """Mixes whose sums begin when there are that many states; not a single one, which is made at once."""
        mix = states - self.first
        stop = min(mix + self.block, self.mixes)
        return range(mix, stop if mix > 0 and mix % self.block == 0 and stop > mix + 1 else mix)


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
        begun: dict[int, Tensor] | None = None,
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
        return History(table, states, values, claims, waiting, self._begin(states) if begin else {})

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

    def _begin(self, states: tuple[Tensor, ...]) -> dict[int, Tensor]:
        """``begun``; if a block of mixes comes next, the sums over ``states`` for these."""
        mixes = self.table.blocks.beginning(len(states))
        if not mixes or not operators.uses_kernels(states[0]):
            return self.begun
        rows = torch.stack(self.table.begun[mixes.start : mixes.stop])
        with torch.no_grad():  # not as a decorator, which torch.compile cannot follow here
            return dict(zip(mixes, operators.mixes(states, rows), strict=True))


class Claims(torch.autograd.Function):
    """Claims of N later mixes on M states: N tensors whose values mean nothing, and whose gradients are the mixes'.

    ``weights`` are float32 [M N] or [M N, D]. ``tensors`` are the states, [..., D], after weights per token, [..., N]
    of each state, if there are any. ``through`` more results are the state itself (M = 1), and their gradients join.
    """

    @staticmethod
    def forward(ctx: Any, through: int, count: int, weights: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(weights, *tensors)
        ctx.set_materialize_grads(False)
        ctx.states, ctx.mixes = count, weights.shape[0] // count
        x = tensors[-count]
        return (*stand_ins(x, x.shape, ctx.mixes), *[x.view_as(x) for _ in range(through)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        flat, *tensors = ctx.saved_tensors
        scores, states = tensors[: -ctx.states], tensors[-ctx.states :]
        given, added = present(grads[: ctx.mixes]), [grad for grad in grads[ctx.mixes :] if grad is not None]
        if not given:
            return (None, None, None, *[None] * (len(tensors) - 1), added_up(added))
        weights = flat.view(len(states), ctx.mixes, *flat.shape[1:])
        dx, dots, of_scores = gathered(given, states, weights, torch.stack(scores, -2) if scores else None, added)
        by_token = () if of_scores is None else of_scores.unbind(-2)
        return (None, None, None if dots is None else dots.reshape(flat.shape), *by_token, *dx)


def stand_ins(like: Tensor, shape: Sequence[int], count: int) -> tuple[Tensor, ...]:
    """Tensors of that shape without memory: one element, in the dtype of ``like``."""
    return like.new_empty_strided((count, *shape), [0] * (1 + len(shape))).unbind()


def present(grads: Sequence[Tensor | None]) -> list[Tensor]:
    """Gradients, zeros for those that there are not; none if there are none at all."""
    like = next((grad for grad in grads if grad is not None), None)
    return [] if like is None else [torch.zeros_like(like) if grad is None else grad for grad in grads]


def added_up(tensors: Sequence[Tensor]) -> Tensor | None:
    """Their sum, if there are any."""
    return functools.reduce(torch.add, tensors) if tensors else None


def gathered(
    grads: Sequence[Tensor],
    states: Sequence[Tensor],
    weights: Tensor | None,
    scores: Tensor | None,
    added: Sequence[Tensor],
) -> tuple[Sequence[Tensor], Tensor | None, Tensor | None]:
    """What N mixes send back to M states that they read: ``dx_m = sum_n (w_mn + s_mn) g_n + sum_j a_j``.

    Args:
        grads: g_n, N of [..., D].
        states: x_m, M of [..., D].
        weights: w, float32 [M, N] or [M, N, D].
        scores: s, weights per token, [..., M, N].
        added: a_j [..., D], gradients that came other ways; for a single state.

    Returns:
        The gradients of the states; those of weights and of scores, ``<x_m, g_n>``, where these are given.
    """
    if torch.is_grad_enabled():  # with create_graph=True
        return _differentiable(grads, states, weights, scores, added)
    if operators.uses_kernels(states[0]):
        found = operators.gather(grads, states, weights, added, scores)
        dots = iter(found[len(states) :])
        of_weights, of_scores = (None if given is None else next(dots) for given in (weights, scores))
        return found[: len(states)], of_weights, of_scores
    if scores is None:
        assert weights is not None
        return (*plain.combine_with_dots(grads, states, weights, added), None)
    return plain.combine_with_token_dots(grads, states, weights, scores, added)


def _differentiable(
    grads: Sequence[Tensor],
    states: Sequence[Tensor],
    weights: Tensor | None,
    scores: Tensor | None,
    added: Sequence[Tensor],
) -> tuple[list[Tensor], Tensor | None, Tensor | None]:
    """`gathered`, by operations that autograd knows."""
    precise = torch.promote_types(states[0].dtype, torch.float32)
    given, dx, products = [g.to(precise) for g in grads], list[Tensor](), list[list[Tensor]]()
    for m, x in enumerate(states):
        factors = [[] if weights is None else weights[m], [] if scores is None else scores[..., m, :].split(1, -1)]
        terms = [w * g for of_kind in factors for w, g in zip(of_kind, given, strict=False)]
        dx.append(functools.reduce(torch.add, [*terms, *added]).to(x.dtype))
        products.append([x * g for g in given])
    by_token = [torch.stack([product.sum(-1) for product in of_state], -1) for of_state in products]
    of_scores = None if scores is None else torch.stack(by_token, -2)
    if weights is None:
        return dx, None, of_scores
    over = tuple(range(states[0].dim() - (weights.dim() == 3)))  # all but the channels, or all
    dots = [torch.stack([product.sum(over) for product in of_state]) for of_state in products]
    return dx, torch.stack(dots).to(weights.dtype), of_scores


def best_block(mixes: int, first: int = 1) -> int:
    """B for a chain of mixes; more than all states if blocks do not pay.

    Within 5 % of the fewest bytes for chains of 10 to 100 mixes, the accumulators between chained kernels included
    (`traffic.bytes_of_history`; table in docs/kernels.md).
    """
    states = first + mixes - 1
    return BLOCK if states >= SHORTEST else states + 1
