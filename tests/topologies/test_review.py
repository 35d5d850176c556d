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
from rewire.topologies.base import Dims, Start
from rewire.topologies.review import Form, Review

WIDTH = 6
net = functools.partial(toy_nets.net, width=WIDTH)


def drawn(depth: int) -> dict[str, Tensor]:
    start = Review().parameters(Dims(depth, WIDTH), "paper")
    return {name: (0.5 * torch.randn_like(value)).requires_grad_() for name, value in start.items()}


@pytest.mark.parametrize("form", get_args(Form))
@pytest.mark.parametrize("depth", [1, 3])
def test_formulas(form: Form, depth: int) -> None:
    topology, blocks, dims = Review(form), net(depth, torch.float64), Dims(depth, WIDTH)
    parameters, x = drawn(depth), torch.randn(2, 3, WIDTH, dtype=torch.float64, requires_grad=True)
    got = toy_nets.run(topology, topology.weights(parameters, dims), x, blocks)
    want = by_reference(topology, parameters, x, blocks)[0]
    torch.testing.assert_close(got, want)
    inputs, upstream = (x, *parameters.values(), *nn.ModuleList(blocks).parameters()), torch.randn_like(x)
    torch.testing.assert_close(*(torch.autograd.grad(out, inputs, upstream) for out in (got, want)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("zero", [False, True])
def test_preserving_start_is_bitwise(dtype: torch.dtype, zero: bool) -> None:
    topology: Any = Review().for_start("preserve")
    weights = topology.weights(topology.parameters(Dims(5, WIDTH), "preserve"), Dims(5, WIDTH))
    blocks, x = net(5, dtype, zero=zero), torch.randn(4, WIDTH).to(dtype)
    out = toy_nets.run(topology, weights, x, blocks)
    assert out.dtype == dtype and torch.equal(out, plain(x, blocks))


@pytest.mark.parametrize("start", get_args(Start))
def test_every_weight_learns_at_once(start: Start) -> None:
    topology, blocks = Review().for_start(start), net(4)
    before = topology.parameters(Dims(4, WIDTH), start)
    learned: dict[str, Tensor] = {name: nn.Parameter(value.clone()) for name, value in before.items()}
    x, target = torch.randn(2, 16, WIDTH)
    out = toy_nets.run(topology, topology.weights(learned, Dims(4, WIDTH)), x, blocks)
    nn.functional.mse_loss(out, target).backward()
    assert all((p.grad != 0).all() for p in learned.values())


def test_paper_start_halves_the_branch() -> None:
    x, f, g = torch.randn(3, 5, WIDTH)
    weights = Review().weights(Review().parameters(Dims(1, WIDTH), "paper"), Dims(1, WIDTH))
    torch.testing.assert_close(Review().merge((x,), weights, 1, f, g), x + (f + g) / 2)


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"form='gate'.*'sigmoid', 'difference'"):
        make_topology("review", {"form": "gate"})
    with pytest.raises(UnsupportedTopology, match=r"'review'.*never 1.*start='paper'"):
        Review().parameters(Dims(2, WIDTH), "preserve")
    with pytest.raises(UnsupportedTopology, match=r"no constant form"):
        Review().program(Review().weights(drawn(2), Dims(2, WIDTH)), Dims(2, WIDTH))
