"""Containers that carry the state, or hold states beside it: whoever holds one reads there what the blocks put in."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import pytest
import torch
from mixing import shaken
from models import Keyed
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rewire

WIDTH = 8
X = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(1))
TOPOLOGIES = ["ancre-ingoing", "denseformer", "hc-dynamic", "grn-v3"]


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.f = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def branch(self, x: Tensor) -> Tensor:
        return torch.tanh(self.f(self.norm(x)))


@dataclasses.dataclass
class State:
    x: Tensor
    steps: int = 0


class OnData(Branch):
    def forward(self, state: State) -> State:
        state.x = state.x + self.branch(state.x)
        state.steps += 1
        return state


class OnList(Branch):
    def forward(self, state: list[Any]) -> list[Any]:
        state[0] = state[0] + self.branch(state[0])
        state[1] += 1
        return state


class Plain(Branch):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


class Net(nn.Module):
    block: type[Branch] = Plain

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(self.block() for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x, torch.tensor(3)


class Data(Net):
    block = OnData

    def forward(self, x: Tensor) -> Any:
        state = now = State(self.stem(x))
        for block in self.blocks:
            now = block(now)
        return state.x, torch.tensor(state.steps)


class Batch(Keyed):
    """Holds what it is given by key, and shows it as attributes, as batches of graphs do (PyTorch Geometric)."""

    def __init__(self, **held: Any) -> None:
        vars(self)["held"] = held

    def __getattr__(self, name: str) -> Any:
        if name == "held" or name not in self.held:
            raise AttributeError(name)
        return self.held[name]

    def __setattr__(self, name: str, value: Any) -> None:
        self.held[name] = value


class Plainly:
    def __init__(self, x: Tensor, steps: int) -> None:
        self.x, self.steps = x, steps


class OnNamespace(Net):
    block = OnData
    state: Any = types.SimpleNamespace

    def forward(self, x: Tensor) -> Any:
        state = now = self.state(x=self.stem(x), steps=0)
        for block in self.blocks:
            now = block(now)
        return state.x, torch.tensor(state.steps)


class OnBatch(OnNamespace):
    state = Batch


class OnObject(OnNamespace):
    state = Plainly


class GivenObject(OnNamespace):
    """Gets the object from outside, where its caller reads it again."""

    def forward(self, x: Tensor) -> Any:
        given = types.SimpleNamespace(x=self.stem(x), steps=0)
        self.run(given)
        return given.x, torch.tensor(given.steps)

    def run(self, state: Any) -> Any:
        for block in self.blocks:
            state = block(state)
        return state


class DataAlone(Net):
    block = OnData

    def forward(self, x: Tensor) -> Any:
        state = State(self.stem(x))
        for block in self.blocks:
            block(state)
        return state.x, torch.tensor(state.steps)


class List(Net):
    block = OnList

    def forward(self, x: Tensor) -> Any:
        state = now = [self.stem(x), 0]
        for block in self.blocks:
            now = block(now)
        return state[0], torch.tensor(state[1])


class ListAlone(Net):
    block = OnList

    def forward(self, x: Tensor) -> Any:
        state = [self.stem(x), 0]
        for block in self.blocks:
            block(state)
        return state[0], torch.tensor(state[1])


class ListComprehension(Net):
    """As networks of several scales hand on a list of their states."""

    def forward(self, x: Tensor) -> Any:
        states = [self.stem(x)]
        for block in self.blocks:
            states = [block(state) for state in states]
        return states[0], torch.tensor(3)


class DictComprehension(Net):
    def forward(self, x: Tensor) -> Any:
        states = {"x": self.stem(x)}
        for block in self.blocks:
            states = {name: block(state) for name, state in states.items()}
        return states["x"], torch.tensor(3)


OBJECTS = [OnNamespace, OnBatch, OnObject, GivenObject]


@pytest.mark.each_once
@pytest.mark.parametrize("validate", [True, False])
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("cls", [*OBJECTS, Data, DataAlone, List, ListAlone, ListComprehension, DictComprehension])
def test_what_a_caller_reads_in_its_own_container(cls: Any, topology: str, validate: bool) -> None:
    made = [shaken(rewire.compile(cls(), topology, example_inputs=(X,), validate=validate), 0.3, 5)]
    made += [shaken(rewire.compile(Net(), topology, validate=False), 0.3, 5)]
    torch.testing.assert_close(made[0](X), made[1](X))


class Appends(Branch):
    """Writes to a list that also holds the state."""

    def forward(self, x: Tensor, seen: list[Tensor]) -> Tensor:
        f = self.branch(x)
        seen.append(f)
        return x + f


class Reads(Branch):
    """Reads all states before."""

    def forward(self, x: Tensor, seen: Any) -> Tensor:
        return x + self.branch(x + 0.1 * torch.stack(list(seen)).mean(0))


class Collected(Net):
    block = Appends

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        seen = [x]
        for block in self.blocks:
            x = block(x, seen)
        return x, torch.stack(seen[1:]).sum(0)


class ReturnsBoth(Branch):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        f = self.branch(x)
        return x + f, f


class ReturnedBoth(Net):
    """As `Collected`: the blocks' caller appends."""

    block = ReturnsBoth

    def forward(self, x: Tensor) -> Any:
        x, seen = self.stem(x), list[Tensor]()
        for block in self.blocks:
            x, f = block(x)
            seen.append(f)
        return x, torch.stack(seen).sum(0)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_list_that_blocks_append_to(topology: str) -> None:
    made = [shaken(rewire.compile(c(), topology, example_inputs=(X,)), 0.3, 5) for c in (Collected, ReturnedBoth)]
    torch.testing.assert_close(made[0](X), made[1](X))


class History(Net):
    block = Reads

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        seen = [x]
        for block in self.blocks:
            x = block(x, seen)
            seen.append(x)
        return x


class HistoryInATuple(Net):
    block = Reads

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        seen = [x]
        for block in self.blocks:
            x = block(x, seen=tuple(seen))
            seen.append(x)
        return x


@pytest.mark.each_once
@pytest.mark.parametrize("validate", [True, False])
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("cls", [History, HistoryInATuple])
def test_blocks_that_get_earlier_states(cls: Any, topology: str, validate: bool) -> None:
    plain = cls()
    rewired = rewire.compile(plain, topology, example_inputs=(X,), validate=validate)
    torch.testing.assert_close(rewired(X), plain(X))


class Between(Branch):
    """Returns the state, that in its middle, and another tensor that may be None, in the order of their initials."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.order = order

    def forward(self, x: Tensor, other: Tensor | None) -> Any:
        middle = x + self.branch(x)
        x = middle + self.branch(middle)
        found = {"x": x, "m": middle, "o": other}
        return tuple(found[name] for name in self.order)


class Normed(nn.Module):
    """Makes the next state of a sum, and returns it with another tensor that may be None."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.norm, self.order = nn.LayerNorm(WIDTH), order

    def forward(self, x: Tensor, other: Tensor | None) -> Any:
        return (other, self.norm(x)) if self.order == "ox" else (self.norm(x), other)


class Normal(Branch):
    """A post-norm block whose norm comes with another tensor."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.post, self.order = Normed(order), order

    def forward(self, x: Tensor, other: Tensor | None) -> Any:
        return self.post(x + self.f(x), other)


class Stage(nn.Module):
    """As `Between`, without adds of its own: it returns the streams that its blocks do."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.blocks, self.order = nn.ModuleList(Plain() for _ in range(2)), order

    def forward(self, x: Tensor, other: Tensor | None) -> Any:
        middle = self.blocks[0](x)
        found = {"x": self.blocks[1](middle), "m": middle, "o": other}
        return tuple(found[name] for name in self.order)


class WithAnother(nn.Module):
    """Blocks of `Between` or `Normal`."""

    def __init__(self, order: str) -> None:
        super().__init__()
        kind = Between if "m" in order else Normal
        self.blocks, self.order = nn.ModuleList(kind(order) for _ in range(3)), order

    def forward(self, x: Tensor, other: Tensor | None = None) -> list[Tensor]:
        seen = []
        for block in self.blocks:
            found = dict(zip(self.order, block(x, other), strict=True))
            x, other = found["x"], found["o"]
            seen.append(found.get("m", x))
        return [x, *seen]


class Staged(Branch):
    """Its own add begins the trunk that goes through its `Stage`s."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.stages, self.order = nn.ModuleList(Stage(order) for _ in range(2)), order

    def forward(self, x: Tensor, other: Tensor | None = None) -> list[Tensor]:
        x = x + self.branch(x)
        seen = []
        for stage in self.stages:
            found = dict(zip(self.order, stage(x, other), strict=True))
            x, other = found["x"], found["o"]
            seen.append(found["m"])
        return [x, *seen]


@pytest.mark.each_once
@pytest.mark.parametrize("order", ["oxm", "omx", "xom", "mox", "xmo", "ox", "xo"])
@pytest.mark.parametrize("topology", ["ancre-ingoing", "denseformer"])
@pytest.mark.parametrize("seen", [(X,), (X, 2 * X)], ids=["without", "with"])
def test_another_tensor_in_a_result_may_be_missing(order: str, topology: str, seen: tuple[Tensor, ...]) -> None:
    """States are told by their places in it: by their numbers among the tensors, they would be mistaken."""
    rewired = shaken(rewire.compile(WithAnother(order), topology, example_inputs=seen), 0.1, 3)
    torch.testing.assert_close(rewired(X, 2 * X), rewired(X))


@pytest.mark.each_once
@pytest.mark.parametrize("order", ["oxm", "omx", "xom", "mox", "xmo"])
@pytest.mark.parametrize("topology", ["ancre-ingoing", "hc-static"])
@pytest.mark.parametrize("seen", [(X,), (X, 2 * X)], ids=["without", "with"])
def test_another_tensor_beside_earlier_streams_may_be_missing(
    order: str, topology: str, seen: tuple[Tensor, ...]
) -> None:
    plain = Staged(order)
    rewired = rewire.compile(plain, topology, example_inputs=seen)
    for given in ((X,), (X, 2 * X)):
        torch.testing.assert_close(rewired(*given), plain(*given))
    shaken(rewired, 0.1, 3)
    torch.testing.assert_close(rewired(X, 2 * X), rewired(X))


class Keeps(nn.Module):
    """Returns the states between its blocks, too, as a U-net's stages do: streams pass through its own text."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Plain() for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        states: tuple[Tensor, ...] = ()
        for block in self.blocks:
            x = block(x)
            states = states + (x,)  # noqa: RUF005 (a display would hold streams, and be edited)
        return x, states


class KeptByStages(nn.Module):
    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.stages, self.whole = nn.ModuleList(Keeps() for _ in range(2)), whole

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        kept: tuple[Tensor, ...] = (x,)
        for stage in self.stages:
            if self.whole:
                x, states = stage(x)
                kept = (*kept, *states)
            else:
                for block in stage.blocks:
                    x = block(x)
                    kept = (*kept, x)
        return kept


@pytest.mark.parametrize("topology", ["ancre-ingoing", "hc-static"])
def test_stages_that_return_earlier_states_as_well_as_the_last(topology: str) -> None:
    rewired = shaken(rewire.compile(KeptByStages(True), topology, example_inputs=(X,)), 0.1)
    assert "kept=" in rewire.diff(rewired)
    flat = rewire.compile(KeptByStages(False), topology, example_inputs=(X,))
    flat.load_state_dict(rewired.state_dict())
    torch.testing.assert_close(rewired(X), flat(X))


class Takes(Branch):
    """Takes the state out of the list that it gets."""

    def forward(self, x: Any) -> Any:
        x = x if isinstance(x, Tensor) else x.pop(0)
        return x + self.branch(x)


class Given(nn.Module):
    """Hands its blocks the state in a list that it makes in the loop: TabPFN's, which saves memory so."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Takes() for _ in range(4))

    def forward(self, x: Tensor, blocks: int = 4, again: bool = False) -> Tensor:
        for block in self.blocks[:blocks]:
            if again:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                held = [x]
                x = block(held)
        return x.tanh()


@pytest.mark.parametrize("topology", ["ancre-ingoing", "hc-static"])
def test_a_list_that_the_loop_over_blocks_makes(topology: str) -> None:
    """It is empty behind the loop, or was never made: what may have been skipped is told of the state itself."""
    plain = Given()
    rewired = rewire.compile(plain, topology, example_inputs=(X,))
    torch.testing.assert_close(rewired(X, blocks=2), plain(X, blocks=2))
    shaken(rewired, 0.1)
    torch.testing.assert_close(rewired(X, again=True), rewired(X))
