"""Blocks of a trunk that are trunks themselves: a residual group (SwinIR, RCAN), the transformer in a U-net's block."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from formulas import by_reference
from mixing import shaken
from torch import Tensor, nn

import rewire
from rewire.topologies import make_topology
from rewire.topologies.base import Dims

WIDTH = 8
X = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(1))
TOPOLOGIES = ["ancre-ingoing", "denseformer", "hc-dynamic", "attnres"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.f, self.g = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def one(self, x: Tensor) -> Tensor:
        return self.f(self.norm_1(x))

    def two(self, x: Tensor) -> Tensor:
        return torch.tanh(self.g(self.norm_2(x)))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.one(x)
        return x + self.two(x)


class Group(nn.Module):
    """Two blocks between projections, with a shortcut around them."""

    def __init__(self, before: nn.Module) -> None:
        super().__init__()
        self.before, self.behind = before, nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x)
        for block in self.blocks:
            h = block(h)
        return x + self.behind(h)


class Bare(Group):
    """As `Group`, but its blocks read the state itself."""

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for block in self.blocks:
            h = block(h)
        return self.behind(h) + x


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.f(x))


class Net(nn.Module):
    def __init__(self, cls: type[Group], before: Any, between: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inp, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        layers = [part for _ in range(2) for part in ([Residual()] * between + [cls(before())])]
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def by_hand(model: nn.Module, x: Tensor, topology: str) -> Tensor:
    """The formulas of the topology, around those of the inner trunks."""
    trunks = rewire.connections(model)
    net: Any = model

    def wired(name: str, x: Tensor, branches: list[Any]) -> Tensor:
        own, dims = trunks[name], Dims(len(branches), WIDTH, frozenset())
        weights = {weight: value.double() * own.stored_in[weight] for weight, value in own.named_parameters()}
        return by_reference(make_topology(topology, {}), weights, x, branches, dims)[0]

    def group(n: int, layer: Any) -> Any:
        branches = [branch for block in layer.blocks for branch in (block.one, block.two)]
        before = nn.Identity() if isinstance(layer, Bare) else layer.before
        return lambda x: layer.behind(wired(f"layers.{n}.blocks", before(x), branches))

    outer = [
        group(n, layer) if isinstance(layer, Group) else (lambda x, f=layer.f: torch.relu(f(x)))
        for n, layer in enumerate(net.layers)
    ]
    return net.out(wired("layers", net.inp(x), outer))


@pytest.mark.each_once
@pytest.mark.parametrize("between", [False, True])
@pytest.mark.parametrize(
    ("cls", "before"),
    [(Group, lambda: nn.Linear(WIDTH, WIDTH)), (Group, lambda: nn.LayerNorm(WIDTH)), (Bare, nn.Identity)],
)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_both_trunks_are_connected(topology: str, cls: Any, before: Any, between: bool, caplog: Any) -> None:
    model = Net(cls, before, between).double()
    rewired = shaken(
        rewire.compile(model, topology, example_inputs=(X.double(),), granularity="sublayer", start="paper"),
        0.3,
        seed=5,
    )
    assert "not validated" not in caplog.text
    sizes = {name: len(one.layout.units) for name, one in rewire.connections(rewired).items()}
    assert sizes == {
        "layers": 4 if between else 2,
        **{f"layers.{n}.blocks": 4 for n in ((1, 3) if between else (0, 1))},
    }
    x = X.double().requires_grad_()
    want, got = by_hand(rewired, x, topology), rewired(x)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    weights = [x, *rewired.parameters()]
    grads = [torch.autograd.grad(out.square().sum(), weights, allow_unused=True) for out in (got, want)]
    for mine, theirs in zip(*grads, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
