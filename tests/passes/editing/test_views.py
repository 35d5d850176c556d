"""Views between blocks: they are of all states, and what their arguments do happens once, as in the original."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mixing import shaken
from torch import Tensor, nn

import rewire
from rewire.errors import EditError

WIDTH, LENGTH = 8, 5
X = torch.randn(3, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.f = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.f(self.norm(x).cumsum(1)))


class Net(nn.Module):
    """A view between blocks, with an argument that is computed in front of it, as the edit has to do it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.blocks, self.calls = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Block() for _ in range(3)), 0

    def shift(self) -> int:
        self.calls += 1
        return self.calls

    def forward(self, x: Tensor) -> Tensor:
        x, self.calls = self.stem(x), 0
        return self.through(x, [torch.arange(LENGTH).roll(n) for n in range(3)])

    def through(self, x: Tensor, orders: list[Tensor]) -> Tensor:
        raise NotImplementedError


class Draws(Net):
    def through(self, x: Tensor, orders: list[Tensor]) -> Tensor:
        for block in self.blocks:
            x = x[:, torch.randperm(x.shape[1])]
            x = block(x)
        return x


class DrawsInFront(Net):
    def through(self, x: Tensor, orders: list[Tensor]) -> Tensor:
        for block in self.blocks:
            order = torch.randperm(x.shape[1])
            x = x[:, order]
            x = block(x)
        return x


class Counts(Net):
    def through(self, x: Tensor, orders: list[Tensor]) -> Tensor:
        for block in self.blocks:
            x = x.roll(self.shift(), 1)
            x = block(x)
        return x


class CountsInFront(Net):
    def through(self, x: Tensor, orders: list[Tensor]) -> Tensor:
        for block in self.blocks:
            n = self.shift()
            x = x.roll(n, 1)
            x = block(x)
        return x


class Pops(Net):
    def through(self, x: Tensor, orders: list[Tensor]) -> Tensor:
        for block in self.blocks:
            x = torch.index_select(x, 1, index=orders.pop())
            x = block(x)
        return x


class PopsInFront(Net):
    def through(self, x: Tensor, orders: list[Tensor]) -> Tensor:
        for block in self.blocks:
            order = orders.pop()
            x = x[:, order]
            x = block(x)
        return x


class Names(Net):
    def through(self, x: Tensor, orders: list[Tensor]) -> Tensor:
        for block in self.blocks:
            x = x[:, (order := orders.pop())]
            x = block(x)
            self.calls += len(order)
        return x


class DrawsInACall(Net):
    def mixed(self, x: Tensor) -> Tensor:
        return x[:, torch.randperm(x.shape[1])]

    def through(self, x: Tensor, orders: list[Tensor]) -> Tensor:
        for block in self.blocks:
            x = self.mixed(x)
            x = block(x)
        return x


@pytest.mark.each_once
@pytest.mark.parametrize("validate", [True, False])
@pytest.mark.parametrize("topology", ["ancre-ingoing", "denseformer", "muddformer"])
@pytest.mark.parametrize(
    ("cls", "plain"), [(Draws, DrawsInFront), (Counts, CountsInFront), (Pops, PopsInFront), (Names, PopsInFront)]
)
def test_arguments_are_computed_once(cls: Any, plain: Any, topology: str, validate: bool) -> None:
    made = [
        shaken(rewire.compile(net(), topology, example_inputs=(X,), validate=validate), 0.3, 5) for net in (cls, plain)
    ]
    results = []
    for model in made:
        torch.manual_seed(3)
        results.append((model(X), torch.get_rng_state()))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


def test_a_call_that_draws_the_order_is_refused() -> None:
    with pytest.raises(EditError, match=r"test_views.py:\d+ draws random numbers.*hand over what was drawn"):
        rewire.compile(DrawsInACall(), "ancre-ingoing", example_inputs=(X,), validate=False)
