"""A copy of a model that keeps what its residual streams hold: what `rewire.diagnose` runs.

The observer is a topology around another one. It takes that one's place in the layouts of a copy, so that the
caller's model has no hooks at any time, and a model that is not observed pays nothing.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from torch import Tensor, nn

from rewire.compiler import compile
from rewire.connection import connections
from rewire.passes.checks import check_loaded, check_whole
from rewire.passes.copies import shared
from rewire.patterns.pattern import Inputs
from rewire.runtime.layout import Layout
from rewire.topologies.base import Dims, QKVInputs, Recurrence, Start, States, materialize, total
from rewire.topologies.residual import Residual
from rewire.trunk import Trunk


@dataclasses.dataclass(eq=False)
class Run:
    """What one forward of a trunk computed; channels are dimension `Record.channel_dim`.

    Attributes:
        input: ``x_0``, the hidden states at the trunk's input; with a gradient.
        reads: for each site, by position, what its branch read (of separate q/k/v inputs, that of the residual).
        branches: for each site, by position, the branch outputs that it added; several if they ran in parallel.
        output: the trunk's output; None if its last block was not reached.
    """

    input: Tensor
    reads: dict[int, Tensor] = dataclasses.field(default_factory=dict)
    branches: dict[int, tuple[Tensor, ...]] = dataclasses.field(default_factory=dict)
    output: Tensor | None = None


@dataclasses.dataclass(eq=False)
class Record:
    """What is kept of one trunk.

    Attributes:
        trunk: the trunk.
        layout: its topology and units, as the model has them.
        given: hidden states to put in place of the trunk's input; None: what the model computes.
        runs: what forwards computed, one for each time that the trunk was entered.
    """

    trunk: Trunk
    layout: Layout
    given: Tensor | None = None
    runs: list[Run] = dataclasses.field(default_factory=list)

    @property
    def channel_dim(self) -> int:
        """Dimension of the channels in what `runs` hold."""
        if self.layout.topology.needs_width:
            return -1  # the stream has moved them
        return self.trunk.channel_dim

    def begin(self, x: Tensor) -> Run:
        if self.given is not None:
            x = self.given
        elif not x.requires_grad:
            x = x.detach().requires_grad_()
        self.runs.append(Run(x))
        return self.runs[-1]


def observed(model: nn.Module, inputs: Inputs | None = None) -> tuple[nn.Module, list[Record]]:
    """A copy of ``model`` that computes the same and keeps what its residual streams hold.

    Args:
        model: a plain, rewired or frozen model. Its parameters and buffers are shared.
        inputs: what it is going to be run on.

    Returns:
        The copy, and for each trunk (of a rewired model, each rewired one) its record.

    Raises:
        NoResidualAdds: the model has no residual stream.
        AlreadyConnected, ShardedModel, RewireError: it cannot be rewritten as it is.
    """
    check_loaded(model, "diagnosed")
    if connections(model):
        check_whole(model)
        copy = shared(model)
    else:
        copy = compile(model, Residual(), example_inputs=inputs, validate=False)
    records = []
    for connection in connections(copy).values():
        assert connection.trunk is not None
        record = Record(connection.trunk, connection.layout)
        connection.layout = _by_site(record)
        records.append(record)
    return copy, records


def _by_site(record: Record) -> Layout:
    """The layout of an observed trunk: each residual add is a unit, so that each passes the observer."""
    old, sites = record.layout, range(len(record.layout.units))
    separate = [site + 1 for site in sites if old.reads_qkv(site)]
    units = [site + 1 for site in sites]
    return Layout(old.trunk, Observed(record), units, old.dims.width, separate, old.channel_dim, old.posts)


class _Inside(NamedTuple):
    """States of an observed trunk.

    Attributes:
        run: where they are kept.
        states: those of the topology inside.
        hidden: between the sites of a unit, what the next branch reads; else None.
        branches: outputs of the unit's branches so far.
    """

    run: Run
    states: States
    hidden: Tensor | None = None
    branches: tuple[Tensor, ...] = ()


class Observed(Recurrence[Any]):
    """Another topology, each site by itself: it keeps what branches read and add, and changes nothing.

    Where the other one connects whole blocks, the sums inside a block are done here, in the stream's place.

    Args:
        record: of the trunk; also says what the other topology is.
    """

    def __init__(self, record: Record) -> None:
        self.record, self.layout = record, record.layout
        self.inner = record.layout.topology

    @property
    def needs_width(self) -> bool:  # type: ignore[override]
        return self.inner.needs_width

    def parameters(self, dims: Dims, start: Start) -> dict[str, Tensor]:
        return self.inner.parameters(self.layout.dims, start)

    def constants(self, dims: Dims) -> dict[str, Tensor]:
        return self.inner.constants(self.layout.dims)

    def weights(self, parameters: dict[str, Tensor], dims: Dims) -> Any:
        return self.inner.weights(parameters, self.layout.dims)

    def matrix(self, weights: Any, dims: Dims) -> Tensor:
        return self.inner.matrix(weights, self.layout.dims)

    def start(self, x: Tensor, weights: Any) -> States:
        run = self.record.begin(x)
        return _Inside(run, self.inner.start(run.input, weights))

    def template(self, states: States) -> Tensor:
        return self.inner.template(_inside(states).states)

    def read(self, states: States, weights: Any, t: int) -> tuple[Tensor | QKVInputs, States]:
        run, inner, hidden, branches = _inside(states)
        value: Tensor | QKVInputs
        if hidden is None:
            due, inner = self.inner.read(inner, weights, self.layout.units[t - 1])
            value = due if isinstance(due, QKVInputs) else materialize(due)
            hidden = value.residual if isinstance(value, QKVInputs) else value
        else:
            value = hidden
        run.reads[t - 1] = hidden
        return value, _Inside(run, inner, hidden, branches)

    def write(self, states: States, weights: Any, t: int, *branches: Tensor) -> States:
        run, inner, hidden, before = _inside(states)
        run.branches[t - 1] = branches
        if not self.layout.closes_unit(t - 1):
            assert hidden is not None
            return _Inside(run, inner, total((hidden, *branches)), (*before, *branches))
        added = (total(before), *branches) if before else branches  # as the stream hands them on
        return _Inside(run, self.inner.write(inner, weights, self.layout.units[t - 1], *added))

    def merge(self, states: States, weights: Any, t: int, *branches: Tensor) -> Tensor:
        run, inner, *_ = _inside(states)
        run.branches[t - 1] = branches
        assert isinstance(self.inner, Recurrence)
        return materialize(self.inner.merge(inner, weights, self.layout.units[t - 1], *branches))

    def push(self, states: States, weights: Any, t: int, x: Tensor) -> States:
        run, inner, *_ = _inside(states)
        assert isinstance(self.inner, Recurrence)
        return _Inside(run, self.inner.push(inner, weights, self.layout.units[t - 1], x))

    def finish(self, states: States, weights: Any, dims: Dims) -> Tensor:
        run, inner, *_ = _inside(states)
        run.output = self.inner.finish(inner, weights, self.layout.dims)
        return run.output


def _inside(states: States) -> _Inside:
    assert isinstance(states, _Inside)
    return states
