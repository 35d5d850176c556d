"""Topologies whose units mix all that earlier units left, and the option ``block=S``, units in groups.

Read t has t sources: ``x_0``, and what each of the units 1..t-1 left: its state, or its increment. Read T + 1 is the
trunk's output.

With ``block=S``, S units in turn are a group, the last one perhaps fewer, so that fewer sources are held: ``x_0``, and
what each group left, the current one as far as it has come, ``1 + ceil((t - 1) / S)`` of them. That follows Block
AttnRes (arXiv 2603.15031), in two forms:

- Of topologies that mix increments, a group leaves its sum: ``g_j = f_{(j-1)S+1} + .. + f_{jS}``.
- Of topologies that mix states, a group leaves its last state, ``x_{jS}``: read t mixes the states of
  ``K_t = {0, S, 2S, .. < t}`` and the newest, ``x_{t-1}``.

These are the same choice. A state is a sum already: in the plain residual network ``x_{jS} = x_0 + g_1 + .. + g_j``, so
that mixes of the ``x_{jS}`` are mixes of ``x_0`` and the ``g_j``, and nothing that a unit computed is lost. Every S-th
increment would lose the others; sums of states would count increments of early units S times. Every unit still has a
mix of its own, and S = 1 is no groups.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from rewire.mixes.by_state import parts
from rewire.mixes.history import Free, History, Table
from rewire.mixes.mix import Mix
from rewire.topologies.base import Dims, QKVInputs, Recurrence, States, Topology, W, materialize, total
from rewire.topologies.program import Line, Program, Term, Unit, Weight, branch_of


def count(t: int, block: int | None) -> int:
    """Sources of read t."""
    return 1 - (1 - t) // (block or 1)


class _Dense(Topology[W]):
    """What both forms share. The states are the newest source, and a `History` of those that have been read."""

    #: The first read that is a mix: before it, units read the newest source.
    first: ClassVar[int] = 1
    #: S, units in a group. A topology that offers the option has a field of this name.
    block: int | None = None

    @abstractmethod
    def mix(self, history: Any, weights: W, t: int) -> Tensor | Mix | QKVInputs:
        """``r_t``, what unit t reads: the formula. For t = T + 1 it is the trunk's output.

        Args:
            history: the sources of this read; ``history.mix(..)`` is their weighted sum: see `History`.
            weights: as `weights` returned them.
            t: from `first` on.
        """

    def static(self, weights: W, t: int) -> Tensor:
        """The part of read t's weights that does not depend on the input, [n] or [n, D]: the mean of its ways."""
        if isinstance(weights, Table):
            return weights.rows[t - weights.blocks.first].mean(0)
        raise NotImplementedError(f"{type(self).__name__} has weights of its own, and no method `static` to show them.")

    # -- sizes ---------------------------------------------------------------------------------------------------------

    def reads(self, dims: Dims) -> range:
        """The numbers t of all reads from `first` on, the output's included."""
        return range(self.first, dims.depth + 2)

    def mixing(self, dims: Dims) -> range:
        """Those of them that have weights."""
        return self.reads(dims)

    def sources(self, t: int) -> Sequence[int]:
        """The numbers i of the ``x_i`` that read t mixes. Where they are increments, there are as many."""
        return [min(n * (self.block or 1), t - 1) for n in range(count(t, self.block))]

    def sizes(self, dims: Dims) -> list[int]:
        """For each read that has weights, how many sources it mixes."""
        return [len(self.sources(t)) for t in self.mixing(dims)]

    def of_reads(self, dims: Dims, flat: Tensor) -> dict[int, Tensor]:
        """Of weights [K, ..] in which those of all reads stand one after the other, by t those of read t, [n, ..]."""
        return dict(zip(self.mixing(dims), parts(flat, self.sizes(dims)), strict=True))

    def table(self, dims: Dims, flat: Tensor) -> Table:
        """The same, of weights [K] or [K, D] that are known before the sources are: what `weights` may return.

        Each source then gets its gradients from all reads in one pass over memory.
        """
        reads = self.mixing(dims)
        return Table(flat, len(reads), reads.start, group=self.block or 1)

    # -- the topology --------------------------------------------------------------------------------------------------

    def start(self, x: Tensor, weights: W) -> States:
        table = weights if isinstance(weights, Free) else Free(self.block or 1)
        return x, table.history()

    def finish(self, states: States, weights: W, dims: Dims) -> Tensor:
        value, _ = self._read(states, weights, dims.depth + 1)
        assert not isinstance(value, QKVInputs)
        return materialize(value)

    def _read(self, states: States, weights: W, t: int) -> tuple[Tensor | Mix | QKVInputs, History]:
        newest, history = states
        history = history.read(t, newest)
        return (history.newest if t < self.first else self.mix(history, weights, t)), history

    def matrix(self, weights: W, dims: Dims) -> Tensor:
        """float32 [reads, sources]: of each read from `first` on, the static weights of all that units left so far."""
        static = {t: self.static(weights, t) for t in self.mixing(dims)}
        reads = self.reads(dims)
        table = torch.eye(reads.stop - 1, device=next(iter(static.values())).device)[reads.start - 1 :]  # the newest
        for t, row in static.items():
            table[t - reads.start] = 0
            table[t - reads.start, self._columns(t)] = (row if row.dim() == 1 else row.mean(1))[self._places(t)]
        return table

    def _columns(self, t: int) -> Sequence[int]:
        """The columns of the matrix that read t has weights of."""
        return self.sources(t)

    def _places(self, t: int) -> Sequence[int]:
        """For each of them, the number of the weight."""
        return range(len(self.sources(t)))

    def program(self, weights: W, dims: Dims) -> Program:
        """Where all weights are known before the sources are."""
        if not self.is_static(weights):
            return super().program(weights, dims)
        static = {t: self.static(weights, t).detach().cpu() for t in self.mixing(dims)}
        return self._program({t: row.tolist() if row.dim() == 1 else row.unbind() for t, row in static.items()}, dims)

    def is_static(self, weights: W) -> bool:
        """Whether no weight depends on the input."""
        return isinstance(weights, Table) and not weights.queries

    @abstractmethod
    def _program(self, static: Mapping[int, Sequence[Weight]], dims: Dims) -> Program:
        """`program`, of the weights of each read."""


class Dense(_Dense[W], Recurrence[W]):
    """A topology whose units read a mix of all states so far: ``r_t = sum_i w_ti x_i`` and ``x_t = r_t + f_t``.

    A subclass has `parameters`, `weights`, and the formula, `mix`; `static` if its weights are no `table`. Unit 1 reads
    ``x_0``; mixes are those of units 2..T and the output, read T + 1. Post-norm blocks norm ``r_t + f_t``.

    Example:
        >>> class Averages(rewire.Dense):
        ...     'Each unit reads a learned weighted sum of all states.'
        ...     def parameters(self, dims, start):
        ...         return {"a": torch.cat([torch.eye(n)[-1] for n in self.sizes(dims)])}
        ...     def weights(self, parameters, dims):
        ...         return self.table(dims, parameters["a"])
        ...     def mix(self, history, weights, t):
        ...         return history.mix(weights[t])
        >>> averaged = rewire.compile(model, Averages(), example_inputs=(x,))
    """

    first: ClassVar[int] = 2

    def read(self, states: States, weights: W, t: int) -> tuple[Tensor | QKVInputs, States]:
        read, history = self._read(states, weights, t)
        value = read if isinstance(read, QKVInputs) else materialize(read)
        residual = value.residual if isinstance(value, QKVInputs) else value
        # A newest state inside a group is held while the branch runs only if it is read itself.
        return value, (residual, history if residual is history.newest else history.kept)

    def merge(self, states: States, weights: W, t: int, *branches: Tensor) -> Tensor | Mix:
        return total((states[0], *branches))  # in the model's own order: bitwise equality at the start

    def push(self, states: States, weights: W, t: int, x: Tensor) -> States:
        return x, states[1].kept

    def _program(self, static: Mapping[int, Sequence[Weight]], dims: Dims) -> Program:
        units, read = list[Unit](), "x0"
        for t in range(1, dims.depth + 1):
            written = Line(f"x{t}", (Term(read, 1.0, fixed=True), Term(branch_of(t), 1.0)))
            mixed = zip(self.sources(t + 1), static[t + 1], strict=True) if t + 1 in static else [(t, 1.0)]
            following = Line(f"r{t + 1}", tuple(Term(f"x{i}", w) for i, w in mixed))
            units.append(Unit((), read, (written, following)))
            read = following.target
        reads = tuple(f"r{t}" for t in self.reads(dims))
        return Program(tuple(units), (), read, reads, tuple(f"x{t}" for t in range(dims.depth + 1)))


class DenseIncrements(_Dense[W]):
    """A topology whose units read a mix of what earlier units added: ``r_t = sum_i w_ti f_i`` with ``f_0 = x_0``.

    As `Dense`; mixes are those of units 1..T and the output, and with all weights 1 it is the original network. It
    connects no post-norm blocks.

    Example:
        >>> class Sums(rewire.DenseIncrements):
        ...     'Each unit reads a learned weighted sum of all increments.'
        ...     def parameters(self, dims, start):
        ...         return {"b": torch.ones(sum(self.sizes(dims)))}
        ...     def weights(self, parameters, dims):
        ...         return self.table(dims, parameters["b"])
        ...     def mix(self, history, weights, t):
        ...         return history.mix(weights[t])
        >>> summed = rewire.compile(model, Sums(), example_inputs=(x,))
    """

    def read(self, states: States, weights: W, t: int) -> tuple[Tensor | Mix | QKVInputs, States]:
        value, history = self._read(states, weights, t)
        return value, (history.newest, history.kept)

    def write(self, states: States, weights: W, t: int, *branches: Tensor) -> States:
        newest, history = states
        f = total(branches)
        return (newest + f if (t - 1) % (self.block or 1) else f), history

    def _columns(self, t: int) -> Sequence[int]:
        return range(t)

    def _places(self, t: int) -> Sequence[int]:
        return [-(-i // (self.block or 1)) for i in range(t)]

    def _program(self, static: Mapping[int, Sequence[Weight]], dims: Dims) -> Program:
        units, stack = list[Unit](), ["x0"]
        for t in range(1, dims.depth + 2):
            read = Line(f"r{t}", tuple(map(Term, stack, static[t])))
            stack, summed = [*stack, branch_of(t)], tuple[Line, ...]()
            if t <= dims.depth and len(stack) > len(static[t + 1]):  # the next read has two of them as one
                n = self._summed(len(stack))
                summed = (Line(f"s{t}", (Term(stack[n], 1.0), Term(stack[n + 1], 1.0))),)
                stack = [*stack[:n], f"s{t}", *stack[n + 2 :]]
            units.append(Unit((read,), read.target, summed))
        *units, output = units
        reads, columns = [f"r{t}" for t in self.reads(dims)], ["x0", *map(branch_of, range(1, dims.depth + 1))]
        return Program(tuple(units), output.before, output.read, tuple(reads), tuple(columns))

    def _summed(self, sources: int) -> int:
        """The first of the two of so many sources that are summed next."""
        return sources - 2
