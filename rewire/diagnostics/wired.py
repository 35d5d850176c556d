"""A program with all of its weights in one tensor, so that many sets of them may run at once."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rewire.topologies.base import Dims, Start
from rewire.topologies.frozen import Constants, Frozen, coded
from rewire.topologies.program import (
    Line,
    PerChannel,
    Program,
    Term,
    Weight,
    learned_terms,
    mapped,
    operands,
)

#: Destination and source of an edge.
Ends = tuple[str, str]


@dataclasses.dataclass(frozen=True, repr=False)
class Wired(Frozen):
    """A topology that runs a program, whose term n has weight n of a buffer.

    Args:
        of, lines, shape: as of `Frozen`; weights are rows of the buffer.
        channels: D, if there are weights per channel; else 0.
    """

    channels: int = 0

    @property
    def needs_width(self) -> bool:  # type: ignore[override]
        return self.channels > 0

    def parameters(self, dims: Dims, start: Start) -> dict[str, Tensor]:
        """``terms``, float32 [N] or [N, D], zeros."""
        return {"terms": nn.Buffer(torch.zeros(self._rows, *([self.channels] if self.channels else [])))}

    def weights(self, parameters: dict[str, Tensor], dims: Dims) -> Constants:
        return Constants(parameters["terms"], parameters["terms"])

    def summed(
        self,
        line: Line,
        values: Mapping[str, Tensor],
        weights: Constants,
        own: str = "",
        branches: Sequence[Tensor] = (),
    ) -> Tensor:
        """In operations that `torch.func.vmap` knows, and like a mix in float32 at least."""
        sources, factors, _ = operands(line, values, own, branches)
        dtype = functools.reduce(torch.promote_types, [x.dtype for x in sources])
        precise, rows = torch.promote_types(dtype, torch.float32), weights.channels
        assert rows is not None
        products = [x.to(precise) * rows[w.row] for x, w in zip(sources, factors, strict=True)]  # type: ignore[union-attr]
        return functools.reduce(torch.add, products).to(dtype)


class Terms:
    """The terms of a program, by number.

    Attributes:
        values: their weights, float32 [N] or [N, D].
        of: by destination and source, the numbers of the terms.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.of: dict[Ends, list[int]] = {}
        weights: list[Weight] = []
        for line, term, _ in learned_terms(program):
            self.of.setdefault((line.target, term.source), []).append(len(weights))
            weights.append(term.weight)
        width = max((w.shape[0] for w in weights if isinstance(w, Tensor)), default=0)
        rows = [torch.as_tensor(w, dtype=torch.float32) for w in weights]
        self.values = torch.stack([row.expand(width) if width else row for row in rows])

    def topology(self, of: str) -> Wired:
        """What runs the program; its buffer is to have `values`."""
        numbers = iter(range(len(self.values)))

        def numbered(line: Line, own: str) -> Line:
            return Line(line.target, tuple(Term(source, PerChannel(next(numbers))) for source, *_ in line.terms))

        width = self.values.shape[1] if self.values.dim() > 1 else 0
        return Wired(of, coded(mapped(self.program, numbered)), [0, 0], width)

    def set(self, changes: Mapping[Ends, Any]) -> Tensor:
        """The weights with others: by destination and source, for each term of these ends one; None: as it is."""
        values = self.values.clone()
        for ends, given in changes.items():
            for number, value in zip(self.of[ends], given, strict=True):
                values[number] = values[number] if value is None else value
        return values
