"""rewire.graph: the depth graph of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import nn

from rewire.diagnostics.effects import Ablation, check_ablation
from rewire.diagnostics.outline import Outline, about, mean_of, outline_of
from rewire.diagnostics.recording import Seen, recorded
from rewire.passes.checks import check_unwrapped, on_meta
from rewire.runtime.connection import learned_connections
from rewire.topologies.program import Program, branch_of, digraph

if TYPE_CHECKING:
    from rewire.diagnostics.depth_graph import DepthGraph

#: Roles of values, by the first letter of their names; ``out`` is what is read after the last unit.
_ROLES = {"x": "state", "s": "state", "g": "state", "r": "read", "o": "read", "f": "unit"}


def graph(model: nn.Module, batch: object = None, ablation: Ablation | None = None) -> DepthGraph:
    """The depth graph of a rewired model: a `networkx.DiGraph` of the states and units of all trunks.

    It shows what is unused, what a unit really depends on, how deep the network effectively is and where it may be cut:
    see `DepthGraph`. Weights that depend on the input are averaged over a batch; without one, the graph has the part of
    them that does not depend on it.

    Which sums there are is exact for static topologies, for the dense ones (muddformer, attnres, grn-v3, dca) and for
    parallel streams (hc-dynamic, mhc). For others (frac-hc, hc-gated, ddl, laurel-lr, laurel-pa, residual-scale with
    biases) the graph has what `rewire.coefficients` shows.

    Args:
        model: a rewired or frozen model. On the meta device the graph has no weights.
        batch: what the model is called with, as for `rewire.diagnose`; it runs once, in evaluation mode, on a copy.
        ablation: of this model; its edges then have ``without`` and ``plain``, and units ``without``.

    Raises:
        RewireError: the model was not rewired, or is on the meta device and there is a batch.
        WrappedModel: it is sharded or compiled.
        BadExampleInputs: it does not run on the batch.
        TypeError: ``ablation`` is none.

    Example:
        >>> depth = rewire.graph(rewired)
        >>> depth.nodes["blocks/f1"]["path"], depth.edges["blocks/x0", "blocks/x2"]["role"]
        ('blocks.0.attn', 'mix')
        >>> depth.save("depth.graphml")
    """
    from rewire.diagnostics.depth_graph import DepthGraph  # importing networkx is slow, and few need it

    check_ablation(ablation)
    learned = learned_connections(model, "it has no depth connections, and no graph")
    check_unwrapped(model)
    outlines = {name: outline_of(connection) for name, connection in learned.items()}
    seen = recorded(model, outlines, batch) if batch is not None else {}
    size = next((p.element_size() for p in model.parameters() if p.is_floating_point()), 4)
    found, known = DepthGraph(), not on_meta(model)
    for name, connection in learned.items():
        units = [about(connection, t) for t in range(connection.layout.dims.depth + 2)]
        width = (connection.trunk.width if connection.trunk else 0) or connection.layout.dims.width
        add_trunk(found, name, outlines[name], units, width * size or None, seen.get(name), known)
    if ablation is not None:
        ablation.onto(found)
    return found


def add_trunk(
    found: DepthGraph,
    trunk: str,
    outline: Outline,
    about_units: Sequence[Mapping[str, str]],
    of_token: int | None,
    seen: Mapping[tuple[str, str], Seen] | None = None,
    known: bool = True,
) -> None:
    """Add a trunk to the graph.

    Args:
        found: the graph.
        trunk: its name.
        outline: its sums.
        about_units: path, block and kind of units 0 (the input) to T + 1 (the output).
        of_token: bytes of a state for one token.
        seen: weights on a batch, by destination and source.
        known: whether the weights are known.
    """
    program, seen = outline.program, seen or {}
    plain = digraph(program)
    places = dict(plain.nodes(data="at")) | _read_at(program)
    for value, at in places.items():
        data = {"trunk": trunk, "value": value, "role": _ROLES[value[0]], "at": at, **about_units[at]}
        data |= {"kind": data["kind"] if data["role"] == "unit" else "", "bytes": of_token}
        found.add_node(f"{trunk}/{value}", **data, output=value == program.output)

    for source, target, data in plain.edges(data=True):
        weight, spread = mean_of(data["weight"]), 0.0 if outline.kind == "static" or not data["learned"] else None
        if (target, source) in seen:
            weight, spread = seen[target, source].mean, seen[target, source].spread
        elif seen:  # it has no weight
            data["learned"], spread = False, 0.0
        data |= {"weight": weight if known else None, "spread": spread if known else None, "bytes": of_token}
        is_read, is_write = target == branch_of(places[target]), source == branch_of(places[target])
        data["role"] = "read" if is_read else "write" if is_write else "mix"
        found.add_edge(f"{trunk}/{source}", f"{trunk}/{target}", **data)


def _read_at(program: Program) -> dict[str, int]:
    """The unit that reads each mix, even if the program makes the mix after an earlier unit."""
    reads = {unit.read: t for t, unit in enumerate(program.units, start=1)}
    reads[program.output] = len(program.units) + 1
    return {value: at for value, at in reads.items() if _ROLES[value[0]] == "read"}
