"""Functions that make adds of their own, and call blocks that make some: with some left out, in loops and in ifs.

Each net says in ``units`` which branches it runs in order, and in ``parts`` which of these each number in ``skip``
leaves out. The truth is DenseFormer's formula over them: a branch that is left out adds nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from mixing import shaken
from torch import Tensor, nn

import rewire

WIDTH = 8


class Branch(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f, self.g = Branch(), Branch()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.f(x)
        return x + self.g(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.last = nn.ModuleList(Branch() for _ in range(4)), Branch()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.skip: tuple[int, ...] = ()

    def both(self, number: int) -> list[nn.Module]:
        return [self.blocks[number].f, self.blocks[number].g]


class BeforeABlock(Net):
    parts: Sequence[Sequence[int]] = ((0,), (1,), (2,), (3,))

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number in self.skip:
                continue
            x = x + layer(x)
        return self.blocks[0](x)

    def units(self) -> list[nn.Module]:
        return [*self.layers, *self.both(0)]


class BeforeBlocks(BeforeABlock):
    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number not in self.skip:
                x = x + layer(x)
        for block in self.blocks:
            x = block(x)
        return x

    def units(self) -> list[nn.Module]:
        return [*self.layers, *self.both(0), *self.both(1)]


class Untold(BeforeABlock):
    """Nothing tells the passes of a ``while`` apart."""

    def forward(self, x: Tensor) -> Tensor:
        number = 0
        while number < 4:
            if number not in self.skip:
                x = x + self.layers[number](x)
            number += 1
        return self.blocks[0](x)


class UntoldBeforeAnother(BeforeABlock):
    def forward(self, x: Tensor) -> Tensor:
        number = 0
        while number < 4:
            if number not in self.skip:
                x = x + self.layers[number](x)
            number += 1
        x = x + self.last(x)
        return self.blocks[0](x)

    def units(self) -> list[nn.Module]:
        return [*self.layers, self.last, *self.both(0)]


class BehindABlock(Net):
    parts = ((2,), (3,), (4,), (5,))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        for number, layer in enumerate(self.layers):
            if number in self.skip:
                continue
            x = x + layer(x)
        return x

    def units(self) -> list[nn.Module]:
        return [*self.both(0), *self.layers]


class BetweenBlocks(BehindABlock):
    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        for number, layer in enumerate(self.layers):
            if number in self.skip:
                continue
            x = x + layer(x)
        return self.blocks[1](x)

    def units(self) -> list[nn.Module]:
        return [*self.both(0), *self.layers, *self.both(1)]


class UntoldAtTheEnd(BehindABlock):
    """The loop calls no other module in each pass that could be looked up at its start."""

    parts = ((2, 3), (4, 5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        for number in range(2):
            if number in self.skip:
                continue
            x = x + self.layers[2 * number](x)
            x = x + self.layers[2 * number + 1](x)
        return x


class Stops(BehindABlock):
    parts = (range(2, 6), range(3, 6), range(4, 6), range(5, 6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        for number, layer in enumerate(self.layers):
            if number in self.skip:
                break
            x = x + layer(x)
        return x


class Returns(Stops):
    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        for number, layer in enumerate(self.layers):
            if number in self.skip:
                return x
            x = x + layer(x)
        return x


class TwoAddsAndABlock(Net):
    """The first of an iteration's own adds may be left out."""

    parts = ((0,), (4,))

    def forward(self, x: Tensor) -> Tensor:
        for number in range(2):
            if number not in self.skip:
                x = x + self.layers[2 * number](x)
            x = x + self.layers[2 * number + 1](x)
            x = self.blocks[number](x)
        return x

    def units(self) -> list[nn.Module]:
        return [*self.layers[:2], *self.both(0), *self.layers[2:], *self.both(1)]


class AddOrBlock(Net):
    """Both an iteration's add and its block may be left out."""

    parts = ((0,), (3,), (1, 2), (4, 5))

    def forward(self, x: Tensor) -> Tensor:
        for number in range(2):
            if number not in self.skip:
                x = x + self.layers[number](x)
            if number + 2 not in self.skip:
                x = self.blocks[number](x)
        return x

    def units(self) -> list[nn.Module]:
        return [self.layers[0], *self.both(0), self.layers[1], *self.both(1)]


class BlockOrAdd(AddOrBlock):
    parts = ((2,), (5,), (0, 1), (3, 4))

    def forward(self, x: Tensor) -> Tensor:
        for number in range(2):
            if number + 2 not in self.skip:
                x = self.blocks[number](x)
            if number not in self.skip:
                x = x + self.layers[number](x)
        return x

    def units(self) -> list[nn.Module]:
        return [*self.both(0), self.layers[0], *self.both(1), self.layers[1]]


class BlockInAnIf(BeforeABlock):
    parts = ((0,), (1,), (2,), (3,), (4, 5))

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number in self.skip:
                continue
            x = x + layer(x)
        if 4 not in self.skip:
            x = self.blocks[0](x)
        return x


class BlockInAnIfBeforeAnAdd(BlockInAnIf):
    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number in self.skip:
                continue
            x = x + layer(x)
        if 4 not in self.skip:
            x = self.blocks[0](x)
        return x + self.last(x)

    def units(self) -> list[nn.Module]:
        return [*super().units(), self.last]


class BlockInAnIfFirst(BehindABlock):
    parts = ((2,), (3,), (4,), (5,), (0, 1))

    def forward(self, x: Tensor) -> Tensor:
        if 4 not in self.skip:
            x = self.blocks[0](x)
        for number, layer in enumerate(self.layers):
            if number in self.skip:
                continue
            x = x + layer(x)
        return x


class Straight(Net):
    """Adds and blocks one after another, each in an ``if``."""

    parts = ((0, 1), (2,), (3, 4), (5,))

    def forward(self, x: Tensor) -> Tensor:
        if 0 not in self.skip:
            x = self.blocks[0](x)
        if 1 not in self.skip:
            x = x + self.layers[0](x)
        if 2 not in self.skip:
            x = self.blocks[1](x)
        if 3 not in self.skip:
            x = x + self.layers[1](x)
        return x

    def units(self) -> list[nn.Module]:
        return [*self.both(0), self.layers[0], *self.both(1), self.layers[1]]


class Inside(Net):
    """The stream comes from a block, into a module that adds in a loop and calls another."""

    parts = ((2,), (3,), (4,), (5,))

    def __init__(self) -> None:
        super().__init__()
        self.stage = BeforeABlock()

    def forward(self, x: Tensor) -> Tensor:
        self.stage.skip = self.skip
        return self.stage(self.blocks[0](x))

    def units(self) -> list[nn.Module]:
        return [*self.both(0), *self.stage.units()]


#: Nets of which every call is computed, and those that refuse some, as nothing tells which adds they leave out.
TOLD = [BeforeABlock, BeforeBlocks, BehindABlock, BetweenBlocks, Stops, Returns, TwoAddsAndABlock, AddOrBlock]
TOLD += [BlockInAnIf, BlockInAnIfFirst, Straight, Inside]
UNTOLD = [Untold, UntoldBeforeAnother, UntoldAtTheEnd, BlockOrAdd, BlockInAnIfBeforeAnAdd]


@torch.no_grad()
def denseformer(net: Net, weights: Tensor, x: Tensor) -> Tensor:
    gone = {unit for number in net.skip for unit in net.parts[number]}
    units = net.units()
    if len(gone) == len(units):
        return x  # no block runs: the trunk does not start
    states = [x]
    for number, unit in enumerate(units):
        states.append(x if number in gone else x + unit(x))
        x = sum((weights[number, n] * state for n, state in enumerate(states)), torch.zeros(()))
    return x


@pytest.mark.parametrize("cls", [*TOLD, *UNTOLD])
def test_what_is_left_out_adds_nothing_or_is_refused(cls: type[Net]) -> None:
    net, x = cls().double(), torch.randn(2, WIDTH, dtype=torch.double)
    rewired = shaken(rewire.compile(net, "denseformer", example_inputs=(x,), granularity="sublayer"), 0.5, 3)
    (weights,) = (matrix.double() for matrix in rewire.coefficients(rewired).values())
    refused = 0
    for skip in itertools.chain.from_iterable(itertools.combinations(range(len(net.parts)), n) for n in range(6)):
        net.skip = rewired.skip = skip
        try:
            found = rewired(x)
        except rewire.OutOfOrder:
            refused += 1
            continue
        torch.testing.assert_close(found, denseformer(net, weights, x), rtol=1e-6, atol=1e-6, msg=str(skip))
    assert bool(refused) == (cls in UNTOLD)


@pytest.mark.parametrize("topology", ["ancre-ingoing", "hc-static", "grn-v1", "residual"])
@pytest.mark.parametrize("cls", [BeforeBlocks, BetweenBlocks, TwoAddsAndABlock, AddOrBlock])
def test_branches_of_zero_are_branches_left_out(cls: type[Net], topology: str) -> None:
    x = torch.randn(2, WIDTH)
    rewired = shaken(rewire.compile(cls(), topology, example_inputs=(x,), granularity="sublayer"), 0.3, 3)
    for number, parts in enumerate(cls.parts):
        zero = rewire.compile(cls(), topology, example_inputs=(x,), granularity="sublayer")
        zero.load_state_dict(rewired.state_dict())
        for part in parts:
            for weight in zero.units()[part].parameters():
                weight.data.zero_()
        rewired.skip = (number,)
        torch.testing.assert_close(rewired(x), zero(x))
