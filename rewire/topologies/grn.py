"""Generalised residual networks and DeepCrossAttention: every read mixes all increments (arXiv 2502.06785)."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from rewire.errors import check_count
from rewire.mixes.claimed import Table
from rewire.mixes.history import Free, History
from rewire.mixes.mix import Mix, pending_mix
from rewire.mixes.several import mixes
from rewire.mixes.tokens import at_least_zero, project
from rewire.topologies.base import Dims, Granularity, QKVInputs, Start, States, no_attention, total
from rewire.topologies.dense import DenseIncrements
from rewire.topologies.registry import register_topology
from rewire.topologies.wiring import QKV, Channel, Few

#: With ``last``, how many increments are added to the middle sum at once: activation checkpointing keeps every such
#: sum. This number takes the least memory for 32 units (benchmarks/memory.py).
_WAITING = 6


class Read(NamedTuple):
    """Weights of one unit's read, or of the output, float32: one GRN instance per way.

    Attributes:
        b: [ways, N] or [ways, N, D] for a stack of N vectors.
        w: [D, ways], None if the weights do not depend on the input.
    """

    b: Tensor
    w: Tensor | None = None


#: A mapping by t if the stack is not the plain list of sources.
Weights = Table | Few | Mapping[int, Read]


@dataclasses.dataclass(frozen=True)
class GRN(DenseIncrements[Weights]):
    """Base of the generalised residual networks (arXiv 2502.06785, Section 3.1).

    The states are the stack ``G_t = [f_0, .., f_{t-1}]`` with ``f_0 = x_0``. Unit t reads a weighted sum of it and
    appends ``f_t``; one more read of ``G_{T+1}`` is the trunk's output. With ``last=k`` the stack is ``x_0``, the sum
    of the middle increments and the last k increments: at most k + 2 vectors. (Up to 5 more are held: increments are
    added to the middle sum 6 at a time, so that not every unit makes a new sum.)

    With ``block=S`` (ours; see `dense`) increments are summed over groups of S units: the stack is ``x_0``, the sums
    ``g_j = f_{(j-1)S+1} + .. + f_{jS}`` of finished groups, and that of the current one if it has an increment yet. So
    ``r_t = b_t0 x_0 + sum_j b_tj g_j``, and likewise for weights that depend on the input.

    With ``units`` and ``sources`` (ours; see `dense`) only some units read a mix, of a stack with the increments that
    are named and the sum of all others; other units read the plain sum of all.

    **Both starts** are the paper's, ``b = 1`` and ``w = 0``: ``x_0 + f_1 + .. + f_{t-1}`` is the original network, in
    the same order and so bitwise in float32 and float64 (with ``last`` and ``block`` to rounding: sums come first).
    Nothing is normalised or saturated, so b and w have full gradients. If every branch starts at zero output, only
    the output's ``b_{T+1,0}`` and ``w_{T+1}`` have a gradient at first; all others move from the second step on.

    Before a norm only the ratios of weights count. So unit 1, whose stack is only ``x_0``, learns next to nothing by a
    weight that all channels share (``b_1`` of GRN-v1, ``w_1``) if its read only goes into a norm.

    Args:
        last: number of increments that stay separate at the end of the stack, 1 or more; None: all.
        block: S, 1 or more; None is 1, no groups.

    Raises:
        ValueError: an option is below 1, or two of them sum increments.
    """

    granularity: ClassVar[Granularity] = "block"  # Section 5, Table 6: one GRN per decoder block
    of_states: ClassVar[frozenset[str]] = frozenset({"b"})
    of_vectors: ClassVar[frozenset[str]] = frozenset({"w"})
    #: Whether weights also depend on the sources.
    input_dependent: ClassVar[bool] = False

    last: int | None = None
    block: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("last", self.last, 1, optional=True)
        if self.last is not None and self.block not in (None, 1):
            raise ValueError(f"last={self.last} and block={self.block} sum different increments: pass one of them.")
        if self.last is not None and self.few:
            raise ValueError(f"last={self.last} chooses increments, as units= and sources= do: leave out one of them.")

    def parameters(self, dims: Dims, start: Start) -> dict[str, Tensor]:
        """``b`` and, if input-dependent, ``w``, float32.

        ``b`` is [P], or [P, D] for weights per channel: for each t = 1..T+1 (the output is T+1), for each of its ways
        (q, k, v, or a single one), one entry for each vector of the stack. ``w`` is [R, D]: one row for each way of
        each t.
        """
        parameters = {"b": torch.ones(sum(self.weight_counts(dims)), *((dims.width,) if self.needs_width else ()))}
        if self.input_dependent:
            parameters["w"] = torch.zeros(sum(self.ways(dims)), dims.width)
        return parameters

    def unit_rows(self, dims: Dims) -> dict[str, list[int]]:
        return {"b": self.each(dims, self.weight_counts(dims)), "w": self.each(dims, self.ways(dims))}

    def weights(self, parameters: dict[str, Tensor], dims: Dims) -> Weights:
        b, ways = parameters["b"].float(), self.ways(dims)
        w = parameters["w"].float() if self.input_dependent else None
        if self.last is None and not self.few:
            return Table(b, ways, self.mixing(dims)[0], group=self.group, queries=w)
        flat = b.split(self.weight_counts(dims))
        rows = [part.unflatten(0, (m, -1)) for part, m in zip(flat, ways, strict=True)]
        queries = [None] * len(rows) if w is None else [row.T for row in w.split(ways)]
        return self.by_read(dims, map(Read, rows, queries))

    def mix(self, history: History, weights: Weights, t: int) -> Tensor | Mix | QKVInputs:
        row = weights[t]
        if not isinstance(row, Read):
            return self.seen(history.mixes(row), weights, t, history.newest)
        stack, (b, w) = self._stack(history.states), row
        scores = [] if w is None else [at_least_zero(project(f, w)) for f in stack]  # each [..., ways]
        found: Sequence[Tensor | Mix] = [pending_mix(stack, b[0], scores=scores)]
        if len(b) > 1:
            found = mixes(stack, b, torch.stack(scores, dim=-1))[0]
        return self.seen(found, weights, t, history.newest)

    def drops(self, dims: Dims) -> Collection[int]:
        return super().drops(dims) if self.last is None else range(1, dims.depth + 1)

    def write(self, states: States, weights: Weights, t: int, *branches: Tensor) -> States:
        f, history = super().write(states, weights, t, *branches)
        if self.last is None or len(history.states) + 1 < self.last + 2 + _WAITING:
            return f, history
        return f, Free().holding(self._stack((*history.states, f))[:-1])

    def static(self, weights: Weights, t: int) -> Tensor:
        """b, averaged over the ways."""
        return self._b(weights, t).mean(0)

    def by_destination(self, weights: Weights, dims: Dims) -> dict[str, Tensor]:
        """The static weights b, for each way and channel."""
        reads = [(f"unit {t}" if t <= dims.depth else "output", t) for t in self.mixing(dims)]
        return {name: self._b(weights, t)[:, self._places(t, dims)] for name, t in reads}

    def is_static(self, weights: Weights) -> bool:
        return not self.input_dependent

    def sizes(self, dims: Dims) -> list[int]:
        counts = super().sizes(dims)
        return counts if self.last is None else [min(n, self.last + 2) for n in counts]

    def _b(self, weights: Weights, t: int) -> Tensor:
        """b of read t, [ways, N] or [ways, N, D]."""
        return weights.rows[t - weights.blocks.first] if isinstance(weights, Table) else weights[t].b

    def _stack(self, states: States) -> States:
        """``G_t``; with ``last``, adds waiting increments to the middle sum."""
        if self.last is None or len(states) <= self.last + 2:
            return states
        return (states[0], total(states[1 : -self.last]), *states[-self.last :])

    def _places(self, t: int, dims: Dims) -> Sequence[int]:
        if self.last is None:
            return super()._places(t, dims)
        return [0, *(max(1, i - max(0, t - self.last - 2)) for i in range(1, t))]

    def _summed(self, sources: int) -> int:
        return super()._summed(sources) if self.last is None else 1


@register_topology("grn-v1")
@dataclasses.dataclass(frozen=True)
class GRNv1(GRN):
    """Each unit reads a weighted sum of all increments, with scalar weights (GRN-v1, arXiv 2502.06785).

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
    output likewise. Options, starts and stack: see `GRN`. This relu has derivative 1 at 0; with derivative 0, weights
    that start at ``w = 0`` would never learn.
    """

    needs_width: ClassVar[bool] = True
    by_token: ClassVar[bool] = True
    input_dependent: ClassVar[bool] = True


@register_topology("dca")
@dataclasses.dataclass(frozen=True)
class DCA(GRNv3):
    """DeepCrossAttention: queries, keys and values each read their own GRN-v3 mix (DCA, arXiv 2502.06785).

    A unit that begins with an attention has three independent GRN-v3 reads of the same stack (Section 3.2). The
    shortcut around the attention, into the feed-forward's input, takes the read of the queries (Section 3.2 says "the
    inputs", without saying which of the three). Other units and the output have a single GRN-v3 read. ``last=k`` is the
    paper's k-DCA. Options, starts and stack: see `GRN`. In unit 1, ``w_1`` of k and v is only a scale, too, which a
    norm before the projections removes.

    With ``separate_norms=True`` each of the three reads has its own norm: q the model's, k and v copies of it.

    With ``channels`` only the named inputs of attentions have a read, and the others take the plain stream; the
    shortcut takes that of q. Other units, and the output, have a read if "shortcut" is named.
    """

    reads_qkv: ClassVar[bool] = True
    inputs: ClassVar[tuple[Channel, ...]] = QKV

    separate_norms: bool = False
    channels: tuple[Channel, ...] | None = None

    def parameters(self, dims: Dims, start: Start) -> dict[str, Tensor]:
        """As in `GRN`.

        Raises:
            UnsupportedTopology: no unit of the trunk begins with an attention.
        """
        if not (dims.attention or self.few):
            raise no_attention(self, dims.depth, "use grn-v3")
        return super().parameters(dims, start)
