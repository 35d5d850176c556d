"""Functions that are called several times to make adds: of calls that are left out it is known which, or they raise."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rewire

WIDTH, COUNT = 8, 4
TOPOLOGIES = ["denseformer", "hc-static", "ancre-ingoing"]


class Net(nn.Module):
    """Branches, of which a call leaves out some."""

    skip: tuple[int, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.branches = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(COUNT)
        )


class Sum(nn.Module):
    def forward(self, x: Tensor, f: Tensor) -> Tensor:
        return x + f


def add(x: Tensor, f: Tensor) -> Tensor:
    return f + x


class InIfs(Net):
    """As the decoders of fairseq and torchscale leave out the attention to an encoder."""

    def residual(self, f: Tensor, x: Tensor) -> Tensor:
        return x + f

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        if 0 not in self.skip:
            x = self.residual(self.branches[0](x), x)
        if 1 not in self.skip:
            h = self.branches[1](x)
            x = self.residual(h, x)
        if 2 not in self.skip:
            x = self.residual(self.branches[2](x), x)
        if 3 not in self.skip:
            x = self.residual(self.branches[3](x), x)
        return self.norm(x)


class FunctionInIfs(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = add(x, self.branches[0](x)) if 0 not in self.skip else x
        if 1 not in self.skip:
            x = add(x, self.branches[1](x))
        if 2 not in self.skip:
            x = add(x, self.branches[2](x))
        if 3 not in self.skip:
            x = add(x, self.branches[3](x))
        return self.norm(x)


class BranchesInIfs(Net):
    """The function calls the branch, too."""

    def step(self, x: Tensor, n: int) -> Tensor:
        return x + self.branches[n](x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        if 0 not in self.skip:
            x = self.step(x, 0)
        if 1 not in self.skip:
            x = self.step(x, 1)
        if 2 not in self.skip:
            x = self.step(x, 2)
        if 3 not in self.skip:
            x = self.step(x, 3)
        return self.norm(x)


class Returns(Net):
    """The function is called for each, and adds nothing for some."""

    def step(self, x: Tensor, n: int) -> Tensor:
        if n in self.skip:
            return x
        return x + self.branches[n](x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for n in range(COUNT):
            x = self.step(x, n)
        return self.norm(x)


class ToldByModules(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for n, branch in enumerate(self.branches):
            if n in self.skip:
                continue
            x = add(x, branch(x))
        return self.norm(x)


class SharedModule(Net):
    def __init__(self) -> None:
        super().__init__()
        self.sum = Sum()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for n, branch in enumerate(self.branches):
            if n not in self.skip:
                x = self.sum(x, branch(x))
        return self.norm(x)


class InALoop(BranchesInIfs):
    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for n in range(COUNT):
            if n not in self.skip:
                x = self.step(x, n)
        return self.norm(x)


class Recursive(Net):
    def go(self, x: Tensor, n: int) -> Tensor:
        if n == COUNT:
            return x
        if n not in self.skip:
            x = x + self.branches[n](x)
        return self.go(x, n + 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.go(self.stem(x), 0))


class NamesIt(InALoop):
    def step(self, x: Tensor, n: int) -> Tensor:
        branch = self.branches[n]
        return x + branch(x)


class InOneCall(InALoop):
    """The method gets the module, and one index is none of a module's."""

    def step(self, x: Tensor, branch: Any) -> Tensor:
        return x if branch is None else x + branch(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for n, branch in enumerate([*self.branches, None]):
            x = x if n in self.skip else self.step(x, branch)
        return self.norm(x)


class Block(nn.Module):
    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch = branch

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.branch(x)
        return x


def run(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


class Runs(Net):
    """A function runs the blocks, as PixArt's checkpoints them, and these know what they are."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(map(Block, self.branches))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for n, block in enumerate(self.blocks):
            if n not in self.skip:
                x = run(block, x)
        return self.norm(x)


class MethodRuns(Runs):
    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        made: Tensor = block(x)
        return made

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for n, block in enumerate(self.blocks):
            if n not in self.skip:
                x = self.run(block, x)
        return self.norm(x)


class RunsSome(MethodRuns):
    """The function leaves out the block."""

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        if any(block is self.blocks[n] for n in self.skip):
            return x
        return super().run(block, x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = self.run(block, x)
        return self.norm(x)


def without(model: nn.Module, x: Tensor, skip: tuple[int, ...]) -> Tensor:
    """What a model computes if these branches are zero."""
    model = copy.deepcopy(model)
    for n in skip:
        model.branches[n].register_forward_hook(lambda _, args, made: torch.zeros_like(made))
    result: Tensor = model(x)
    return result


def moved(kind: Callable[[], Net], topology: str) -> nn.Module:
    rewired = rewire.compile(kind(), topology, example_inputs=(vectors(),))
    for connection in rewire.connections(rewired).values():
        for weight in connection.parameters():
            nn.init.normal_(weight, 0.5, 0.5)
    return rewired


def vectors() -> Tensor:
    return torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(1))


class GoesOn(BranchesInIfs):
    """A method calls the one that adds, and itself."""

    def go(self, x: Tensor, n: int) -> Tensor:
        if n == COUNT:
            return x
        if n not in self.skip:
            x = self.step(x, n)
        return self.go(x, n + 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.go(self.stem(x), 0))


class OfLayers(InALoop):
    """Some layers are none, and so is an index."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"branch": branch}) for branch in self.branches)
        del self.branches

    @property
    def branches(self) -> list[nn.Module]:
        return [layer.branch for layer in self.layers]

    def step(self, x: Tensor, layer: Any) -> Tensor:
        return x if layer is None else x + layer.branch(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for n, layer in enumerate([None, *self.layers]):
            x = x if n - 1 in self.skip else self.step(x, layer)
        return self.norm(x)


class AnIndexIsNone(InALoop):
    def step(self, x: Tensor, n: Any) -> Tensor:
        return x if n is None else x + self.branches[n](x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for n in (None, *range(COUNT)):
            x = x if n in self.skip else self.step(x, n)
        return self.norm(x)


IN_TURN = [InALoop, NamesIt, Recursive, GoesOn, InOneCall, OfLayers, AnIndexIsNone]
KINDS = [
    InIfs,
    FunctionInIfs,
    BranchesInIfs,
    Returns,
    ToldByModules,
    SharedModule,
    Runs,
    MethodRuns,
    RunsSome,
    *IN_TURN,
]
SKIPS = [(0,), (1,), (3,), (1, 2), (2, 3), (0, 2)]


@pytest.mark.each_once
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_left_out_adds_nothing(kind: type[Net], topology: str) -> None:
    rewired = moved(kind, topology)
    for skip in SKIPS:
        expected = without(rewired, vectors(), skip)
        rewired.skip = skip
        torch.testing.assert_close(rewired(vectors()), expected)
        rewired.skip = ()


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_function_that_runs_blocks(topology: str) -> None:
    torch.manual_seed(1)
    rewired = moved(Runs, topology)
    torch.manual_seed(1)
    torch.testing.assert_close(rewired(vectors()), moved(MethodRuns, topology)(vectors()))


class Ordered(BranchesInIfs):
    """Calls a method in any order."""

    order: tuple[int, ...] = (0, 1, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for n in self.order:
            x = self.step(x, n)
        return self.norm(x)


@pytest.mark.parametrize(
    ("order", "why"),
    [
        ((0, 2, 1), "runs a Sequential after 3 residual adds of trunk 'branches', and after 1 when it was rewired"),
        ((0, 1, 1, 2, 3), "called in another order, or again"),
        ((0, 1, 2, 3, 3), "given a plain tensor, but it belongs after residual add 3"),
        ((3, 2, 1, 0), "belongs after residual add 2"),
    ],
)
def test_calls_in_another_order_are_noticed(order: tuple[int, ...], why: str) -> None:
    rewired = rewire.compile(Ordered(), "denseformer", example_inputs=(vectors(),))
    rewired.order = order
    with pytest.raises(rewire.OutOfOrder, match=why):
        rewired(vectors())
    rewired.order = (0, 1, 2, 3)
    torch.testing.assert_close(rewired(vectors()), rewire.restore(rewired)(vectors()))


@pytest.mark.parametrize("order", [(1, 3), (3,), (0, 1)])
def test_fewer_calls(order: tuple[int, ...]) -> None:
    rewired = moved(Ordered, "denseformer")
    expected = without(rewired, vectors(), tuple({*range(COUNT)}.difference(order)))
    rewired.order = order
    torch.testing.assert_close(rewired(vectors()), expected)


class Adds(Net):
    """The branch is the caller's."""

    count = COUNT

    def residual(self, h: Tensor, x: Tensor) -> Tensor:
        return x + h

    def forward(self, x: Tensor) -> Tensor:
        x, n = self.stem(x), 0
        while n < self.count:
            if n not in self.skip:
                x = self.residual(self.branches[n % COUNT](x), x)
            n += 1
        return self.norm(x)


def test_a_call_after_the_last_one_begins_no_other_stream() -> None:
    rewired = rewire.compile(Adds(), "denseformer", example_inputs=(vectors(),))
    rewired.count = COUNT + 1
    with pytest.raises(rewire.OutOfOrder, match="given a plain tensor"):
        rewired(vectors())


class Anew(InALoop):
    """The module is looked up anew."""

    def step(self, x: Tensor, n: int) -> Tensor:
        branch = self.branches[n]
        branch = self.branches[n] if self.training else branch
        return x + branch(x)


@pytest.mark.parametrize("skip", [(0,), (1,), (1, 2), (3,)])
@pytest.mark.parametrize("kind", [Adds, Anew])
def test_if_nothing_tells_which_one_was_left_out_it_raises(kind: type[Net], skip: tuple[int, ...]) -> None:
    rewired = rewire.compile(kind(), "denseformer", example_inputs=(vectors(),))
    plain = rewire.restore(rewired)
    torch.testing.assert_close(rewired(vectors()), plain(vectors()))
    rewired.skip = skip
    with pytest.raises(rewire.OutOfOrder):
        rewired(vectors())
    rewired.skip = ()
    torch.testing.assert_close(rewired(vectors()), plain(vectors()))


class SharedBlocks(Net):
    def __init__(self, order: tuple[int, ...]) -> None:
        super().__init__()
        blocks = [Block(branch) for branch in self.branches[:3]]
        self.blocks = nn.ModuleList(blocks[n] for n in order)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for n, block in enumerate(self.blocks):
            if n not in self.skip:
                x = block(x)
        return self.norm(x)


@pytest.mark.parametrize(
    ("order", "skip"),
    [((0, 1, 0, 1, 0), (0, 1)), ((0, 1, 0, 1, 0), (2, 3)), ((0, 1, 0, 2), (0, 1)), ((0, 1, 2, 0, 2), (2, 3))],
)
def test_blocks_that_are_used_again(order: tuple[int, ...], skip: tuple[int, ...]) -> None:
    """Which of its uses ran, a block does not know."""
    rewired = rewire.compile(SharedBlocks(order), "denseformer", example_inputs=(vectors(),))
    rewired.skip = skip
    with pytest.raises(rewire.OutOfOrder):
        rewired(vectors())


@pytest.mark.parametrize(("order", "skip"), [((0, 1, 0, 2), 1), ((0, 1, 0, 1, 0), 0), ((0, 1, 2, 0), 2)])
def test_the_first_use_of_a_block_that_is_left_out_is_known(order: tuple[int, ...], skip: int) -> None:
    rewired = moved(lambda: SharedBlocks(order), "denseformer")
    rewired.skip = (skip,)
    quiet, calls = copy.deepcopy(rewired), list[int]()
    quiet.skip = ()

    def first(_: nn.Module, args: object, made: Tensor) -> Tensor:
        calls.append(1)
        return torch.zeros_like(made) if len(calls) == 1 else made

    quiet.branches[order[skip]].register_forward_hook(first)
    torch.testing.assert_close(rewired(vectors()), quiet(vectors()))
