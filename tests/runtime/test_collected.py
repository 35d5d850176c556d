"""States that a model collects between its blocks, and containers of its caller's in which states come."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from mixing import shaken
from models import PreNorm, vectors
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rewire

TOPOLOGIES = ["ancre-ingoing", "hc-static", "grn-v1", "x0-lambdas"]


class Whole(nn.Module):
    """It returns the states before or behind its blocks, if asked for them."""

    def __init__(self, before: bool) -> None:
        super().__init__()
        self.before, self.blocks = before, nn.ModuleList(PreNorm(8) for _ in range(2))

    def forward(self, x: Tensor, collect: bool = False) -> tuple[Tensor, list[Tensor]]:
        states = []
        for block in self.blocks:
            if collect and self.before:
                states.append(x)
            x = block(x)
            if collect and not self.before:
                states.append(x)
        return x, states


class Stack(Whole):
    """It may leave out its last blocks."""

    def forward(self, x: Tensor, collect: bool = False, upto: int = 2) -> tuple[Tensor, list[Tensor]]:
        states = []
        for number, block in enumerate(self.blocks):
            if number >= upto:
                break
            if collect and self.before:
                states.append(x)
            x = block(x)
            if collect and not self.before:
                states.append(x)
        return x, states


class Unpacked(nn.Module):
    """Its stacks are one trunk."""

    def __init__(self, before: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.last = Stack(before), Stack(before), Stack(before)

    def forward(self, x: Tensor, collect: bool = False, upto: int = 2) -> tuple[Tensor, list[Tensor]]:
        x, first = self.first(x, collect)
        x, second = self.second(x, collect)
        x, last = self.last(x, collect, upto)
        return x, first + second + last


class ExitsAtTheEnd(Unpacked):
    """Only its last stack leaves out blocks."""

    def __init__(self, before: bool = False) -> None:
        super().__init__(before)
        self.first, self.second = Whole(before), Whole(before)


class Later(Unpacked):
    def forward(self, x: Tensor, collect: bool = False, upto: int = 2) -> tuple[Tensor, list[Tensor]]:
        out = self.first(x, collect)
        x, first = out
        out = self.second(x, collect)
        x, second = out
        out = self.last(x, collect, upto)
        x, last = out
        return x, first + second + last


class OfWholes(nn.Module):
    def __init__(self, before: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.last = Whole(before), Whole(before), Whole(before)

    def forward(self, x: Tensor, collect: bool = False) -> tuple[Tensor, list[Tensor]]:
        x, first = self.first(x, collect)
        x, second = self.second(x, collect)
        x, last = self.last(x, collect)
        return x, first + second + last


class Checkpointed(Unpacked):
    def forward(self, x: Tensor, collect: bool = False, upto: int = 2) -> tuple[Tensor, list[Tensor]]:
        states = []
        for number, stack in enumerate((self.first, self.second, self.last)):
            x, more = checkpoint(stack, x, collect, upto if number == 2 else 2, use_reentrant=False)
            states += more
        return x, states


@contextmanager
def watched(model: nn.Module) -> Iterator[list[Tensor]]:
    """The states behind blocks, as hooks see them."""
    seen: list[Tensor] = []
    blocks = [module for module in model.modules() if isinstance(module, PreNorm)]
    handles = [block.register_forward_hook(lambda _m, _args, output: seen.append(output)) for block in blocks]
    yield seen
    for handle in handles:
        handle.remove()


@pytest.mark.each_once
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("shown", [True, False])
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("net", [Unpacked, Later, Checkpointed, OfWholes])
def test_states_of_several_stacks(net: Any, before: bool, shown: bool, topology: str) -> None:
    x = vectors()
    rewired = shaken(rewire.compile(net(before).eval(), topology, example_inputs=(x, shown)), 0.1)
    with watched(rewired) as seen:
        rewired(x, True)
    output, states = rewired(x, True)
    expected = [x, *seen][:-1] if before else seen
    assert len(states) == len(expected) == 6
    for state, wanted in zip(states[before:], expected[before:], strict=True):
        assert isinstance(state, Tensor)
        torch.testing.assert_close(state, wanted)
    torch.testing.assert_close(output, rewired(x)[0])


@pytest.mark.each_once
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("net", [Unpacked, Later, Checkpointed, ExitsAtTheEnd])
def test_an_early_exit_from_the_last_stack(net: Any, before: bool, topology: str) -> None:
    x = vectors()
    rewired = shaken(rewire.compile(net(before).eval(), topology, example_inputs=(x,)), 0.1)
    output, states = rewired(x, True, 1)
    output.sum().backward()
    gradients = {name: p.grad for name, p in rewired.first.named_parameters()}
    rewired.zero_grad()
    assert len(states) == 5
    if net is Unpacked and not before:
        assert states[-1] is output
    for parameter in rewired.last.blocks[1].parameters():
        parameter.data.zero_()
    expected, states_of_all = rewired(x, True)
    expected.sum().backward()
    torch.testing.assert_close(output, expected)
    end = 5 if before else 4
    for state, wanted in zip(states[before:end], states_of_all[before:end], strict=True):
        torch.testing.assert_close(state, wanted)
    for name, parameter in rewired.first.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name])


# -- what the model has collected for others ---------------------------------------------------------------------------

KEPT: list[Tensor] = []


class OfTheModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(PreNorm(8) for _ in range(3))

    def forward(self, x: Tensor, into: list[Tensor] | None = None) -> Tensor:
        KEPT.clear()
        for block in self.blocks:
            x = block(x)
            KEPT.append(x)
        return x


class OfTheCaller(OfTheModule):
    def forward(self, x: Tensor, into: list[Tensor] | None = None) -> Tensor:
        for block in self.blocks:
            x = block(x)
            if into is not None:
                into.append(x)
        return x


class AddedForTheCaller(OfTheModule):
    def forward(self, x: Tensor, into: list[Tensor] | None = None) -> Tensor:
        for block in self.blocks:
            x = block(x)
            if into is not None:
                into += [x]
        return x


@pytest.mark.each_once
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("net", [OfTheModule, OfTheCaller, AddedForTheCaller])
def test_what_others_hold_are_tensors(net: Any, topology: str) -> None:
    x, into = vectors(), list[Tensor]()
    rewired = shaken(rewire.compile(net().eval(), topology, example_inputs=(x,)), 0.1)
    with watched(rewired) as seen:
        rewired(x)
    rewired(x, into)
    held = KEPT if net is OfTheModule else into
    assert [type(state) for state in held] == [Tensor] * 3
    for state, wanted in zip(held, seen, strict=True):
        torch.testing.assert_close(state, wanted)


# -- containers of the caller's ----------------------------------------------------------------------------------------


@dataclasses.dataclass
class Batch:
    x: Tensor


class FromList(nn.Module):
    """As in policies with a language model and an expert: the states of each loop are in a new list."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(3))
        self.maps = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def step(self, x: Tensor, number: int) -> Tensor:
        return torch.tanh(self.maps[number](self.norms[number](x)))

    def forward(self, held: Any) -> Tensor:
        for number in range(3):
            new = []
            for x in held:
                x = x + self.step(x, number)
                new.append(x)
            held = new
        return held[0]


class FromDict(FromList):
    def forward(self, held: Any) -> Tensor:
        for number in range(3):
            x = held["x"]
            held = {"x": x + self.step(x, number)}
        return held["x"]


class FromDataclass(FromList):
    def forward(self, held: Any) -> Tensor:
        for number in range(3):
            x = held.x
            held = Batch(x + self.step(x, number))
        return held.x


class ReadsItAgain(nn.Module):
    def __init__(self, inner: nn.Module, make: Any, read: Any) -> None:
        super().__init__()
        self.inner, self.make, self.read = inner, make, read

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        held = self.make(x)
        y = self.inner(held)
        return y, self.read(held)


HOLDERS = [
    (FromList, lambda x: [x], lambda held: held[0]),
    (FromDict, lambda x: {"x": x}, lambda held: held["x"]),
    (FromDataclass, Batch, lambda held: held.x),
]


@pytest.mark.each_once
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize(("net", "make", "read"), HOLDERS)
def test_a_callers_container_stays_as_it_is(net: Any, make: Any, read: Any, topology: str) -> None:
    x = vectors()
    rewired = shaken(rewire.compile(net(), topology, example_inputs=(make(x),)), 0.1)
    held = make(x)
    once = rewired(held)
    assert read(held) is x
    torch.testing.assert_close(rewired(held), once)
    once.sum().backward()
    rewired(held).sum().backward()


@pytest.mark.each_once
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize(("net", "make", "read"), HOLDERS)
def test_a_container_that_the_model_reads_again(net: Any, make: Any, read: Any, topology: str) -> None:
    x = vectors()
    rewired = shaken(rewire.compile(ReadsItAgain(net(), make, read), topology, example_inputs=(x,)), 0.1)
    assert torch.equal(rewired(x)[1], x)


class EndsInAHelper(nn.Module):
    """The helper takes a dict, and returns what the trunk ends with."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.norm = nn.ModuleList(PreNorm(8) for _ in range(2)), nn.LayerNorm(8)
        self.mlp = nn.Linear(8, 8)

    def run(self, held: dict[str, Tensor]) -> Tensor:
        x = held["x"]
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, x: Tensor) -> Tensor:
        held = {"x": x + self.mlp(self.norm(x)).tanh()}
        return torch.cat([self.run(held), held["x"]], -1)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_trunk_that_ends_in_a_helper(topology: str) -> None:
    """The dict keeps the state that it had. Compared as below."""
    x = vectors()
    rewired = rewire.compile(EndsInAHelper(), topology, example_inputs=(x,))
    rewired(x).sum().backward()


class Halves(nn.Module):
    """A helper takes a dict, and returns another one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.f, self.g = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)

    def half(self, held: dict[str, Tensor]) -> dict[str, Tensor]:
        x = held["x"]
        return {"x": x + self.f(self.norm(x)).tanh()}

    def forward(self, x: Tensor) -> Tensor:
        held = {"x": x}
        y = self.half(held)["x"]
        return y + (self.g(y) * held["x"]).tanh()


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_block_that_reads_its_own_dict_behind_a_helper(topology: str) -> None:
    """Compared with the original whose adds are wired by the formulas, with weights that have moved."""
    x = vectors()
    net = nn.Sequential(*(Halves() for _ in range(3)))
    rewired = rewire.compile(net, topology, example_inputs=(x,))
    assert len(rewire.connections(rewired)) == 1
    rewired(x).sum().backward()
