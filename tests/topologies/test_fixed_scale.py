from __future__ import annotations

import pytest
import torch
import toy_nets
from torch import nn
from toy_nets import WIDTH, net, plain

from rewire.errors import UnsupportedTopology
from rewire.topologies import make_topology
from rewire.topologies.base import Dims
from rewire.topologies.fixed_scale import FixedScale


@pytest.mark.parametrize(
    ("options", "a", "b"),
    [
        ({}, 1, 1),
        ({"shortcut_power": 0.25}, 4**0.25, 1),  # DeepNorm, of 2 layers
        ({"branch": 2, "branch_power": -1}, 1, 1 / 2),  # 1 / L
        ({"branch_power": -0.5}, 1, 1 / 2),
        ({"shortcut": 0.7, "branch": -3.0}, 0.7, -3),
    ],
)
def test_formulas(options: dict[str, float], a: float, b: float) -> None:
    topology, blocks, dims = FixedScale(**options), net(4, torch.float64), Dims(4)
    assert topology.parameters(dims, "paper") == {}
    x = torch.randn(3, WIDTH, dtype=torch.float64, requires_grad=True)
    got, want = toy_nets.run(topology, topology.weights({}, dims), x, blocks), x
    for block in blocks:
        want = a * want + b * block(want)
    torch.testing.assert_close(got, want)
    inputs, upstream = (x, *nn.ModuleList(blocks).parameters()), torch.randn_like(x)
    torch.testing.assert_close(*(torch.autograd.grad(out, inputs, upstream) for out in (got, want)))
    torch.testing.assert_close(topology.matrix(topology.weights({}, dims), dims), a * torch.eye(4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_scales_of_1_are_the_plain_network_bitwise(dtype: torch.dtype) -> None:
    topology, blocks, x = FixedScale(), net(4, dtype), torch.randn(3, WIDTH).to(dtype)
    assert topology.parameters(Dims(4), "preserve") == {}
    assert torch.equal(toy_nets.run(topology, topology.weights({}, Dims(4)), x, blocks), plain(x, blocks))


def test_errors() -> None:
    with pytest.raises(UnsupportedTopology, match=r"'fixed-scale'.*constants other than 1.*start='paper'"):
        FixedScale(branch=0.5).parameters(Dims(2), "preserve")
    for options in ({"branch": float("nan")}, {"shortcut": "deepnorm"}, {"branch_power": True}):
        with pytest.raises(ValueError, match="has to be a number"):
            make_topology("fixed-scale", options)
    with pytest.raises(ValueError, match="a scale of 0 would cut the trunk"):
        make_topology("fixed-scale", {"branch": 0.0})
