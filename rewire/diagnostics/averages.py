"""Input-dependent connection weights as matrices: their mean on a batch, and their standard deviation."""

from __future__ import annotations

from torch import Tensor, nn

from rewire.diagnostics.outline import outline_of
from rewire.diagnostics.recording import Seen, recorded
from rewire.runtime.connection import learned_connections
from rewire.topologies.program import Line, Program, Term, Weight, mapped, matrix

_MEAN, _SPREAD = "mean", "spread"


def averages(model: nn.Module, batch: object) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Effective weights by trunk, [destination, source]: their mean over the tokens of a batch; and, where states are
    mixed directly, their standard deviation over tokens and ways. Constant weights are their own mean.

    Raises:
        RewireError: the model was not rewired, or is on the meta device.
        BadExampleInputs: it does not run on the batch.
    """
    found = learned_connections(model)
    outlines = {name: outline_of(connection) for name, connection in found.items()}
    seen = recorded(model, outlines, batch)
    means, spreads = dict[str, Tensor](), dict[str, Tensor]()
    for name, connection in found.items():
        if name not in seen:
            means[name] = connection.matrix().detach()
            continue
        means[name] = matrix(_instead(outlines[name].program, seen[name], _MEAN))
        if outlines[name].kind == "mixes":  # products of streams' gates have no spread of their own
            spreads[name] = matrix(_instead(outlines[name].program, seen[name], _SPREAD))
    return means, spreads


def _instead(program: Program, seen: dict[tuple[str, str], Seen], what: str) -> Program:
    """The program with the mean (or the spread) of each recorded weight; other weights stay (or have no spread)."""

    def weight(line: Line, term: Term) -> Weight:
        known = seen.get((line.target, term.source))
        return getattr(known, what) if known is not None else term.weight if what == _MEAN else 0.0

    def changed(line: Line, own: str) -> Line:
        return Line(line.target, tuple(term._replace(weight=weight(line, term)) for term in line.terms))

    return mapped(program, changed)
