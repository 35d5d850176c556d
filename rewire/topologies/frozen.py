"""Topologies without parameters, which `rewire.freeze` makes from learned ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rewire.errors import UnsupportedTopology
from rewire.mixes.mix import mix
from rewire.topologies.base import Dims, Recurrence, Start, States, total
from rewire.topologies.program import (
    Line,
    PerChannel,
    Program,
    Term,
    Unit,
    Weight,
    branch_of,
    lifetimes,
    lines_of,
    operands,
    with_weights,
)


class Constants(NamedTuple):
    """The constant weights of a frozen topology, float32.

    Attributes:
        table: the matrix that `rewire.coefficients` shows.
        channels: the weights per channel, [N, D]; None if there are none.
    """

    table: Tensor
    channels: Tensor | None = None


@dataclasses.dataclass(frozen=True, repr=False)
class Frozen(Recurrence[Constants]):
    """A topology whose weights became constants.

    Its states are the values that are still needed; nothing is learned. Scalar weights are part of the program, weights
    per channel are rows of a buffer.

    Args:
        of: the original topology, for messages.
        lines: its folded program, in the form of `coded`.
        shape: shape of its matrix.

    Raises:
        ValueError: lines or shape are malformed.
    """

    of: str
    lines: list[Any]
    shape: list[int]
    _program: Program = dataclasses.field(init=False, compare=False)
    _rows: int = dataclasses.field(init=False, compare=False)
    _during: list[tuple[str, ...]] = dataclasses.field(init=False, compare=False)
    _after: list[tuple[str, ...]] = dataclasses.field(init=False, compare=False)

    def __post_init__(self) -> None:
        program = _decoded(self.lines)
        rows, columns = self.shape
        terms = [term for line, _ in lines_of(program) for term in line.terms]
        used = {term.weight.row for term in terms if isinstance(term.weight, PerChannel)}
        if used != set(range(len(used))):
            raise ValueError(f"rows {sorted(used)} of {len(used)} weights per channel are used.")
        try:
            during, after = lifetimes(program)
        except KeyError as error:
            raise ValueError(f"the program reads {error}, which it does not compute.") from error
        values = {"shape": [rows, columns], "_program": program, "_rows": len(used), "_during": during, "_after": after}
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        return f"Frozen({self.of})"

    @property
    def needs_width(self) -> bool:  # type: ignore[override]
        return self._rows > 0

    @property
    def registered_name(self) -> str:
        return "Frozen"  # only for files: `compile` does not take it

    def held(self, t: int) -> tuple[str, ...]:
        """Names of the states after t units."""
        return self._after[t]

    def parameters(self, dims: Dims, start: Start) -> dict[str, Tensor]:
        """Buffers of zeros for the `Constants`, whose values come from `rewire.freeze` or a state dict.

        Raises:
            UnsupportedTopology: the program belongs to a trunk of another depth.
        """
        depth = len(self._program.units)
        if depth != dims.depth or max(self.shape) > dims.depth + 1:
            raise UnsupportedTopology(
                f"{self} with a matrix {self.shape} was made for {depth} units, and the trunk has {dims.depth}."
            )
        sizes = {"table": self.shape} | ({"channels": [self._rows, dims.width]} if self._rows else {})
        return {name: nn.Buffer(torch.zeros(size)) for name, size in sizes.items()}

    def weights(self, parameters: dict[str, Tensor], dims: Dims) -> Constants:
        return Constants(parameters["table"], parameters.get("channels"))

    def read(self, states: States, weights: Constants, t: int) -> tuple[Tensor, States]:
        unit, values = self._program.units[t - 1], self._named(self._after[t - 1], states)
        self._run(unit.before, values, weights)
        return values[unit.read], tuple(values[name] for name in self._during[t - 1])

    def write(self, states: States, weights: Constants, t: int, *branches: Tensor) -> States:
        own, values = branch_of(t), self._named(self._during[t - 1], states)
        if own in self._after[t]:
            values[own] = total(branches)
            branches = (values[own],)
        self._run(self._program.units[t - 1].after, values, weights, own, branches)
        return tuple(values[name] for name in self._after[t])

    def merge(self, states: States, weights: Constants, t: int, *branches: Tensor) -> Tensor:
        line = self.written(t)
        if line is None:
            return total(branches)  # the norm's result is not used
        return self.summed(line, self._named(self._during[t - 1], states), weights, branch_of(t), branches)

    def push(self, states: States, weights: Constants, t: int, x: Tensor) -> States:
        written, values = self.written(t), self._named(self._during[t - 1], states)
        for line in self._program.units[t - 1].after:
            values[line.target] = x if line is written else self.summed(line, values, weights)
        return tuple(values[name] for name in self._after[t])

    def drops(self, dims: Dims) -> list[int]:
        units = [*enumerate(self._program.units, start=1)]
        reads = {unit.read for _, unit in units}
        written = {line.target for t, unit in units for line in unit.after if _has(line, t)}  # perhaps by a post-norm
        known = {*self._after[0], *reads, *written, *(branch_of(t) for t, _ in units)}
        found = list[int]()
        for t, unit in units:
            before, during, after = set(self._after[t - 1]), set(self._during[t - 1]), set(self._after[t])
            if known & ((before - during) | (during - after)) - {unit.read}:
                found.append(t)
        return found

    def newest(self, states: States, weights: Constants, t: int) -> tuple[int, ...]:
        """As in `Topology`, if unit t reads the only value that unit t - 1 wrote."""
        names, read = self._after[t - 1], self._program.units[t - 1].read
        written = [] if t == 1 else [line.target for line in self._program.units[t - 2].after if _has(line, t - 1)]
        return (names.index(read),) if written == [read] and read in names else ()

    def finish(self, states: States, weights: Constants, dims: Dims) -> Tensor:
        values = self._named(self._after[-1], states)
        self._run(self._program.finish, values, weights)
        return values[self._program.output]

    def matrix(self, weights: Constants, dims: Dims) -> Tensor:
        """The matrix of the original topology, with 0 for dropped edges."""
        return weights.table

    def program(self, weights: Constants, dims: Dims) -> Program:
        """The frozen program, with the values of weights per channel."""
        return with_weights(self._program, lambda weight: _looked_up(weight, weights))

    def written(self, t: int) -> Line | None:
        """The line of unit t whose value a post-norm block norms."""
        lines = self._program.units[t - 1].after
        return next((line for line in lines if _has(line, t)), None)

    @staticmethod
    def _named(names: Sequence[str], states: States) -> dict[str, Tensor]:
        return dict(zip(names, states, strict=True))

    def _run(
        self, lines: Sequence[Line], values: dict[str, Tensor], weights: Constants, own: str = "", branches: States = ()
    ) -> None:
        for line in lines:
            values[line.target] = self.summed(line, values, weights, own, branches)

    def summed(
        self,
        line: Line,
        values: Mapping[str, Tensor],
        weights: Constants,
        own: str = "",
        branches: Sequence[Tensor] = (),
    ) -> Tensor:
        """The value of a line, where ``branches`` add up to the branch output ``own``."""
        sources, factors, added = operands(line, values, own, branches)
        if not sources:
            return total(tuple(added))
        return mix(sources, [_looked_up(weight, weights) for weight in factors], added)


def frozen(of: str, program: Program, shape: tuple[int, int]) -> tuple[Frozen, list[Tensor]]:
    """The topology of a folded program, and the rows of its weights per channel, each [D]."""
    channels: list[Tensor] = []

    def constant(weight: Weight) -> Weight:
        if not isinstance(weight, Tensor):
            return weight
        channels.append(weight)
        return PerChannel(len(channels) - 1)

    return Frozen(of, coded(with_weights(program, constant)), [*shape]), channels


def _has(line: Line, t: int) -> bool:
    """Whether the branch output of unit t is a term of the line."""
    return any(term.source == branch_of(t) for term in line.terms)


def _looked_up(weight: Weight, constants: Constants) -> Tensor | float:
    if not isinstance(weight, PerChannel):
        return weight
    assert constants.channels is not None
    return constants.channels[weight.row]


def coded(program: Program) -> list[Any]:
    """The program as nested lists; a line is [target, [[source, number or [row]], ..]]."""

    def lines(given: Sequence[Line]) -> list[Any]:
        return [[target, [[name, _plain(weight)] for name, weight, *_ in terms]] for target, terms in given]

    units = [[lines(unit.before), unit.read, lines(unit.after)] for unit in program.units]
    return [units, lines(program.finish), program.output]


def _plain(weight: Weight) -> Any:
    return [*weight] if isinstance(weight, PerChannel) else weight


def _decoded(saved: Any) -> Program:
    units, finish, output = saved
    return Program(tuple(Unit(_lines(b), str(read), _lines(a)) for b, read, a in units), _lines(finish), str(output))


def _lines(saved: Any) -> tuple[Line, ...]:
    return tuple(Line(str(target), tuple(Term(str(name), _weight(w)) for name, w in terms)) for target, terms in saved)


def _weight(saved: Any) -> Weight:
    return PerChannel(*saved) if isinstance(saved, list) else float(saved)
