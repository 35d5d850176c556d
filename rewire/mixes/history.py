"""States that later reads mix, with gradients by autograd; `claimed` does the same with less memory traffic."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from rewire.mixes.blocks import Blocks
from rewire.mixes.mix import Mix, pending_mix
from rewire.mixes.several import mixes
from rewire.mixes.tokens import read_off

Scores = tuple[Tensor, ...]  #: a state's scores, [..., K]; or empty
_EPS = 1e-6  # of the norm of `History.project`


class Row(NamedTuple):
    """The weights of one read, as a row of a table.

    Attributes:
        table: the table.
        number: number of the read, from 0.
    """

    table: Free
    number: int


class Free:
    """The table of a history whose weights are only given when it is read.

    Args:
        group: number of reads until there is another state.
    """

    queries: tuple[Tensor, ...] = ()
    own: tuple[Tensor, ...] = ()
    worth = 1  # see `claimed.Table`

    def __init__(self, group: int = 1) -> None:
        self.blocks = Blocks(0, 1, 1, 1, group)

    def history(self) -> History:
        """The history before its first state."""
        return History(self)

    def holding(self, states: Iterable[Tensor]) -> History:
        """A history of these states."""
        history = self.history()
        for x in states:
            history = history.push(x)
        return history


class History:
    """The states of a trunk so far.

    In groups, a state is complete after several reads; reads before that see the sum so far.

    Each read has its own history, made by `read`. States that it projects, or mixes with weights from outside a table,
    are replaced in it by tensors with the same values, so that gradients of later reads are added in the same pass.

    A plain class, not a dataclass: FSDP2 rebuilds every dataclass that it meets in a block's inputs.

    Attributes:
        table: the weights with which states are mixed.
        states: x_0, x_1, ..., each [..., D]. Everything else that reads a state takes it from here.
        scores: if weights depend on scores, each state's scores for the mixes that read it, [..., m].
        joined: whether the newest state is incomplete, inside a group, so that no other read has it.
    """

    __slots__ = ("joined", "scores", "states", "table")

    norm_eps: ClassVar[float | None] = None  #: Epsilon of the norm before projections; None: no norm.
    clamped: ClassVar[bool] = True  #: Whether negative scores are set to 0.

    def __init__(self, table: Any, states: tuple[Tensor, ...] = (), scores: Scores = ()) -> None:
        self.table, self.states, self.scores, self.joined = table, states, scores, False

    # -- reads ---------------------------------------------------------------------------------------------------------

    def read(self, t: int, x: Tensor) -> History:
        """The history for read t, with the newest state ``x``.

        Call it where the state is read, not where it is made: the claims' backward needs the state, and under
        activation checkpointing would recompute the block that made it before its turn.
        """
        number = t - self.table.blocks.first
        return self._joined(number, x) if self.table.blocks.joined(number) else self.push(x)

    @property
    def kept(self) -> History:
        """The history for the next read: without an incomplete newest state."""
        return type(self)(self.table, self.states[:-1], self.scores[:-1]) if self.joined else self

    @property
    def newest(self) -> Tensor:
        """The newest state; may be set to a tensor of the same value that is to get the gradients of later reads."""
        return self.states[-1]

    @newest.setter
    def newest(self, x: Tensor) -> None:
        self.states = (*self.states[:-1], x)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """All tensors of the history from which later reads are made."""
        return self.states

    def project(self, weight: Tensor) -> Tensor:
        """``weight . rmsnorm(newest)`` for each token, [..., n] for a weight [n, D], in float32 or better."""
        scores, self.newest = read_off(self.newest, weight.T, _EPS)
        return scores

    def mix(
        self, weights: Row | Tensor | None, per_token: Tensor | None = None, added: Sequence[Tensor] = ()
    ) -> Tensor | Mix:
        """``sum_i (w_i + s_i) x_i`` over the n states, plus ``added``; perhaps as a `Mix`, computed when it is needed.

        Args:
            weights: w, float32, one for each state [n], or for each of its channels [n, D]; or a row of the table for
                this read, ``table[t]``.
            per_token: s, [..., n]; summed in float32 or better.
            added: tensors that are added with weight 1, such as branch outputs.

        Raises:
            ValueError: there are not as many weights as states.
        """
        if isinstance(weights, Row):
            (value,) = self._of_table(weights)
            if added and isinstance(value, Mix):
                value.added = tuple(added)
            return value if isinstance(value, Mix) or not added else Mix(added=(value, *added))
        if per_token is None:
            return pending_mix(self.states, weights, added)
        if added:
            return pending_mix(self.states, weights, added, _precise(per_token).split(1, -1))
        return self.mixes(None if weights is None else weights.unsqueeze(0), per_token.unsqueeze(-2))[0]

    def mixes(self, weights: Row | Tensor | None, per_token: Tensor | None = None) -> Sequence[Tensor | Mix]:
        """Several mixes of the states at once, as for queries, keys and values: M ways.

        Args:
            weights: as in `mix`, with a dimension for the ways in front: [M, n] or [M, n, D].
            per_token: [..., M, n].

        Raises:
            ValueError: there are not as many weights as states.
        """
        if isinstance(weights, Row):
            return self._of_table(weights)
        for given, dim in ((weights, 1), (per_token, -1)):
            if given is not None and given.shape[dim] != len(self.states):
                raise ValueError(f"{len(self.states)} states are mixed, and there are {given.shape[dim]} weights.")
        found, states = mixes(self.states, weights, None if per_token is None else _precise(per_token))
        self.states = tuple(states)
        return found

    def _of_table(self, row: Row) -> Sequence[Tensor | Mix]:
        """The mixes of a read, with its weights in the table."""
        if row.table is not self.table:
            raise ValueError(
                "the history began without these weights: `weights` of a rewire.Dense has to return the table itself."
            )
        return self._ways(row.number)

    def _ways(self, number: int) -> Sequence[Tensor | Mix]:
        """The mixes of read ``number`` of the table."""
        rows, scores = self.table.rows[number], self._scores_of(number)
        ways, count = rows.shape[:2]
        if ways == 1:
            return [Mix(self.states[:count], rows[0], scores)]
        return mixes(self.states, rows, torch.stack(scores, -1) if scores else None)[0]

    def _scores_of(self, number: int) -> Scores:
        """The scores of a read, [..., ways] for each state, if there are any."""
        if not self.scores:
            return ()
        ways = self.table.first[number + 1] - self.table.first[number]
        return tuple([s.narrow(-1, k, ways) for s, k in zip(self.scores, self._places(number), strict=True)])

    def _places(self, number: int) -> list[int]:
        """The places of a read's first scores among the scores of each of its states."""
        first, joined = self.table.first[number], self.table.blocks.joined(number)
        places = [first - start for start in self.table.starts[: len(self.states) - joined]]
        return [*places, 0] if joined else places

    # -- states --------------------------------------------------------------------------------------------------------

    def after(self, states: Sequence[Tensor]) -> History:
        """The history after further ``states``, whose mixes so far were computed elsewhere."""
        history: History = self
        for number, x in enumerate(states):
            history = history.push(x, begin=number >= len(states) - self.table.blocks.block)
        return history

    def push(self, x: Tensor, begin: bool = True) -> History:
        """The history with a further, complete state.

        Args:
            x: the state.
            begin: for `claimed` histories, whether to begin the sums of a block of mixes that comes next.
        """
        return self._more(*self._scored(len(self.states), x))

    def viewed(self, view: Callable[[Tensor], Tensor]) -> History:
        """The history with reshaped states; from here on their gradients are left to autograd."""
        history = self._without_claims(map(view, self.states))
        history.joined = self.joined
        return history

    def _joined(self, number: int, x: Tensor) -> History:
        """The history with an incomplete state, which only read ``number`` has, inside a group."""
        history = self._more(*self._scored(number, x, alone=True))
        history.joined = True
        return history

    def _more(self, scores: Tensor | None, x: Tensor) -> Self:
        return type(self)(self.table, (*self.states, x), self.scores if scores is None else (*self.scores, scores))

    def _without_claims(self, states: Iterable[Tensor]) -> History:
        """A history of these states whose mixes are left to autograd."""
        history = self._none()
        for x in states:
            history = history.push(x)
        return history

    def _none(self) -> History:
        """An empty history with the same table, without claims."""
        return type(self)(self.table)

    def _scored(self, number: int, x: Tensor, alone: bool = False) -> tuple[Tensor | None, Tensor]:
        """The scores of state ``number``, or with ``alone`` of the one that only read ``number`` has, if weights depend
        on scores; and x, for later reads.
        """
        if not self._asks:
            return None, x
        queries = (self.table.own if alone else self.table.queries)[number]
        return read_off(x, queries.T, self.norm_eps, self.clamped)

    @property
    def _asks(self) -> bool:
        """Whether weights depend on scores."""
        return len(self.table.queries) > 0


def _precise(scores: Tensor) -> Tensor:
    """Scores in float32 or better, as sums take them: under autocast they may be in lower precision."""
    return scores.to(torch.promote_types(scores.dtype, torch.float32))
