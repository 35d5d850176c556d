"""Topologies whose units mix the states or increments of all earlier units; the option ``block=S`` groups units.

Read t has t sources: ``x_0``, and the state or the increment of each of the units 1..t-1. Read T + 1 is the trunk's
output.

With ``block=S``, S consecutive units are a group (the last group may be smaller), so that fewer sources are held:
``x_0``, and one for each group, including the incomplete current one, ``1 + ceil((t - 1) / S)`` in all. This follows
Block AttnRes (arXiv 2603.15031), in two forms:

- In topologies that mix increments, a group's source is its sum: ``g_j = f_{(j-1)S+1} + .. + f_{jS}``.
- In topologies that mix states, a group's source is its last state, ``x_{jS}``: read t mixes the states of
  ``K_t = {0, S, 2S, .. < t}`` and the newest, ``x_{t-1}``.

Both are the same choice. A state is already a sum: in the plain residual network ``x_{jS} = x_0 + g_1 + .. + g_j``, so
mixes of the ``x_{jS}`` are mixes of ``x_0`` and the ``g_j``, and no unit's increment is lost. Taking every S-th
increment would lose the others; sums of states would count increments of early units S times. Every unit still has its
own mix, and S = 1 means no groups.

With ``units=`` and ``sources=`` only some units read a mix, and only of some sources (see `wiring`). All other units
are connected as in the plain network, and only sources that a later read mixes are held. If sources are states, the
newest is always one. If they are increments, those that are not named form one source, their sum, so that a read still
gets all increments, each with a weight.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from rewire.errors import check_count
from rewire.mixes.by_state import parts
from rewire.mixes.claimed import Table
from rewire.mixes.history import Free, History
from rewire.mixes.mix import Mix
from rewire.topologies.base import Dims, QKVInputs, Recurrence, States, Topology, W, materialize, total
from rewire.topologies.program import Line, Program, Term, Unit, Weight, branch_of
from rewire.topologies.wiring import (
    CHANNELS,
    QKV,
    REST,
    Channel,
    Few,
    Sources,
    Units,
    checked_channels,
    checked_sources,
    checked_units,
    placed,
    wired,
)


def count(t: int, block: int | None) -> int:
    """Number of sources of read t."""
    return 1 - (1 - t) // (block or 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Dense(Topology[W]):
    """Base of both forms. The states are the newest source, and a `History` of those that have been read.

    With `Few` connections, they are ``x_{t-1}``, and a history of the sources that later reads mix.

    Args:
        units: which units read a mix: numbers from 1, or from -1 at the end; "output"; at ``granularity="sublayer"``
            also kinds of branches, like "attention". None: all.
        sources: which sources they mix: numbers (0 or "x0" is the trunk's input; -1, -2, .. count back from the unit
            that reads); or, in place of both options, a dict of such lists by unit. None: all.
    """

    #: The first read that is a mix: units before it read the newest source.
    first: ClassVar[int] = 1
    #: Whether sources are states, which always include the newest, rather than increments.
    states: ClassVar[bool]
    #: The inputs of an attention that have separate reads. The shortcut, if not among them, takes the read of q.
    inputs: ClassVar[tuple[Channel, ...]] = ()

    units: Units = None
    sources: Sources = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "units", checked_units(self.units))
        object.__setattr__(self, "sources", checked_sources(self.sources))
        if hasattr(self, "channels"):
            object.__setattr__(self, "channels", checked_channels(self.channels))
        check_count("block", getattr(self, "block", None), 1, optional=True)
        if self.few and self.group > 1:
            raise ValueError(f"block={self.group} chooses sources, as units= and sources= do: leave out one of them.")

    @property
    def few(self) -> bool:
        """Whether options omit connections."""
        chosen = (self.units, self.sources, getattr(self, "channels", None))
        return any(one is not None for one in chosen)

    @property
    def has_program(self) -> bool:
        """Whether reads are only weighted sums of their sources."""
        return True

    @property
    def group(self) -> int:
        """S, the number of units in a group: the option ``block``, if the topology has it."""
        return getattr(self, "block", None) or 1

    def placed(self, kinds: Sequence[str]) -> Topology[W]:
        return self if self.units is None else dataclasses.replace(self, units=placed(self.units, kinds))

    def attention_units(self, dims: Dims) -> Collection[int]:
        return dims.attention.intersection(self.mixing(dims)) if self.few else dims.attention

    def norms_again(self, dims: Dims) -> Collection[int]:
        return self.wired(dims) if self.few else super().norms_again(dims)

    def drops(self, dims: Dims) -> Collection[int]:
        return self.wired(dims) if self.few else ()

    def separate(self, t: int, dims: Dims) -> tuple[Channel, ...] | None:
        """The inputs of unit t with separate reads; empty if it has one read for all; None if it reads no mix."""
        chosen: tuple[Channel, ...] = getattr(self, "channels", None) or CHANNELS
        if self.inputs and t in dims.attention:
            return tuple(channel for channel in chosen if channel in self.inputs) or None
        return () if "shortcut" in chosen else None

    def seen(self, ways: Sequence[Tensor | Mix], weights: W, t: int, plain: Tensor) -> Tensor | Mix | QKVInputs:
        """What unit t reads, from the ways of its read; inputs without a way get ``plain``."""
        channels = weights.channels[t] if isinstance(weights, Few) else self.inputs if len(ways) > 1 else ()
        if not channels:
            return ways[0]
        found = dict(zip(channels, map(materialize, ways), strict=True))
        q, k, v = (found.get(channel, plain) for channel in QKV)
        return QKVInputs(q, k, v, residual=found.get("shortcut", plain if "shortcut" in self.inputs else q))

    @abstractmethod
    def mix(self, history: History, weights: W, t: int) -> Tensor | Mix | QKVInputs:
        """The formula of ``r_t``, what unit t reads; for t = T + 1, of the trunk's output.

        Args:
            history: the sources of this read; ``history.mix(..)`` is their weighted sum: see `History`.
            weights: the result of `weights`.
            t: number of the read, from `first` on.
        """

    def static(self, weights: W, t: int) -> Tensor:
        """The input-independent part of read t's weights, [n] or [n, D], averaged over its ways."""
        if isinstance(weights, Table):
            return weights.rows[t - weights.blocks.first].mean(0)
        if isinstance(weights, Few) and isinstance(weights[t], Tensor):
            return weights[t]
        raise NotImplementedError(f"{type(self).__name__} has weights of its own, and no method `static` to show them.")

    def reads(self, dims: Dims) -> range:
        """The numbers t of all reads from `first` on, including the output."""
        return range(self.first, dims.depth + 2)

    def mixing(self, dims: Dims) -> Sequence[int]:
        """The reads that have weights."""
        return [t for t in (self.wired(dims) if self.few else self.reads(dims)) if dims.has(t)]

    def wired(self, dims: Dims) -> dict[int, tuple[int, ...]]:
        """With few connections, the sources of each read that has weights."""
        reads = [t for t in self.reads(dims) if self.separate(t, dims) is not None]
        return wired(self.registered_name, self.units, self.sources, dims.depth, reads, self.states)

    def sources_of(self, t: int, dims: Dims) -> Sequence[int]:
        """The numbers i of the ``x_i`` that read t mixes; for increments, a sequence of the same length."""
        if self.few:
            return self.wired(dims)[t]
        size = self.group
        return [*range(t)] if size == 1 else [min(n * size, t - 1) for n in range(count(t, size))]

    def sizes(self, dims: Dims) -> list[int]:
        """For each read that has weights, its number of sources."""
        wired = self.wired(dims) if self.few else {}  # once, as each call computes it for all reads
        return [len(wired[t] if t in wired else self.sources_of(t, dims)) for t in self.mixing(dims)]

    def ways(self, dims: Dims) -> list[int]:
        """For each read that has weights, its number of ways: the unit's inputs with separate mixes."""
        return [len(self.separate(t, dims) or ("shortcut",)) for t in self.mixing(dims)]

    def weight_counts(self, dims: Dims) -> list[int]:
        """For each read that has weights, their number: one for each way and source."""
        return [ways * n for ways, n in zip(self.ways(dims), self.sizes(dims), strict=True)]

    def of_reads(self, dims: Dims, flat: Tensor) -> dict[int, Tensor]:
        """Split the concatenated weights [K, ..] of all reads: t -> the weights of read t, [n, ..]."""
        return dict(zip(self.mixing(dims), parts(flat, self.sizes(dims)), strict=True))

    def table(self, dims: Dims, flat: Tensor) -> Table | Few:
        """The result of `weights` for input-independent weights [K] or [K, D].

        Each source then gets its gradients from all reads in one pass over memory.
        """
        if self.few:
            return self.by_read(dims, self.of_reads(dims, flat).values())
        reads = self.mixing(dims)
        return Table(flat, len(reads), reads[0], group=self.group)

    def by_read(self, dims: Dims, rows: Iterable[object]) -> Any:
        """The result of `weights` from a row for each read that has weights: by t, or a `Few` with few connections."""
        rows_of = dict(zip(self.mixing(dims), rows, strict=True))
        if not self.few:
            return rows_of
        found = self.wired(dims)
        return Few(found, rows_of, {t: self.separate(t, dims) or () for t in found}, self.states)

    def each(self, dims: Dims, sizes: Iterable[int]) -> list[int]:
        """Row counts for `unit_rows`: ``sizes`` for the reads that have weights, 0 for other units."""
        found = dict(zip(self.mixing(dims), sizes, strict=True))
        return [found.get(t, 0) for t in range(1, dims.depth + 2)]

    def start(self, x: Tensor, weights: W) -> States:
        table = weights if isinstance(weights, Free) else Free(self.group)
        return x, table.history()

    def finish(self, states: States, weights: W, dims: Dims) -> Tensor:
        value, *_ = self._read(states, weights, dims.depth + 1)
        assert not isinstance(value, QKVInputs)
        return materialize(value)

    def newest(self, states: States, weights: W, t: int) -> tuple[int, ...]:
        return (0,) if isinstance(weights, Few) and t not in weights else ()

    def _read(self, states: States, weights: W, t: int) -> tuple[Tensor | Mix | QKVInputs, History]:
        """What unit t reads, and the history after the read."""
        newest, history = states
        history = history.read(t, newest)
        plain = t not in weights if isinstance(weights, Few) else t < self.first
        return (history.newest if plain else self.mix(history, weights, t)), history

    def matrix(self, weights: W, dims: Dims) -> Tensor:
        """float32 [reads, sources]: for each read from `first` on, its static weights of all earlier sources."""
        static = {t: self.static(weights, t) for t in self.mixing(dims)}
        reads = self.reads(dims)
        device = next(iter(static.values())).device
        plain = torch.eye(reads.stop - 1, dtype=torch.float32, device=device)  # the newest
        table = (plain if self.states else torch.ones_like(plain).tril())[reads.start - 1 :]
        for t, row in static.items():
            table[t - reads.start] = 0
            columns = list(self._columns(t, dims))
            table[t - reads.start, columns] = (row if row.dim() == 1 else row.mean(1))[list(self._places(t, dims))]
        return table

    def _columns(self, t: int, dims: Dims) -> Sequence[int]:
        """The columns of the matrix in which read t has weights."""
        return self.sources_of(t, dims)

    def _places(self, t: int, dims: Dims) -> Sequence[int]:
        """For each of these columns, the number of the weight."""
        return range(len(self.sources_of(t, dims)))

    def program(self, weights: W, dims: Dims) -> Program:
        """As in `Topology`, if no weight depends on the input."""
        if not self.is_static(weights):
            return super().program(weights, dims)
        static = {t: self.static(weights, t).detach().cpu() for t in self.mixing(dims)}
        return self._program({t: row.tolist() if row.dim() == 1 else row.unbind() for t, row in static.items()}, dims)

    def is_static(self, weights: W) -> bool:
        """Whether no weight depends on the input."""
        if isinstance(weights, Few):
            return all(isinstance(weights[t], Tensor) for t in weights.sources)
        return isinstance(weights, Table) and not weights.queries

    @abstractmethod
    def _program(self, static: Mapping[int, Sequence[Weight]], dims: Dims) -> Program:
        """`program`, from the weights of each read."""


class Dense(_Dense[W], Recurrence[W]):
    """A topology whose units read a mix of all states so far: ``r_t = sum_i w_ti x_i`` and ``x_t = r_t + f_t``.

    A subclass defines `parameters`, `weights`, and the formula, `mix`; also `static` if its weights are not a `table`.
    Unit 1 reads ``x_0``; units 2..T and the output, read T + 1, read mixes. Post-norm blocks norm ``r_t + f_t``.

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
    states: ClassVar[bool] = True

    def read(self, states: States, weights: W, t: int) -> tuple[Tensor | QKVInputs, States]:
        if isinstance(weights, Few) and weights.passes_by(t):
            return states[0], states
        read, history = self._read(states, weights, t)
        value = read if isinstance(read, QKVInputs) else materialize(read)
        residual = value.residual if isinstance(value, QKVInputs) else value
        # While the branch runs, a newest state inside a group is held only if it is what the unit reads.
        return value, (residual, history if residual is history.newest else history.kept)

    def merge(self, states: States, weights: W, t: int, *branches: Tensor) -> Tensor | Mix:
        return total((states[0], *branches))  # in the model's own order: bitwise equality at the start

    def push(self, states: States, weights: W, t: int, x: Tensor) -> States:
        return x, states[1].kept

    def _program(self, static: Mapping[int, Sequence[Weight]], dims: Dims) -> Program:
        units, read = list[Unit](), "x0"
        for t in range(1, dims.depth + 1):
            written = Line(f"x{t}", (Term(read, 1.0, fixed=True), Term(branch_of(t), 1.0)))
            terms = [Term(f"x{t}", 1.0, learned=False)]
            if t + 1 in static:
                mixed = zip(self.sources_of(t + 1, dims), static[t + 1], strict=True)
                terms = [Term(f"x{i}", w) for i, w in mixed]
            following = Line(f"r{t + 1}", tuple(terms))
            units.append(Unit((), read, (written, following)))
            read = following.target
        reads = self.reads(dims)
        rows = tuple(f"r{t}" if t > 1 else "x0" for t in reads)
        return Program(tuple(units), (), read, rows, tuple(f"x{t}" for t in range(reads.stop - 1)))


class DenseIncrements(_Dense[W]):
    """A topology whose units read a mix of all increments so far: ``r_t = sum_i w_ti f_i`` with ``f_0 = x_0``.

    As `Dense`, but units 1..T and the output read mixes. With all weights 1 it is the original network. It cannot
    connect post-norm blocks.

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

    states: ClassVar[bool] = False

    def start(self, x: Tensor, weights: W) -> States:
        newest, history = super().start(x, weights)
        return newest, history.written(0, x) if isinstance(weights, Few) else history

    def read(self, states: States, weights: W, t: int) -> tuple[Tensor | Mix | QKVInputs, States]:
        if isinstance(weights, Few) and weights.passes_by(t):
            return states[0], states
        value, history = self._read(states, weights, t)
        return value, (history.newest, history.kept)

    def write(self, states: States, weights: W, t: int, *branches: Tensor) -> States:
        (newest, history), f = states, total(branches)
        if isinstance(weights, Few):
            return total((newest, *branches)), history.written(t, f)
        return (newest + f if (t - 1) % self.group else f), history

    def _columns(self, t: int, dims: Dims) -> Sequence[int]:
        return range(t)

    def _places(self, t: int, dims: Dims) -> Sequence[int]:
        if self.few:
            numbers = self.wired(dims)[t]
            return [numbers.index(i if i in numbers else REST) for i in range(t)]
        return [-(-i // self.group) for i in range(t)]

    def _program(self, static: Mapping[int, Sequence[Weight]], dims: Dims) -> Program:
        if self.few:
            return self._program_of_few(static, dims)
        units, stack = list[Unit](), ["x0"]
        for t in range(1, dims.depth + 2):
            plain = (Term(name, 1.0, learned=False) for name in stack)
            read = Line(f"r{t}", tuple(map(Term, stack, static[t]) if t in static else plain))
            stack, summed = [*stack, branch_of(t)], tuple[Line, ...]()
            if len(stack) > len(static.get(t + 1, stack)):  # the next read has the sum of two of them
                n = self._summed(len(stack))
                summed = (Line(f"s{t}", (Term(stack[n], 1.0), Term(stack[n + 1], 1.0))),)
                stack = [*stack[:n], f"s{t}", *stack[n + 2 :]]
            units.append(Unit((read,), read.target, summed))
        *units, output = units
        reads, columns = [f"r{t}" for t in self.reads(dims)], ["x0", *map(branch_of, range(1, dims.depth + 1))]
        return Program(tuple(units), output.before, output.read, tuple(reads), tuple(columns))

    def _summed(self, sources: int) -> int:
        """The place, among so many sources, of the first of the two that are summed next."""
        return sources - 2

    def _program_of_few(self, static: Mapping[int, Sequence[Weight]], dims: Dims) -> Program:
        """Besides increments it has the plain stream ``s_t``, and ``o_t``, the sum of increments that are not named."""
        units, found, names = list[Unit](), self.wired(dims), ["x0", *map(branch_of, range(1, dims.depth + 1))]
        plain, reads = "x0", list[str]()
        for t in range(1, dims.depth + 2):
            lines = list[Line]()
            if t in found:
                sources = [f"o{t}" if i == REST else names[i] for i in found[t]]
                if REST in found[t]:
                    named = (Term(name, -1.0, learned=False) for name in sources[1:])
                    lines.append(Line(f"o{t}", (Term(plain, 1.0, learned=False), *named)))
                lines.append(Line(f"r{t}", tuple(map(Term, sources, static[t]))))
            reads.append(f"r{t}" if lines else plain)
            summed = Line(f"s{t}", (Term(plain, 1.0, learned=False), Term(branch_of(t), 1.0)))
            units.append(Unit(tuple(lines), reads[-1], (summed,)))
            plain = summed.target
        *units, output = units
        return Program(tuple(units), output.before, output.read, tuple(reads), tuple(names))
