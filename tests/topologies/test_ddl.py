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
from rewire.topologies.ddl import DDL, Form

WIDTH = 6
net = functools.partial(toy_nets.net, width=WIDTH)


def drawn(depth: int) -> dict[str, Tensor]:
    start = DDL().parameters(Dims(depth, WIDTH), "paper")
    return {name: (value + 0.5 * torch.randn_like(value)).requires_grad_() for name, value in start.items()}


@pytest.mark.parametrize("start", get_args(Start))
def test_every_weight_learns(start: Start) -> None:
    topology = DDL().for_start(start)
    before = topology.parameters(Dims(4, WIDTH), start)
    learned: dict[str, Tensor] = {name: nn.Parameter(value.clone()) for name, value in before.items()}
    blocks = net(4)
    stepper = torch.optim.SGD([*learned.values(), *nn.ModuleList(blocks).parameters()], lr=0.01)
    x, target = torch.randn(2, 16, WIDTH)
    for step in range(2):
        stepper.zero_grad()
        out = toy_nets.run(topology, topology.weights(learned, Dims(4, WIDTH)), x, blocks)
        nn.functional.mse_loss(out, target).backward()
        stepper.step()
        for name, value in learned.items():
            late = step == 0 and start == "preserve" and name.startswith("value")
            assert (value == before[name]).all() if late else (value != before[name]).all(), name


def test_paper_start_replaces_the_part_along_the_branch() -> None:
    topology, (x, f) = DDL(), torch.randn(2, 5, WIDTH)
    weights = topology.weights(topology.parameters(Dims(1, WIDTH), "paper"), Dims(1, WIDTH))
    new, k = topology.merge((x,), weights, 1, f).value(), nn.functional.normalize(f, dim=-1)
    torch.testing.assert_close((new * k).sum(-1), torch.full((5,), 2.0))
    torch.testing.assert_close(new - 2 * k, x - k * (x * k).sum(-1, keepdim=True))
    torch.testing.assert_close(topology.matrix(weights, Dims(1, WIDTH)), torch.tensor([[1 - 1 / WIDTH]]))


def test_float32_under_autocast() -> None:
    topology, (x, f) = DDL(), torch.randn(2, 4, WIDTH)
    weights = topology.weights(drawn(1), Dims(1, WIDTH))
    want = topology.merge((x,), weights, 1, f).value()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(topology.merge((x,), weights, 1, f).value(), want)


@pytest.mark.slow
@pytest.mark.parametrize("form", get_args(Form))
def test_compiles_in_one_graph(form: Form) -> None:
    topology, blocks, x, parameters = DDL(form), net(3), torch.randn(4, WIDTH), drawn(3)

    def forward(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return toy_nets.run(topology, topology.weights(parameters, Dims(3, WIDTH)), x, blocks)

    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(parameters, x), forward(parameters, x))


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"form='gate'.*'delta', 'difference'"):
        make_topology("ddl", {"form": "gate"})
    with pytest.raises(UnsupportedTopology, match=r"'ddl'.*replaces.*start='paper'"):
        DDL().parameters(Dims(2, WIDTH), "preserve")
    with pytest.raises(UnsupportedTopology, match=r"no constant form"):
        DDL().program(DDL().weights(drawn(2), Dims(2, WIDTH)), Dims(2, WIDTH))
