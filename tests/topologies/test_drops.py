"""`Topology.drops` names every unit that is the last to use a state which the model knows."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from mixing import shaken
from torch import Tensor, nn
from written_nets import WIDTH, written_input, written_net

import rewire
from rewire.mixes.history import History
from rewire.topologies import Dims, Topology, list_topologies, make_topology
from rewire.topologies.base import QKVInputs, States, materialize
from rewire.torch_internals import memory_of

DIMS = Dims(12, WIDTH, frozenset(range(1, 13, 2)))
WITH_OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("denseformer", {"units": [4, 7], "sources": ["x0", 2]}),
    ("ancre-ingoing", {"units": [5, 7], "sources": [1]}),
    ("grn-v3", {"units": [4, 7], "sources": ["x0", 2]}),
    ("attnres", {"units": [5], "sources": [-2]}),
    ("dca", {"units": [5, 8], "sources": [1, 4]}),
    *[("grn-v1", {"last": 1}), ("attnres", {"block": 2}), ("grn-v2", {"block": 3}), ("laurel-pa", {"last": 2})],
    *[("hc-static", {"streams": 2}), ("multi-gate", {"streams": 3})],
]


def parts_of(states: States) -> set[int]:
    parts = [x for state in states for x in (state.parts if isinstance(state, History) else [state])]
    return {memory_of(x) for x in parts if isinstance(x, Tensor)}


def units_that_drop(topology: Topology, weights: Any, dims: Dims) -> Iterator[int]:
    """The units after whose read or write a tensor that the model knows is no state any more."""
    x = torch.randn(2, 3, WIDTH)
    states, known = topology.start(x, weights), [x]
    for t in range(1, dims.depth + 1):
        before = parts_of(states)
        value, states = topology.read(states, weights, t)
        given = value if isinstance(value, QKVInputs) else materialize(value)
        own = [given.q, given.k, given.v, given.residual] if isinstance(given, QKVInputs) else [given]
        branch, during = torch.randn(2, 3, WIDTH), parts_of(states)
        states = topology.write(states, weights, t, branch)
        read, others = {memory_of(x) for x in own}, {memory_of(x) for x in known}
        last = {memory_of(known[-1])}  # at which each write looks anyway
        if (before - during) & (others - read) or (during - parts_of(states)) & (others - read - last):
            yield t
        known += [*own, branch]


@pytest.mark.parametrize(("name", "options"), [*[(name, {}) for name in list_topologies()], *WITH_OPTIONS])
def test_each_names_the_units_that_drop_states(name: str, options: dict[str, Any]) -> None:
    topology = make_topology(name, options).for_start("paper")
    with torch.no_grad():
        weights = topology.weights(topology.parameters(DIMS, "paper"), DIMS)
        found = [*units_that_drop(topology, weights, DIMS)]
    assert {*found} <= {*topology.drops(DIMS)}, (found, topology.drops(DIMS))
    if options and name.startswith(("denseformer", "grn", "laurel")) and "block" not in options:
        assert found  # these do


@pytest.mark.parametrize("few", [{}, {"units": [3], "sources": ["x0"]}])
def test_frozen_programs_name_them(few: dict[str, Any]) -> None:
    net = written_net()
    net.blocks = nn.ModuleList(copy.deepcopy(net.get_submodule("blocks.0")) for _ in range(DIMS.depth))
    rewired = rewire.compile(net, make_topology("denseformer", few), example_inputs=(written_input(),))
    connection = next(iter(rewire.connections(rewire.freeze(shaken(rewired, 0.3, seed=0))[0]).values()))
    frozen, dims = connection.layout.topology, connection.dims
    with torch.no_grad():
        found = [*units_that_drop(frozen, connection.effective(), dims)]
    assert {*found} <= {*frozen.drops(dims)}
    assert (2 in found) == bool(few)  # which computes the next read, the last of the input
