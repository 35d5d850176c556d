from __future__ import annotations

import math

import pytest
import torch
import toy_nets
from formulas import by_reference
from torch import nn

from rewire.errors import UnsupportedTopology
from rewire.topologies import MultiGate
from rewire.topologies.base import Dims

WIDTH = 8


@pytest.mark.parametrize(("streams", "depth"), [(2, 1), (2, 4), (4, 3), (4, 6)])
def test_formulas(streams: int, depth: int) -> None:
    topology, blocks, dims = MultiGate(streams, bias=-1.0), toy_nets.net(depth, torch.float64), Dims(depth, WIDTH)
    start = topology.parameters(dims, "paper")
    values = {name: (value + torch.randn_like(value)).requires_grad_() for name, value in start.items()}
    x = torch.randn(2, 3, WIDTH, dtype=torch.float64, requires_grad=True)
    got = toy_nets.run(topology, topology.weights(values, dims), x, blocks)
    want = by_reference(topology, values, x, blocks)[0]
    torch.testing.assert_close(got, want)
    inputs = (x, *values.values(), *nn.ModuleList(blocks).parameters())
    found = (torch.autograd.grad(out.square().sum(), inputs) for out in (got, want))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def test_start_and_matrix() -> None:
    topology, dims = MultiGate(2), Dims(4, WIDTH)
    values = topology.parameters(dims, "paper")
    gate = 1 / (1 + math.sqrt(3 / 21) * (math.exp(3) + 1) - 2)
    torch.testing.assert_close(values["bias"].sigmoid(), torch.full((3, 2), gate))
    matrix = topology.matrix(topology.weights(values, dims), dims)
    kept = 1 - gate
    want = torch.tensor([[1.0, 0, 0, 0, 0], [0.5, 0.5, 0, 0, 0], [kept / 2, kept / 2, gate, 0, 0]])
    torch.testing.assert_close(matrix[:3], want)
    torch.testing.assert_close(matrix.sum(1), torch.ones(5))  # means


def test_errors() -> None:
    with pytest.raises(UnsupportedTopology, match=r"'multi-gate' has no start.*start='paper'"):
        MultiGate().parameters(Dims(5, WIDTH), "preserve")
    with pytest.raises(UnsupportedTopology, match=r"8 streams and 2 units.*bias=-3"):
        MultiGate(8).parameters(Dims(9, WIDTH), "paper")
    with pytest.raises(ValueError, match=r"streams=1"):
        MultiGate(1)
