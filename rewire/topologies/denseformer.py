"""DenseFormer: a depth-weighted average after each block (arXiv 2402.02622)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from rewire.errors import UnsupportedTopology
from rewire.mixes.by_state import parts
from rewire.mixes.history import History, Table
from rewire.mixes.mix import mix
from rewire.topologies import groups
from rewire.topologies.base import OF_STATES, Dims, Granularity, Recurrence, Start, States, check_count, total
from rewire.topologies.program import Line, Program, Term, Unit, branch_of
from rewire.topologies.registry import register_topology


class Averages(NamedTuple):
    """Effective weights of DenseFormer.

    Attributes:
        rows: for each averaging t in turn, a_t over its sources, float32 [number of sources].
        table: the same, where every unit averages all states.
    """

    rows: Sequence[Tensor]
    table: Table | None


@register_topology("denseformer")
@dataclasses.dataclass(frozen=True)
class DenseFormer(Recurrence[Averages]):
    """DenseFormer: after each unit, a weighted average of all states so far (arXiv 2402.02622).

    ``x_t = y_{t-1} + f_t`` and ``y_t = sum_i a_ti x_i`` over ``i <= t`` with ``i = t (mod dilation)``, if t
    is a multiple of period; otherwise ``y_t = x_t``. ``y_0 = x_0``. Unit t reads ``y_{t-1}``; the trunk's
    output is ``y_T``. The states are ``x_0 .. x_t`` and, inside a unit, ``y_t``; where all are averaged, ``x_t`` and a
    history of those before, or inside a unit ``y_t`` and the history. Both starts are ``a_tt = 1`` and 0 elsewhere: the
    original network, exactly.

    **Groups.** With ``block=S`` (ours; see `groups`) averages are over ``x_0, x_S, x_2S, ..`` and ``x_t``:
    ``y_t = sum_{i in K_{t+1}} a_ti x_i`` with ``K_{t+1} = {i <= t: i = 0 (mod S) or i = t}``. These
    are all that is held. Dilation takes other states, which change with t: all would have to be held.

    Args:
        dilation: average only every dilation-th earlier state, 1 or more.
        period: average only after every period-th unit, 1 or more.
        block: S, 1 or more; None is 1, no groups.

    Raises:
        ValueError: an option is below 1, or both dilation and block are above it.
    """

    granularity: ClassVar[Granularity] = "block"

    dilation: int = 1
    period: int = 1
    block: int | None = None

    def __post_init__(self) -> None:
        check_count("dilation", self.dilation, 1)
        check_count("period", self.period, 1)
        check_count("block", self.block, 1, optional=True)
        if self.dilation > 1 and self.block not in (None, 1):
            raise ValueError(
                f"dilation={self.dilation} and block={self.block} choose different states to average: pass one of them."
            )

    def parameters(self, dims: Dims, start: Start) -> dict[str, Tensor]:
        """``alpha``, float32, flat: for each averaging t in turn, one entry for each of its sources i,
        ascending.

        Raises:
            UnsupportedTopology: period is greater than the number of units, so that nothing would be learned.
        """
        if self.period > dims.depth:
            raise UnsupportedTopology(
                f"topology 'denseformer' with period={self.period} averages nothing in a trunk of {dims.depth} "
                f"units: pass a period of at most {dims.depth}."
            )
        rows = [torch.zeros(len(self._sources(t))) for t in self._averaging(dims.depth)]
        for row in rows:
            row[-1] = 1  # a_tt
        return {"alpha": torch.cat(rows)}

    def natural_scales(self, dims: Dims) -> dict[str, float]:
        return {"alpha": OF_STATES}

    def weights(self, parameters: dict[str, Tensor], dims: Dims) -> Averages:
        alpha = parameters["alpha"].float()
        if self.dilation == self.period == 1:
            table = Table(alpha, mixes=dims.depth, first=2, group=self.block or 1)
            return Averages(table.rows, table)
        return Averages(parts(alpha, [len(self._sources(t)) for t in self._averaging(dims.depth)]), None)

    def start(self, x: Tensor, weights: Averages) -> States:
        """``x_0``; with a table, also the history of those that have been read."""
        return (x,) if weights.table is None else (x, History(weights.table))

    def read(self, states: States, weights: Averages, t: int) -> tuple[Tensor, States]:
        if weights.table is None:
            y = self._average(states, weights, t - 1)
            return y, (*states, y)
        newest, history = states
        mixed, x, history = groups.next_read(history, t - 2, newest)
        y = x if t == 1 else mixed.mix(t - 2).value()
        return y, (y, history)

    def merge(self, states: States, weights: Averages, t: int, *branches: Tensor) -> Tensor:
        x = states[-1] if weights.table is None else states[0]
        return total((x, *branches))  # in the model's own order: bitwise equality at the start

    def push(self, states: States, weights: Averages, t: int, x: Tensor) -> States:
        if weights.table is not None:
            return x, states[1]
        return (*groups.kept(states[:-1], t, self.block), x)

    def finish(self, states: States, weights: Averages, dims: Dims) -> Tensor:
        return self.read(states, weights, dims.depth + 1)[0]

    def matrix(self, weights: Averages, dims: Dims) -> Tensor:
        """float32 [T, T + 1]: row t - 1 holds y_t over the columns x_0 .. x_T."""
        table = torch.eye(dims.depth, dims.depth + 1, device=weights.rows[0].device).roll(1, dims=1)  # y_t = x_t
        for t, row in zip(self._averaging(dims.depth), weights.rows, strict=True):
            table[t - 1, list(self._sources(t))] = row
        return table

    def program(self, weights: Averages, dims: Dims) -> Program:
        rows = dict(zip(self._averaging(dims.depth), weights.rows, strict=True))
        units, y = [], "x0"
        for t in range(1, dims.depth + 1):
            terms = [Term(f"x{t}", 1.0)]
            if t in rows:
                terms = [Term(f"x{i}", a) for i, a in zip(self._sources(t), rows[t].tolist(), strict=True)]
            written = Line(f"x{t}", (Term(y, 1.0), Term(branch_of(t), 1.0)))
            units.append(Unit((), y, (written, Line(f"y{t}", tuple(terms)))))
            y = f"y{t}"
        columns = [f"x{t}" for t in range(dims.depth + 1)]
        return Program(tuple(units), (), y, tuple(f"y{t}" for t in range(1, dims.depth + 1)), tuple(columns))

    def _average(self, states: States, weights: Averages, t: int) -> Tensor:
        """``y_t`` of ``x_0 .. x_t``, or with groups of those that are kept."""
        if t == 0 or t % self.period:
            return states[-1]
        sources = states if self.block else [states[i] for i in self._sources(t)]
        return mix(sources, weights.rows[t // self.period - 1])

    def _averaging(self, depth: int) -> range:
        return range(self.period, depth + 1, self.period)

    def _sources(self, t: int) -> Sequence[int]:
        if self.block:
            return groups.numbers(t + 1, self.block)
        return range(t % self.dilation, t + 1, self.dilation)
