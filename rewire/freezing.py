"""`rewire.freeze`: turn learned static connections into constants, and drop those with small weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from rewire.console import Shown, table
from rewire.copies import M, outside_inference_mode, shared
from rewire.errors import BadExampleInputs, UnsupportedTopology, is_number
from rewire.mixes.history import History
from rewire.passes.checks import check_loaded, check_unwrapped
from rewire.passes.inputs import inputs_for
from rewire.passes.validate import outputs
from rewire.passes.validating.tensors import relative_error
from rewire.patterns import Pattern, patterns_for
from rewire.runtime.connection import Connection, connections, learned_connections
from rewire.runtime.layout import Layout
from rewire.topologies import Topology
from rewire.topologies.base import Dims, States, W, reads_of
from rewire.topologies.frozen import Constants, Frozen, frozen
from rewire.topologies.program import Edge, Program, branch_of, digraph, edges, fold, matrix, prune, reaching

_SHOWN = 12  # dropped edges that a printed report lists for each trunk


@dataclasses.dataclass(frozen=True)
class FrozenTrunk:
    """What `rewire.freeze` did to one trunk.

    Attributes:
        name: name of the trunk.
        topology: its topology before.
        edges: number of edges before and after.
        states: largest number of hidden states held between units, before and after.
        dropped: the dropped edges.
        unused: numbers of the units that no longer contribute to the trunk's output; they still run.
    """

    name: str
    topology: str
    edges: tuple[int, int]
    states: tuple[int, int]
    dropped: tuple[Edge, ...]
    unused: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class FreezeReport(Shown):
    """What `rewire.freeze` did. Printing it shows tables.

    Attributes:
        threshold: edges with a smaller weight were dropped.
        trunks: one entry for each trunk.
        change: relative change of the outputs on the example inputs: norm of the difference over norm of the learned
            model's output, the largest over all outputs; None if it was not measured.
        unmeasured: why ``change`` was not measured.
    """

    threshold: float
    trunks: tuple[FrozenTrunk, ...]
    change: float | None
    unmeasured: str = ""

    def shown(self) -> Iterator[RenderableType]:
        moved = f"not measured: {self.unmeasured}" if self.change is None else f"{self.change:.1e} (relative)"
        yield Text(f"Frozen at threshold {self.threshold:g}; change of the outputs: {moved}", style="bold")
        rows = ((t.name, "{} -> {}".format(*t.edges), "{} -> {}".format(*t.states)) for t in self.trunks)
        yield table(("trunk", "edges", "states held"), rows)
        for trunk in self.trunks:
            if trunk.dropped:
                yield self._dropped(trunk)
            if trunk.unused:
                yield Text(f"Nothing uses units {', '.join(map(str, trunk.unused))} of {trunk.name}, which still run")

    @staticmethod
    def _dropped(trunk: FrozenTrunk) -> Table:
        rows, strongest = [], sorted(trunk.dropped, key=lambda edge: -abs(edge.weight))
        for edge in strongest[:_SHOWN]:
            because = f"{edge.destination} is unused" if edge.unread else "below the threshold"
            rows.append((edge.source, edge.destination, f"{edge.weight:.1e}", because))
        if len(strongest) > _SHOWN:
            rows.append(("...", "", "", f"{len(strongest) - _SHOWN} more, see .dropped"))
        title = f"{len(trunk.dropped)} edges dropped in {trunk.name}"
        return table(("from", "into", "weight", "reason"), rows, title)


@outside_inference_mode
def freeze(model: M, threshold: float = 1e-3, example_inputs: object = None) -> tuple[M, FreezeReport]:
    """Turn the learned connections of a rewired model into constants, and drop those below ``threshold``.

    States that are no longer used are freed as early as possible; `rewire.coefficients` shows the edges that are left.
    With ``threshold=0`` the outputs stay the same up to rounding.

    Args:
        model: a rewired model with static topologies. It is not changed; the frozen model shares its parameters.
        threshold: edges with a weight of smaller magnitude are dropped (of weights per channel the largest counts);
            those with weight 0 always are. A unit's own output is not an edge.
        example_inputs: inputs on which to measure the change of the outputs, as for `rewire.compile`.

    Returns:
        The frozen model, whose connections have buffers instead of parameters, and a report.

    Raises:
        RewireError: the model was not rewired, was changed since, or its weights are on the meta device.
        UnsupportedTopology: the weights of a trunk depend on the input, or are frozen already.
        WrappedModel: the model is sharded or compiled.
        ValueError: the threshold is negative.
        BadExampleInputs: the model does not run on the given example inputs.

    Example:
        >>> frozen, report = rewire.freeze(rewired, threshold=0.05, example_inputs=(x,))
        >>> print(report)  # doctest: +ELLIPSIS
        Frozen at threshold 0.05; change of the outputs: ...
    """
    learned = learned_connections(model, "there is nothing to freeze")
    if not (is_number(threshold) and threshold >= 0):
        raise ValueError(f"threshold={threshold!r}: it has to be 0 or a positive number, like 1e-3.")
    check_unwrapped(model)
    check_loaded(model, "frozen")
    results = {name: _frozen(connection, threshold) for name, connection in learned.items()}
    constant = shared(model)
    for name, connection in connections(constant).items():
        connection.become(results[name].layout)
        for key, value in results[name].constants.items():
            connection.get_buffer(key).copy_(value)
    change, unmeasured = _change(model, constant, patterns_for(model), example_inputs)
    return constant, FreezeReport(threshold, tuple(r.report for r in results.values()), change, unmeasured)


@dataclasses.dataclass(frozen=True)
class _Result:
    """A trunk's new layout, the values of its buffers, and its entry in the report."""

    layout: Layout
    constants: dict[str, Tensor]
    report: FrozenTrunk


def _frozen(connection: Connection, threshold: float) -> _Result:
    old = connection.layout
    with torch.no_grad():
        try:
            if isinstance(old.topology, Frozen):
                raise UnsupportedTopology(f"{old.topology} is frozen already")
            program, weights = constant_program(connection)
        except UnsupportedTopology as error:
            raise UnsupportedTopology(
                f"trunk '{old.trunk}' cannot be frozen: {error}. Freeze models whose topologies are all static (ancre, "
                "denseformer, grn-v1, grn-v2, hc-static, laurel-rw and scales)."
            ) from error
        pruned, dropped = prune(program, threshold)
        table = matrix(pruned)
        topology, channels = frozen(repr(old.topology), fold(pruned), (table.shape[0], table.shape[1]))
        most = most_held(old.topology, weights, old.dims)
    constants = {"table": table} | ({"channels": torch.stack(channels)} if channels else {})
    held = max(len(topology.held(t)) for t in range(old.dims.depth + 1))
    used = reaching(digraph(pruned), [pruned.output])
    unused = tuple(t for t in range(1, old.dims.depth + 1) if branch_of(t) not in used)
    counts, states = (edges(program), edges(pruned)), (most, held)
    report = FrozenTrunk(old.trunk, repr(old.topology), counts, states, tuple(dropped), unused)
    return _Result(old.of(topology), constants, report)


@torch.no_grad()
def constant_program(connection: Connection) -> tuple[Program, Any]:
    """A trunk's computation as sums with constant weights, and its effective weights, on the CPU.

    Raises:
        UnsupportedTopology: the weights are not constant, or the program differs from the topology's formulas.
    """
    layout = connection.layout
    if any(site.post and not site.makes_state for site in layout.sites):
        raise UnsupportedTopology(
            "between its residual adds the model scales what is read, or adds to it, and topology "
            f"'{layout.topology.registered_name}' does not keep the result as a state"
        )
    weights = weights_of(connection)
    program = layout.topology.program(weights, layout.dims)
    if not isinstance(layout.topology, Frozen):
        _check_program(layout.topology, weights, layout.dims, program)
    return program, weights


def weights_of(connection: Connection) -> Any:
    """The effective weights of a trunk, on the CPU, without gradients."""
    values = {**connection.values(), **dict(connection.named_buffers())}
    layout = connection.layout
    return layout.topology.weights({name: x.detach().cpu() for name, x in values.items()}, layout.dims)


def _check_program(topology: Topology[W], weights: W, dims: Dims, program: Program) -> None:
    """Raise UnsupportedTopology if the program differs from the formulas: a subclass may have changed only these."""
    table = matrix(program)
    made, channels = frozen(repr(topology), fold(program), (table.shape[0], table.shape[1]))
    constants = Constants(table, torch.stack(channels) if channels else None)
    given = torch.randn(dims.depth + 1, 2, dims.width or 4, generator=torch.Generator().manual_seed(0))
    wanted, found = reads_of(topology, weights, given, dims), reads_of(made, constants, given, dims)
    if not torch.allclose(wanted, found, rtol=1e-3, atol=1e-3 * float(wanted.abs().max())):
        raise UnsupportedTopology(
            f"topology '{topology.registered_name}' does not compute what its method `program` says. If it inherits "
            "that method, define its own"
        )


def most_held(topology: Topology[W], weights: W, dims: Dims) -> int:
    """The largest number of hidden states that a topology holds between units."""
    x = torch.zeros(1, dims.width or 1)
    states = topology.start(x, weights)
    most = 1
    for t in range(1, dims.depth + 1):
        states = topology.write(topology.read(states, weights, t)[1], weights, t, torch.zeros_like(x))
        storages = {s.data_ptr(): s.nbytes() for s in (x.untyped_storage() for x in _tensors(states))}
        most = max(most, sum(storages.values()) // x.nbytes)
    return most


def _tensors(states: States) -> list[Tensor]:
    of_each = (state.states if isinstance(state, History) else (state,) for state in states)
    return [x for tensors in of_each for x in tensors if isinstance(x, Tensor)]


def _change(
    model: nn.Module, constant: nn.Module, found: list[Pattern], example_inputs: object
) -> tuple[float | None, str]:
    """Relative change of the outputs, or None and the reason why it was not measured."""
    try:
        inputs = inputs_for(model, found, example_inputs)
        try:
            expected = outputs(model, inputs)
        except Exception as error:
            raise BadExampleInputs(
                f"{type(model).__name__} does not run on the example inputs: {type(error).__name__}: {error}"
            ) from error
    except BadExampleInputs as error:
        if example_inputs is not None:
            raise
        return None, f"{error}; pass example_inputs"
    moved = [relative_error(a, b) for a, b in zip(expected, outputs(constant, inputs), strict=True)]
    return (max(moved), "") if moved else (None, "the outputs hold no floating-point tensor")
