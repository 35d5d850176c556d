from __future__ import annotations

import pytest
import torch
import toy_nets
from formulas import by_reference
from mixing import shaken
from models import PreNorm, Stack, vectors
from torch import Tensor, nn
from toy_nets import plain

import rewire
from rewire.errors import UnsupportedTopology
from rewire.topologies import TwoLanes, make_topology
from rewire.topologies.base import Dims

WIDTH = 8


@pytest.mark.parametrize("topology", [TwoLanes(), TwoLanes(2), TwoLanes(3, second=[1, -1])], ids=str)
def test_formulas(topology: TwoLanes) -> None:
    blocks, dims = toy_nets.net(5, torch.float64), Dims(5, WIDTH)
    start = topology.parameters(dims, "paper")
    values = {name: (value + torch.randn_like(value)).requires_grad_() for name, value in start.items()}
    x = torch.randn(2, 3, WIDTH, dtype=torch.float64, requires_grad=True)
    chosen = topology if topology.second is None else TwoLanes(topology.last, second=[1, 5])  # the reference counts up
    got = toy_nets.run(topology, topology.weights(values, dims), x, blocks)
    want = by_reference(chosen, values, x, blocks)[0]
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    inputs = (x, *values.values(), *nn.ModuleList(blocks).parameters())
    torch.testing.assert_close(*(torch.autograd.grad(out.square().sum(), inputs) for out in (got, want)))


def test_preserving_start_is_bitwise_and_learns_at_once() -> None:
    topology, blocks, dims = TwoLanes(2), toy_nets.net(4), Dims(4, WIDTH)
    values = {name: nn.Parameter(value) for name, value in topology.parameters(dims, "preserve").items()}
    x = torch.randn(3, WIDTH)
    out = toy_nets.run(topology, topology.weights(values, dims), x, blocks)  # type: ignore[arg-type]
    assert torch.equal(out, plain(x, blocks))
    out.square().sum().backward()
    grads: list[Tensor | None] = [value.grad for value in values.values()]
    assert all(grad is not None and (grad != 0).all() for grad in grads)


def test_attentions_read_the_first_lane_and_frozen_it_computes_the_same() -> None:
    rewired = shaken(rewire.compile(Stack(PreNorm).eval(), "two-lanes", example_inputs=(vectors(),)), 0.2, 1)
    (connection,) = rewire.connections(rewired).values()
    kinds = [site.kind for site in connection.trunk.sites]  # type: ignore[union-attr]
    second = connection.layout.topology.second  # type: ignore[attr-defined]
    assert kinds[0] == "attention" and second == tuple(t for t, kind in enumerate(kinds, 1) if kind != "attention")
    frozen, _ = rewire.freeze(rewired)
    torch.testing.assert_close(frozen(vectors()), rewired(vectors()))


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"second='output'.*mean of both"):
        make_topology("two-lanes", {"second": "output"})
    with pytest.raises(ValueError, match=r"last=0"):
        TwoLanes(0)
    with pytest.raises(UnsupportedTopology, match=r"units='conv'"):
        TwoLanes(second="conv").placed(["attention", "ffn"])
