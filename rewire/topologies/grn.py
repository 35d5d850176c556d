"""Generalised residual networks and DeepCrossAttention: every read mixes all increments (arXiv 2502.06785)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from rewire.mixes.history import History, Table
from rewire.mixes.mix import Mix, pending_mix
from rewire.mixes.scored import ScoredHistory, ScoredTable
from rewire.mixes.several import mixes
from rewire.mixes.tokens import project
from rewire.topologies import groups
from rewire.topologies.base import (
    OF_STATES,
    Dims,
    Granularity,
    QKVInputs,
    Start,
    States,
    Topology,
    check_count,
    materialize,
    no_attention,
    total,
)
from rewire.topologies.program import Line, Program, Term, Unit, branch_of
from rewire.topologies.registry import register_topology

#: With ``last``, how many increments are added to the middle at once: activation checkpointing keeps every sum that was
#: made. The fewest bytes for 32 units (benchmarks/memory.py).
_WAITING = 6


class Read(NamedTuple):
    """Weights of what one unit reads, or of the output, float32: one GRN instance per way.

    Attributes:
        b: [ways, N] or [ways, N, D] for a stack of N vectors.
        w: [D, ways], None if the weights do not depend on the input.
        table: the weights of all reads, where the whole stack is read.
    """

    b: Tensor
    w: Tensor | None = None
    table: Table | ScoredTable | None = None


@dataclasses.dataclass(frozen=True)
class GRN(Topology[tuple[Read, ...]]):
    """What the generalised residual networks share (arXiv 2502.06785, Section 3.1).

    The states are the stack ``G_t = [f_0, .., f_{t-1}]`` with ``f_0 = x_0``. Unit t reads a weighted sum of it and
    appends ``f_t``; one more read of ``G_{T+1}`` is the trunk's output. With ``last=k`` the stack is ``x_0``, the sum
    of the middle increments and the last k increments: at most k + 2 vectors. (Up to 5 more are held: increments of the
    middle wait until 6 of them are added to it at once, so that not every unit makes a new sum.)

    With ``block=S`` (ours; see `groups`) increments are summed over groups of S units: the stack is ``x_0``, the sums
    ``g_j = f_{(j-1)S+1} + .. + f_{jS}`` of finished groups, and that of the current one if it has an increment yet. So
    ``r_t = b_t0 x_0 + sum_j b_tj g_j``, and likewise for weights that depend on the input.

    **Both starts** are the paper's, ``b = 1`` and ``w = 0``: ``x_0 + f_1 + .. + f_{t-1}`` is the original network, in
    its own order and thus bitwise in float32 and float64 (with ``last`` and ``block`` to rounding: sums come first).
    Nothing is normalised or saturated, so b and w have full gradients. If every branch starts at zero output, only
    the output's ``b_{T+1,0}`` and ``w_{T+1}`` have a gradient at first; all others move from the second step on.

    Before a norm only the ratios of weights count: unit 1, whose stack is ``x_0`` alone, learns next to nothing from
    a weight that all channels share (``b_1`` of GRN-v1, ``w_1``) wherever a norm is all that sees what it reads.

    Args:
        last: increments that stay apart at the end of the stack, 1 or more; None: all.
        block: S, 1 or more; None is 1, no groups.

    Raises:
        ValueError: an option is below 1, or ``last`` is combined with groups.
    """

    granularity: ClassVar[Granularity] = "block"  # Section 5, Table 6: one GRN per decoder block
    #: Whether a part of the weights is computed from the sources.
    input_dependent: ClassVar[bool] = False

    last: int | None = None
    block: int | None = None

    def __post_init__(self) -> None:
        check_count("last", self.last, 1, optional=True)
        check_count("block", self.block, 1, optional=True)
        if self.last is not None and self.block not in (None, 1):
            raise ValueError(f"last={self.last} and block={self.block} sum different increments: pass one of them.")

    def parameters(self, dims: Dims, start: Start) -> dict[str, Tensor]:
        """``b`` and, if input-dependent, ``w``, float32.

        ``b`` is [P], or [P, D] if there are weights per channel: for t = 1..T+1 in turn (the output is T+1), for each
        of its ways (q, k, v, or a single one), one entry for each vector of the stack. ``w`` is [R, D]: one row for
        each way of each t.
        """
        ways, sizes = self._ways(dims), self._sizes(dims)
        channels = (dims.width,) if self.needs_width else ()
        parameters = {"b": torch.ones(sum(m * n for m, n in zip(ways, sizes, strict=True)), *channels)}
        if self.input_dependent:
            parameters["w"] = torch.zeros(sum(ways), dims.width)
        return parameters

    def natural_scales(self, dims: Dims) -> dict[str, float]:
        """That of w has the root of the width in it, as its products with f do."""
        return {"b": OF_STATES} | ({"w": OF_STATES * dims.width**-0.5} if self.input_dependent else {})

    def weights(self, parameters: dict[str, Tensor], dims: Dims) -> tuple[Read, ...]:
        """For t = 1..T+1 in turn, what its read uses."""
        ways, sizes = self._ways(dims), self._sizes(dims)
        flat = parameters["b"].float().split([m * n for m, n in zip(ways, sizes, strict=True)])
        b = [rows.unflatten(0, (m, n)) for rows, m, n in zip(flat, ways, sizes, strict=True)]
        whole, group = self.last is None, self.block or 1
        if not self.input_dependent:
            table = Table(parameters["b"].float(), len(b), group=group) if whole else None
            return tuple(Read(b_t, table=table) for b_t in b)
        w = parameters["w"].float()
        scored = ScoredTable(parameters["b"].float(), w, ways, group) if whole else None
        return tuple(Read(b_t, w_t.T, scored) for b_t, w_t in zip(b, w.split(ways), strict=True))

    def start(self, x: Tensor, weights: tuple[Read, ...]) -> States:
        """The stack; with a table, its newest vector and the history of those that have been read."""
        table = weights[0].table
        if table is None:
            return (x,)
        return x, ScoredHistory(table) if isinstance(table, ScoredTable) else History(table)

    def read(self, states: States, weights: tuple[Read, ...], t: int) -> tuple[Tensor | Mix | QKVInputs, States]:
        b, w, table = weights[t - 1]
        if table is not None:
            newest, history = states
            reading, newest, history = groups.next_read(history, t - 1, newest)
            return _seen([reading.mix(t - 1)] if w is None else reading.read(t - 1)), (newest, history)
        stack = self._stack(states)
        # Not relu: the derivative of clamp is 1 at 0, where all scores start.
        scores = [] if w is None else [project(f, w).clamp(min=0) for f in stack]  # each [..., ways]
        if len(b) == 1:
            return pending_mix(stack, b[0], scores=scores), states
        return _seen(mixes(stack, b, torch.stack(scores, dim=-1))[0]), states

    def write(self, states: States, weights: tuple[Read, ...], t: int, *branches: Tensor) -> States:
        if self.last is None:
            newest, history = states
            return groups.with_increment((newest,), t, self.block, total(branches))[-1], history
        states = (*states, total(branches))
        return states if len(states) < self.last + 2 + _WAITING else self._stack(states)

    def finish(self, states: States, weights: tuple[Read, ...], dims: Dims) -> Tensor:
        return materialize(self.read(states, weights, dims.depth + 1)[0])  # type: ignore[arg-type]

    def matrix(self, weights: tuple[Read, ...], dims: Dims) -> Tensor:
        """b, float32 [T + 1, T + 1]; increments that were summed share a weight."""
        table = torch.zeros(dims.depth + 1, dims.depth + 1, device=weights[0].b.device)
        for t, (b, *_) in enumerate(weights, start=1):
            row = b.transpose(0, 1).flatten(1).mean(1)  # over ways and channels: [N]
            table[t - 1, :t] = row[self._places(t, len(row))]
        return table

    def by_destination(self, weights: tuple[Read, ...], dims: Dims) -> dict[str, Tensor]:
        """The biases b, of each way and channel."""
        found = {}
        for t, (b, *_) in enumerate(weights, start=1):
            name = f"unit {t}" if t <= dims.depth else "output"
            found[name] = b[:, self._places(t, b.shape[1])]
        return found

    def program(self, weights: tuple[Read, ...], dims: Dims) -> Program:
        if self.input_dependent:
            return super().program(weights, dims)
        units, stack = list[Unit](), ["x0"]
        for t in range(1, dims.depth + 1):
            read = Line(f"r{t}", _terms(stack, weights[t - 1]))
            stack, summed = [*stack, branch_of(t)], tuple[Line, ...]()
            if len(stack) > weights[t].b.shape[1]:  # two of them are one in the next read: the newest, or the oldest
                first = len(stack) - 2 if self.last is None else 1
                line = Line(f"s{t}", (Term(stack[first], 1.0), Term(stack[first + 1], 1.0)))
                stack, summed = [*stack[:first], line.target, *stack[first + 2 :]], (line,)
            units.append(Unit((read,), read.target, summed))
        output = Line("out", _terms(stack, weights[dims.depth]))
        columns = ["x0", *(branch_of(t) for t in range(1, dims.depth + 1))]
        return Program(tuple(units), (output,), "out", (*(unit.read for unit in units), "out"), tuple(columns))

    def _sizes(self, dims: Dims) -> list[int]:
        """For t = 1..T+1 in turn, the vectors in the stack."""
        counts = [groups.count(t, self.block) for t in range(1, dims.depth + 2)]
        return counts if self.last is None else [min(n, self.last + 2) for n in counts]

    def _stack(self, states: States) -> States:
        """``G_t``: with ``last``, increments that wait for the middle sum are added to it."""
        if self.last is None or len(states) <= self.last + 2:
            return states
        return (states[0], total(states[1 : -self.last]), *states[-self.last :])

    def _places(self, t: int, vectors: int) -> list[int]:
        """For ``f_0 .. f_{t-1}`` in turn, which vector of the stack of unit t it is part of."""
        if self.last is None:
            return [groups.group(i, self.block) for i in range(t)]
        return [0, *(max(1, i - (t - vectors)) for i in range(1, t))]

    def _ways(self, dims: Dims) -> list[int]:
        """For t = 1..T+1 in turn, how many GRN instances read."""
        return [1] * (dims.depth + 1)


@register_topology("grn-v1")
@dataclasses.dataclass(frozen=True)
class GRNv1(GRN):
    """Each unit reads a weighted sum of all increments, one scalar each (GRN-v1, arXiv 2502.06785).

    ``r_t = sum_{i<t} b_ti f_i``, output ``sum_{i<=T} b_{T+1,i} f_i``. Options, starts and stack: see `GRN`.
    """


@register_topology("grn-v2")
@dataclasses.dataclass(frozen=True)
class GRNv2(GRN):
    """Each unit reads a weighted sum of all increments, with weights per channel (GRN-v2, arXiv 2502.06785).

    ``r_t = sum_{i<t} b_ti * f_i`` with ``b_ti`` in R^D; the output likewise. Options, starts and stack: see `GRN`.
    """

    needs_width: ClassVar[bool] = True


@register_topology("grn-v3")
@dataclasses.dataclass(frozen=True)
class GRNv3(GRN):
    """Each unit reads a weighted sum of all increments, partly input-dependent (GRN-v3, arXiv 2502.06785).

    ``r_t = sum_{i<t} (b_ti + relu(w_t . f_i)) * f_i`` with ``b_ti, w_t`` in R^D, the dot product per token; the
    output likewise. Options, starts and stack: see `GRN`. At ``w = 0`` a relu with derivative 0 would never learn;
    this one has derivative 1 there.
    """

    needs_width: ClassVar[bool] = True
    input_dependent: ClassVar[bool] = True


@register_topology("dca")
@dataclasses.dataclass(frozen=True)
class DCA(GRNv3):
    """DeepCrossAttention: queries, keys and values each read their own GRN-v3 mix (DCA, arXiv 2502.06785).

    A unit that begins with an attention has three independent GRN-v3 reads of the same stack (Section 3.2). The
    shortcut around the attention, into the feed-forward's input, carries the one for the queries (Section 3.2 says
    "the inputs", without saying which of the three). Other units and the output have a single GRN-v3. ``last=k`` is
    the paper's k-DCA. Options, starts and stack: see `GRN`. In unit 1, ``w_1`` of k and v, too, is no more than a
    scale that a norm before the projections removes.

    With ``separate_norms=True`` the three reads pass a norm each: copies of the one that the model has, which stays
    that of q.
    """

    reads_qkv: ClassVar[bool] = True

    separate_norms: bool = False

    def parameters(self, dims: Dims, start: Start) -> dict[str, Tensor]:
        """As in `GRN`.

        Raises:
            UnsupportedTopology: no unit of the trunk begins with an attention.
        """
        if not dims.attention:
            raise no_attention(self, dims.depth, "use grn-v3")
        return super().parameters(dims, start)

    def _ways(self, dims: Dims) -> list[int]:
        return [3 if t in dims.attention else 1 for t in range(1, dims.depth + 2)]


def _seen(ways: Sequence[Tensor | Mix]) -> Tensor | Mix | QKVInputs:
    """What a unit reads in one way or three."""
    if len(ways) == 1:
        return ways[0]
    q, k, v = map(materialize, ways)
    return QKVInputs(q, k, v, residual=q)


def _terms(stack: Sequence[str], read: Read) -> tuple[Term, ...]:
    """The weighted sum of the stack, for a single way."""
    (b,) = read.b  # [N] or [N, D]
    weights = b.tolist() if b.dim() == 1 else b.unbind()
    return tuple(Term(name, weight) for name, weight in zip(stack, weights, strict=True))
