from __future__ import annotations

import functools
from typing import get_args

import pytest
import torch
import toy_nets
from torch import Tensor, nn

from rewire.errors import UnsupportedTopology
from rewire.topologies import make_topology
from rewire.topologies.base import Dims, Start
from rewire.topologies.review import Review

WIDTH = 6
net = functools.partial(toy_nets.net, width=WIDTH)


def drawn(depth: int) -> dict[str, Tensor]:
    start = Review().parameters(Dims(depth, WIDTH), "paper")
    return {name: (0.5 * torch.randn_like(value)).requires_grad_() for name, value in start.items()}


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
