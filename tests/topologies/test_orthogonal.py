from __future__ import annotations

import functools
from typing import Any, get_args

import pytest
import torch
import toy_nets
from formulas import by_reference
from torch import Tensor, nn
from toy_nets import plain

from rewire.errors import UnsupportedTopology
from rewire.topologies import make_topology
from rewire.topologies.base import Dims
from rewire.topologies.orthogonal import Form, OrthogonalUpdate

WIDTH = 6
net = functools.partial(toy_nets.net, width=WIDTH)


@pytest.mark.parametrize("form", get_args(Form))
@pytest.mark.parametrize("depth", [1, 3])
def test_formulas(form: Form, depth: int) -> None:
    topology, blocks, dims = OrthogonalUpdate(form), net(depth, torch.float64), Dims(depth, WIDTH)
    start = topology.parameters(dims, "paper")
    parameters = {name: torch.randn_like(value).requires_grad_() for name, value in start.items()}
    x = torch.randn(2, 3, WIDTH, dtype=torch.float64, requires_grad=True)
    got = toy_nets.run(topology, topology.weights(parameters, dims), x, blocks)
    want = by_reference(topology, parameters, x, blocks)[0]
    torch.testing.assert_close(got, want)
    inputs, upstream = (x, *parameters.values(), *nn.ModuleList(blocks).parameters()), torch.randn_like(x)
    torch.testing.assert_close(*(torch.autograd.grad(out, inputs, upstream) for out in (got, want)))


def test_what_is_added_is_at_right_angles_to_the_state() -> None:
    x, f, g = torch.randn(3, 5, WIDTH, dtype=torch.float64)
    new = OrthogonalUpdate().merge((x,), None, 1, f, g).value()
    torch.testing.assert_close(((new - x) * x).sum(-1), torch.zeros(5).double(), rtol=0, atol=1e-5)
    torch.testing.assert_close((new * x).sum(-1), x.square().sum(-1), rtol=1e-5, atol=1e-5)
    gated: Any = OrthogonalUpdate("gated")
    start = gated.weights(gated.parameters(Dims(1, WIDTH), "paper"), Dims(1, WIDTH))
    torch.testing.assert_close(gated.merge((x,), start, 1, f, g).value(), new)


def test_a_state_that_is_zero_takes_the_branch() -> None:
    x, f = torch.zeros(2, WIDTH), torch.randn(2, WIDTH)
    assert torch.equal(OrthogonalUpdate().merge((x,), None, 1, f).value(), f)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_preserving_start_is_bitwise(dtype: torch.dtype) -> None:
    topology: Any = OrthogonalUpdate().for_start("preserve")
    weights = topology.weights(topology.parameters(Dims(5, WIDTH), "preserve"), Dims(5, WIDTH))
    blocks, x = net(5, dtype), torch.randn(4, WIDTH).to(dtype)
    out = toy_nets.run(topology, weights, x, blocks)
    assert out.dtype == dtype and torch.equal(out, plain(x, blocks))


def test_gates_learn_at_once() -> None:
    topology, blocks = OrthogonalUpdate("gated"), net(4)
    gates = topology.parameters(Dims(4, WIDTH), "preserve")["gates"].requires_grad_()
    toy_nets.run(topology, gates, torch.randn(16, WIDTH), blocks).square().sum().backward()
    assert gates.grad is not None and (gates.grad != 0).all()


def test_float32_under_autocast() -> None:
    x, f = torch.randn(2, 4, WIDTH)
    want = OrthogonalUpdate().merge((x,), None, 1, f).value()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(OrthogonalUpdate().merge((x,), None, 1, f).value(), want)


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"form='none'.*'orthogonal', 'gated'"):
        make_topology("orthogonal", {"form": "none"})
    with pytest.raises(UnsupportedTopology, match=r"'orthogonal'.*form='gated' has one.*start='paper'"):
        OrthogonalUpdate().parameters(Dims(2, WIDTH), "preserve")
    gates: Tensor = torch.ones(2)
    with pytest.raises(UnsupportedTopology, match=r"no constant form"):
        OrthogonalUpdate("gated").program(gates, Dims(2, WIDTH))
