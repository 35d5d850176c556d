"""A topology's formulas as sums of named values, whether or not their weights depend on the input."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from rewire.errors import UnsupportedTopology
from rewire.freezing import weights_of
from rewire.runtime.connection import Connection
from rewire.topologies import Dense, DenseIncrements, Dims, Topology
from rewire.topologies.frozen import Frozen
from rewire.topologies.hyper import ParallelStreams
from rewire.topologies.program import Line, Program, Term, Unit, branch_of, mapped, recurrence
from rewire.trunk import Site

#: The kind of sums: all constant; mixes of a dense topology, or gates of streams, with weights per token; or only what
#: `Topology.matrix` shows.
Kind = Literal["static", "mixes", "streams", "matrix"]


@dataclasses.dataclass(frozen=True)
class Outline:
    """A trunk's sums.

    Attributes:
        program: with the weights, or the part of them that does not depend on the input.
        kind: what is exact about it: for ``"mixes"`` and ``"streams"`` which sums there are, for ``"matrix"`` only what
            the matrix shows.
    """

    program: Program
    kind: Kind


@torch.no_grad()
def outline_of(connection: Connection) -> Outline:
    """The outline of a trunk with its weights; on the meta device with those of the start, which mean nothing."""
    layout = connection.layout
    if any(p.is_meta for p in (*connection.parameters(), *connection.buffers())):
        return started(layout.topology, layout.dims)
    return outline(layout.topology, weights_of(connection), layout.dims)


def outline(topology: Topology, weights: Any, dims: Dims) -> Outline:
    """The outline of a topology with these weights, on the CPU, without gradients."""
    try:
        return Outline(topology.program(weights, dims), "static")
    except UnsupportedTopology:
        if isinstance(topology, (Dense, DenseIncrements)):
            program = topology._program(_static(topology, weights, dims), dims)
            if not topology.has_program:
                return Outline(program, "matrix")
            return Outline(mapped(program, functools.partial(_mixed, topology.first)), "mixes")
        if isinstance(topology, ParallelStreams) and topology.has_program:
            return Outline(topology.static_program(weights, dims), "streams")
        return Outline(_of_matrix(topology, topology.matrix(weights, dims), dims.depth), "matrix")


def started(topology: Topology, dims: Dims) -> Outline:
    """The outline of a topology at its start. The sums do not depend on the width: they have one channel if allowed.

    Raises:
        UnsupportedTopology: it has no start in such a trunk.
    """
    narrow = dataclasses.replace(dims, width=min(dims.width, 1))
    try:
        parameters = topology.parameters(narrow, "paper")
    except UnsupportedTopology:  # heads, or fractions, have to divide the width
        narrow, parameters = dims, topology.parameters(dims, "paper")
    return outline(topology, topology.weights(parameters, narrow), narrow)


def preserved(topology: Topology, dims: Dims) -> Outline | None:
    """The outline of the plain network: the topology at its preserving start; None if it has none, or is frozen."""
    if isinstance(topology, Frozen):
        return None
    try:
        start = topology.for_start("preserve")
        return outline(start, start.weights(start.parameters(dims, "preserve"), dims), dims)
    except UnsupportedTopology:
        return None


def _static(topology: Any, weights: object, dims: Dims) -> dict[int, list[float]]:
    """For each read, the static part of its sources' weights: the entries of the matrix where these are."""
    table, found = topology.matrix(weights, dims).tolist(), {1: [1.0]}  # its last row is the output, read T + 1
    for t in topology.mixing(dims):
        of_column = dict(zip(topology._columns(t, dims), topology._places(t, dims), strict=True))
        by_place = {place: table[t - dims.depth - 2][column] for column, place in of_column.items()}
        found[t] = [by_place[place] for place in sorted(by_place)]
    return found


def _mixed(first: int, line: Line, own: str) -> Line:
    """The line; if it is a read before the first mix, as one without weights."""
    early = line.target in [f"r{t}" for t in range(1, first)]
    return Line(line.target, tuple(term._replace(fixed=True) for term in line.terms)) if early else line


def _of_matrix(topology: Topology, matrix: Tensor, depth: int) -> Program:
    """The program with this matrix: of states [T, T], or of reads and increments [T + 1, T + 1].

    Raises:
        UnsupportedTopology: it is neither.
    """
    if matrix.shape == (depth, depth):
        return recurrence([_terms(row, [f"x{i}" for i in range(depth)]) for row in matrix])
    if matrix.shape != (depth + 1, depth + 1):
        raise UnsupportedTopology(
            f"topology '{topology.registered_name}' has no graph: its matrix, of shape {tuple(matrix.shape)}, is "
            f"neither of {depth} states nor of {depth + 1} reads and increments. Give it a method `program`."
        )
    names = ["x0", *map(branch_of, range(1, depth + 1))]
    *reads, output = [Line(f"r{t}", tuple(_terms(row, names))) for t, row in enumerate(matrix, start=1)]
    units = tuple(Unit((read,), read.target, ()) for read in reads)
    return Program(units, (output,), output.target, (*(read.target for read in reads), output.target), tuple(names))


def _terms(row: Tensor, names: Sequence[str]) -> list[Term]:
    """The terms for the weights that are not 0."""
    return [Term(name, weight) for name, weight in zip(names, row.tolist(), strict=True) if weight]


def about(connection: Connection, t: int) -> dict[str, str]:
    """Path, block and kind of unit t; for a unit of several residual adds the block's path."""
    sites: list[Site] = []
    if connection.trunk is not None:
        pairs = zip(connection.trunk.sites, connection.layout.units, strict=True)
        sites = [site for site, unit in pairs if unit == t]
    if not sites:
        return {"path": "" if connection.trunk else f"unit {t}", "block": "", "kind": ""}
    path = sites[0].name if len(sites) == 1 else sites[0].block
    return {"path": path, "block": sites[0].block, "kind": ", ".join(dict.fromkeys(site.kind for site in sites))}


def mean_of(weight: Any) -> float:
    """The weight; for one per channel, the mean."""
    return float(weight.mean()) if isinstance(weight, Tensor) else float(weight)
