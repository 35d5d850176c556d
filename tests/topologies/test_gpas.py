from __future__ import annotations

import functools
from typing import get_args

import pytest
import torch
import toy_nets
from formulas import by_reference
from torch import nn
from toy_nets import plain

from rewire.errors import UnsupportedTopology
from rewire.topologies import make_topology
from rewire.topologies.base import Dims
from rewire.topologies.gpas import GPAS, Scaled

WIDTH = 6
net = functools.partial(toy_nets.net, width=WIDTH)


@pytest.mark.parametrize("scaled", get_args(Scaled))
@pytest.mark.parametrize("depth", [1, 3])
def test_formulas(scaled: Scaled, depth: int) -> None:
    topology, blocks, dims = GPAS(scaled), net(depth, torch.float64), Dims(depth, WIDTH)
    parameters = {"gates": torch.randn(depth, dtype=torch.float64, requires_grad=True)}
    x = torch.randn(2, 3, WIDTH, dtype=torch.float64, requires_grad=True)
    got = toy_nets.run(topology, topology.weights(parameters, dims), x, blocks)
    want = by_reference(topology, parameters, x, blocks)[0]
    torch.testing.assert_close(got, want)
    inputs, upstream = (x, *parameters.values(), *nn.ModuleList(blocks).parameters()), torch.randn_like(x)
    torch.testing.assert_close(*(torch.autograd.grad(out, inputs, upstream) for out in (got, want)))


@pytest.mark.parametrize("scaled", get_args(Scaled))
def test_values_are_scaled_and_gradients_are_not(scaled: Scaled) -> None:
    topology, x, f = GPAS(scaled), torch.randn(3, WIDTH, requires_grad=True), torch.randn(3, WIDTH)
    weights = topology.weights({"gates": torch.tensor([1.5])}, Dims(1))
    new, upstream = topology.merge((x,), weights, 1, f), torch.randn(3, WIDTH)
    kept = 1 - torch.nn.functional.silu(torch.tensor(1.5))
    torch.testing.assert_close(new, kept * (x + f) if scaled == "sum" else kept * x + f)
    assert torch.equal(torch.autograd.grad(new, x, upstream)[0], upstream)


@pytest.mark.parametrize("scaled", get_args(Scaled))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_both_starts_are_bitwise_and_learn(dtype: torch.dtype, scaled: Scaled) -> None:
    topology, blocks, x = GPAS(scaled), net(4, dtype), torch.randn(4, WIDTH).to(dtype)
    parameters = topology.parameters(Dims(4), "paper")
    assert torch.equal(parameters["gates"], topology.parameters(Dims(4), "preserve")["gates"])
    gates = parameters["gates"].requires_grad_()
    out = toy_nets.run(topology, topology.weights({"gates": gates}, Dims(4)), x, blocks)
    assert out.dtype == dtype and torch.equal(out, plain(x, blocks))
    out.square().sum().backward()
    assert gates.grad is not None and (gates.grad != 0).all()


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"scaled='state'.*'sum', 'shortcut'"):
        make_topology("gpas", {"scaled": "state"})
    with pytest.raises(UnsupportedTopology, match=r"no constant form"):  # its gradients are not those of a scale
        GPAS().program(torch.zeros(2), Dims(2))
    assert torch.equal(GPAS().matrix(torch.tensor([0.0, 0.5]), Dims(2)), torch.diag(torch.tensor([1.0, 0.5])))
