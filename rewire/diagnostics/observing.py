"""A copy of a model that records its residual streams, for `rewire.diagnose`.

The copy's streams report what passes through them (`Layout.observe`). The caller's model never has hooks, and a model
that is not observed pays nothing.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from rewire.compiler import compile
from rewire.copies import Inputs, private
from rewire.errors import BadExampleInputs, RewireError
from rewire.passes.checks import check_loaded, check_unwrapped
from rewire.passes.inputs import inputs_for
from rewire.patterns import patterns_for
from rewire.runtime.connection import Connection, connections
from rewire.topologies.base import States, Topology
from rewire.topologies.residual import Residual
from rewire.torch_internals import pytree
from rewire.trunk import Trunk


@dataclasses.dataclass(eq=False)
class Run:
    """The values of one forward of a trunk.

    Attributes:
        input: ``x_0``, the hidden states at the trunk's input; with a gradient.
        reads: for each site, by position, what its branch read (with separate q/k/v inputs, that of the residual), in
            the dimensions of the output.
        branches: for each site, by position, the branch outputs that it added; several if they ran in parallel.
        states: the topology's, before it computes the output from them.
        output: the trunk's output; None if its last block was not reached.
    """

    input: Tensor
    reads: dict[int, Tensor] = dataclasses.field(default_factory=dict)
    branches: dict[int, tuple[Tensor, ...]] = dataclasses.field(default_factory=dict)
    states: States = ()
    output: Tensor | None = None

    def keep(self, what: str, position: int, value: Any) -> None:
        """Record a value; the stream calls it, see `Layout.observe`."""
        if self.output is not None:
            return  # activation checkpointing recomputes it
        match what:
            case "read":
                self.reads[position] = value
            case "write":
                self.branches[position] = value
            case "view":
                self.reads = {site: value(read) for site, read in self.reads.items()}
            case "end":
                self.states = value
            case "finish":
                self.output = value


@dataclasses.dataclass(eq=False)
class Record:
    """The recorded values of one trunk.

    Attributes:
        trunk: the trunk.
        topology: how it is connected.
        given: hidden states that replace the trunk's input; None: those that the model computes.
        runs: one for each time that the trunk was entered.
    """

    trunk: Trunk
    topology: Topology
    given: Tensor | None = None
    runs: list[Run] = dataclasses.field(default_factory=list)

    def begin(self, connection: Connection, args: tuple[Tensor]) -> Tensor:
        """Record and return the trunk's input. The copy's connection calls this hook before it opens a stream."""
        x = args[0] if self.given is None else self.given
        run = Run(x if x.requires_grad else x.detach().requires_grad_())
        self.runs.append(run)
        connection.layout = copy.copy(connection.layout)  # for this stream only
        connection.layout.observe = run.keep
        return run.input


def observed(model: nn.Module, inputs: Inputs | None = None) -> tuple[nn.Module, list[Record]]:
    """A copy of ``model`` that computes the same and records its residual streams.

    Args:
        model: a plain, rewired or frozen model. Its parameters' memory is shared.
        inputs: what it will be run on.

    Returns:
        The copy, and the record of each trunk (in a rewired model, of each rewired one).

    Raises:
        NoResidualAdds: the model has no residual stream.
        AlreadyConnected, WrappedModel, RewireError: it cannot be rewritten as it is.
    """
    check_loaded(model, "diagnosed")
    if connections(model):
        check_unwrapped(model)
        copied = private(model)
    else:
        copied = private(compile(model, Residual(), example_inputs=inputs, validate=False))
    records = []
    for connection in connections(copied).values():
        assert connection.trunk is not None
        record = Record(connection.trunk, connection.layout.topology)
        connection.register_forward_pre_hook(record.begin)
        records.append(record)
    return copied, records


def inputs_of(model: nn.Module, batch: object) -> Inputs:
    try:
        return inputs_for(model, patterns_for(model), batch)
    except BadExampleInputs as error:
        if batch is None:
            raise BadExampleInputs(f"{error}: pass batch=, what {type(model).__name__} is called with.") from error
        raise


def called(copy: nn.Module, inputs: Inputs, seed: int) -> Any:
    torch.manual_seed(seed)
    args, kwargs = pytree.tree_map(own, inputs)
    try:
        return copy(*args, **kwargs)
    except RewireError:
        raise
    except Exception as error:
        name = type(error).__name__
        raise BadExampleInputs(f"{type(copy).__name__} does not run on the batch: {name}: {error}") from error


def own(value: Any) -> Any:
    """A copy of an input, which the model may write to."""
    return value.clone() if isinstance(value, Tensor) else value
