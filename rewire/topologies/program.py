"""Static topologies as straight-line programs of weighted sums of named values, and how to prune them.

``x0`` is the trunk's input and ``f1 .. fT`` are the branch outputs; a program's lines compute everything else.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    import networkx as nx

INPUT = "x0"
_ONE = 1e-6  # weights this close to 1 count as 1
T = TypeVar("T")


class PerChannel(NamedTuple):
    """A weight per channel of a frozen program: row ``row`` of its table of constants."""

    row: int


Weight = float | Tensor | PerChannel


class Term(NamedTuple):
    """``weight * source``.

    Attributes:
        source: name of a value.
        weight: a number, or one for each channel [D].
        fixed: whether the term is not part of the matrix, and never dropped.
        learned: whether the weight is a learned one: then the term is an edge, which may be dropped.
    """

    source: str
    weight: Weight
    fixed: bool = False
    learned: bool = True


class Line(NamedTuple):
    """``target`` is the sum of the terms."""

    target: str
    terms: tuple[Term, ...]


class Unit(NamedTuple):
    """The lines before unit t's branch, the value that the branch reads, and the lines after it.

    A post-norm block norms the value of the only line with ``f_t``.
    """

    before: tuple[Line, ...]
    read: str
    after: tuple[Line, ...]


class Program(NamedTuple):
    """A static topology with its weights.

    Attributes:
        units: units 1..T.
        finish: lines after the last unit.
        output: name of the value that is the trunk's output.
        rows, columns: names of the values for rows and columns of `matrix`.
    """

    units: tuple[Unit, ...]
    finish: tuple[Line, ...]
    output: str
    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Edge:
    """A dropped term: ``source`` is no longer part of ``destination``.

    Attributes:
        weight: its weight; for weights per channel the largest magnitude.
        unread: whether it was dropped because the destination is unused, whatever its weight.
    """

    destination: str
    source: str
    weight: float
    unread: bool = False


def branch_of(t: int) -> str:
    """Name of the branch output of unit t."""
    return f"f{t}"


def recurrence(shortcuts: Sequence[Sequence[Term]], scales: Sequence[Weight] | None = None) -> Program:
    """``x_t = shortcuts_t + scale_t f_t``, where unit t reads ``x_{t-1}`` and the output is ``x_T``.

    Its matrix is that of the shortcuts, [T, T].
    """
    depth = len(shortcuts)
    units = []
    for t, terms in enumerate(shortcuts, start=1):
        own = Term(branch_of(t), 1.0 if scales is None else scales[t - 1])
        units.append(Unit((), f"x{t - 1}", (Line(f"x{t}", (*terms, own)),)))
    rows, columns = [f"x{t + 1}" for t in range(depth)], [f"x{i}" for i in range(depth)]
    return Program(tuple(units), (), f"x{depth}", tuple(rows), tuple(columns))


def digraph(program: Program) -> nx.DiGraph:
    """The values and branch outputs of a program as nodes; edges lead from each term's source to its line's target, and
    from what a branch reads to its output.

    Nodes have ``at``, the unit that computes them (0: the input; T + 1: lines after the last unit). Edges have
    ``weight``, a number or one for each channel, summed over terms with the same source; ``fixed``, the part of it that
    is not in the matrix; and ``learned``, whether `rewire.freeze` counts it.
    """
    import networkx as nx  # slow to import, and rarely needed

    graph, last = nx.DiGraph(), len(program.units) + 1
    graph.add_node(INPUT, at=0)
    for t, unit in enumerate(program.units, start=1):
        _add(graph, unit.before, t)
        graph.add_node(branch_of(t), at=t)
        graph.add_edge(unit.read, branch_of(t), weight=1.0, fixed=1.0, learned=False)
        _add(graph, unit.after, t)
    _add(graph, program.finish, last)
    return graph


def _add(graph: nx.DiGraph, lines: Sequence[Line], at: int) -> None:
    for line in lines:
        graph.add_node(line.target, at=at)
        for term in line.terms:
            data = graph.get_edge_data(term.source, line.target, {"weight": 0.0, "fixed": 0.0, "learned": False})
            weight, fixed = data["weight"] + term.weight, data["fixed"] + (term.weight if term.fixed else 0.0)
            learned = data["learned"] or _is_edge(term, branch_of(at))
            graph.add_edge(term.source, line.target, weight=weight, fixed=fixed, learned=learned)


def reaching(graph: nx.DiGraph, ends: Iterable[str]) -> set[str]:
    """The nodes from which a path leads to one of ``ends``, including these; all others are unused."""
    import networkx as nx

    return {node for layer in nx.bfs_layers(graph.reverse(copy=False), set(ends)) for node in layer}


def edges(program: Program) -> int:
    """Number of edges, the learned terms; a unit's own branch output is not one."""
    return sum(learned for *_, learned in learned_terms(program))


def learned_terms(program: Program) -> Iterator[tuple[Line, Term, bool]]:
    """All terms in order, each with its line, and whether it is learned, an edge."""
    for line, own in lines_of(program):
        yield from ((line, term, _is_edge(term, own)) for term in line.terms)


def prune(program: Program, threshold: float) -> tuple[Program, list[Edge]]:
    """Drop terms with a weight below ``threshold`` or exactly 0, and then those that are unused.

    Weights per channel count as their largest magnitude. A unit's own branch output always stays in what the unit
    writes. If all terms of another line would be dropped, the largest stays, as the line needs a value.
    """
    dropped: list[Edge] = []

    def strong(line: Line, own: str) -> Line:
        kept = [not (_is_edge(t, own) and (_strength(t) < threshold or _strength(t) == 0)) for t in line.terms]
        if not any(kept):
            kept[max(range(len(kept)), key=lambda n: _strength(line.terms[n]))] = True
        dropped.extend(_edge(line, term) for term, keep in zip(line.terms, kept, strict=True) if not keep)
        return Line(line.target, tuple(term for term, keep in zip(line.terms, kept, strict=True) if keep))

    swept, unread = _swept(mapped(program, strong))
    return swept, dropped + unread


def fold(program: Program) -> Program:
    """Simplify weights, and remove lines that only copy.

    Weights within 1e-6 of 1 become 1, equal weights per channel become one number, and terms with the same source
    become one term. A copy of a unit's own branch output stays a line: a post-norm block norms it.
    """
    same: dict[str, str] = {}

    def folded(line: Line, own: str) -> Line | None:
        weights: dict[str, Weight] = {}
        for source, weight, *_ in line.terms:
            source = same.get(source, source)
            weights[source] = weights[source] + weight if source in weights else weight  # type: ignore[operator, assignment]
        terms = tuple(Term(source, _simple(weight)) for source, weight in weights.items())
        if len(terms) == 1 and _is_one(terms[0].weight) and terms[0].source != own:
            same[line.target] = terms[0].source
            return None
        return Line(line.target, terms)

    smaller = mapped(program, folded)
    units = tuple(unit._replace(read=same.get(unit.read, unit.read)) for unit in smaller.units)
    return smaller._replace(units=units, output=same.get(smaller.output, smaller.output))


def lifetimes(program: Program) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    """The values that have to be kept, in the order in which they are computed.

    Returns:
        While the branch of unit t runs (entry t - 1), at least one; and after t units (entry t; 0: at the start).
    """
    order = _order(program)

    def kept(names: set[str]) -> tuple[str, ...]:
        return tuple(sorted(names, key=order.__getitem__))

    needed = _needed(program.finish, {program.output})
    during, after = [], [kept(needed)]
    for t, unit in zip(range(len(program.units), 0, -1), reversed(program.units), strict=True):
        needed = _needed(unit.after, needed) - {branch_of(t)}
        during.append(kept(needed or {unit.read}))
        needed = _needed(unit.before, needed | {unit.read})
        after.append(kept(needed))
    return during[::-1], after[::-1]


def matrix(program: Program) -> Tensor:
    """float32 [rows, columns]: the weight of each column's value in each row's, not counting paths through columns.

    Weights per channel are averaged.
    """
    column = {name: number for number, name in enumerate(program.columns)}
    unit = torch.eye(len(column), dtype=torch.float32)
    shares: dict[str, Tensor] = {}

    def share(source: str) -> Tensor:
        if source in column:
            return unit[column[source]]
        return shares.get(source, torch.zeros(len(column), dtype=torch.float32))  # a branch output that is not a column

    for line, _ in lines_of(program):
        row = torch.zeros(len(column), dtype=torch.float32)
        for source, weight, fixed, _ in line.terms:
            row += 0 if fixed else _mean(weight) * share(source)
        shares[line.target] = row
    return torch.stack([shares[name] if name in shares else share(name) for name in program.rows])


def operands(
    line: Line, values: Mapping[str, T], own: str, branches: Sequence[T]
) -> tuple[list[T], list[Weight], list[T]]:
    """The arguments with which ``mix(sources, weights, added)`` computes ``line``.

    Args:
        line: a line of a frozen program.
        values: the values so far, by name.
        own: name of the branch output that is the sum of ``branches``.
        branches: branch outputs of the unit that is written.

    Returns:
        Sources, their weights, and tensors to add with weight 1; without sources the line is a plain sum.
    """
    sources: list[T] = []
    weights: list[Weight] = []
    added: list[T] = []
    for source, weight, *_ in line.terms:
        if source == own and _is_one(weight):
            added += branches
        else:
            given = branches if source == own else [values[source]]
            sources += given
            weights += [weight] * len(given)
    return ([], [], [*sources, *added]) if all(map(_is_one, weights)) else (sources, weights, added)


def lines_of(program: Program) -> Iterator[tuple[Line, str]]:
    """All lines in order, each with its unit's branch output if it comes after the branch, else ""."""
    for t, unit in enumerate(program.units, start=1):
        yield from ((line, "") for line in unit.before)
        yield from ((line, branch_of(t)) for line in unit.after)
    yield from ((line, "") for line in program.finish)


def mapped(program: Program, change: Callable[[Line, str], Line | None]) -> Program:
    """The program with every line replaced, in order, by ``change(line, own)``, or removed if that is None."""

    def changed(lines: Sequence[Line], own: str = "") -> tuple[Line, ...]:
        return tuple(new for line in lines if (new := change(line, own)) is not None)

    units = tuple(
        Unit(changed(unit.before), unit.read, changed(unit.after, branch_of(t)))
        for t, unit in enumerate(program.units, start=1)
    )
    return program._replace(units=units, finish=changed(program.finish))


def with_weights(program: Program, change: Callable[[Weight], Weight]) -> Program:
    """The program with changed weights; terms lose their ``fixed`` and ``learned``."""

    def changed(line: Line, own: str) -> Line:
        return Line(line.target, tuple(Term(source, change(weight)) for source, weight, *_ in line.terms))

    return mapped(program, changed)


def _swept(program: Program) -> tuple[Program, list[Edge]]:
    """Remove the lines that contribute neither to the output nor to what a branch reads, as all branches run."""
    branches = map(branch_of, range(1, len(program.units) + 1))
    used, dropped = reaching(digraph(program), {program.output, *branches}), list[Edge]()

    def kept(line: Line, own: str) -> Line | None:
        if line.target in used:
            return line
        dropped.extend(_edge(line, term, unread=True) for term in line.terms if _is_edge(term, own))
        return None

    return mapped(program, kept), dropped


def _needed(lines: Sequence[Line], later: set[str]) -> set[str]:
    """The values needed before ``lines``, if ``later`` are needed after them."""
    needed = set(later)
    for line in reversed(lines):
        needed.discard(line.target)
        needed.update(term.source for term in line.terms)
    return needed


def _order(program: Program) -> dict[str, int]:
    names = [INPUT]
    for t, unit in enumerate(program.units, start=1):
        names += [line.target for line in unit.before]
        names += [branch_of(t), *(line.target for line in unit.after)]
    return {name: number for number, name in enumerate([*names, *(line.target for line in program.finish)])}


def _is_edge(term: Term, own: str) -> bool:
    return term.source != own and term.learned and not term.fixed


def _edge(line: Line, term: Term, unread: bool = False) -> Edge:
    weight = term.weight if isinstance(term.weight, float) else _strength(term)
    return Edge(line.target, term.source, weight, unread)


def _is_one(weight: Weight) -> bool:
    return isinstance(weight, float) and weight == 1


def _strength(term: Term) -> float:
    weight = term.weight
    return float(weight.abs().max()) if isinstance(weight, Tensor) else abs(_number(weight))


def _mean(weight: Weight) -> float:
    return float(weight.mean()) if isinstance(weight, Tensor) else _number(weight)


def _number(weight: Weight) -> float:
    assert isinstance(weight, float)  # only frozen programs have other weights
    return weight


def _simple(weight: Weight) -> Weight:
    """``weight`` as one number if all channels agree, and as 1 if it is close to 1."""
    if isinstance(weight, Tensor):
        if float((weight - 1).abs().max()) > _ONE and float(weight.max() - weight.min()) > 0:
            return weight
        weight = float(weight.mean(dtype=torch.float64))
    number = _number(weight)
    return 1.0 if abs(number - 1) <= _ONE else _shortest(number)


def _shortest(number: float) -> float:
    """The shortest decimal for the same float32, as people read these constants."""
    candidates = (float(f"{number:.{digits}g}") for digits in range(1, 10))
    return next((c for c in candidates if _float32(c) == _float32(number)), number)


def _float32(number: float) -> float:
    return ctypes.c_float(number).value
