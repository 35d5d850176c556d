"""Blocks that hand tensors on in tuples, trunks that share a loop, and modules that remember what they made."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from mixing import shaken
from models import vectors
from torch import Tensor, nn

import rewire

WIDTH = 8


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))


class Shifted(nn.Module):
    """Makes the next state, and returns a tuple of it alone."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.norm = nn.Parameter(torch.randn(WIDTH)), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (self.norm(x + self.shift),)


class OneOfATuple(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.branch = Shifted(), Branch()

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.first(x)
        x = outputs[0]
        return x + self.branch(x)


class Remembering(nn.Module):
    """Makes something of a weight once, in evaluation mode, as LeViT does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out, self.bias = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH))
        self.cache: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        scale = self.bias.exp()
        if not self.training:
            scale = self.cache.setdefault("scale", scale)
        return self.out(torch.tanh(self.norm(x) * scale))


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Remembering(), Remembering()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.one(x)
        return x + self.two(x)


class Net(nn.Module):
    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize("block", [OneOfATuple, Remembers])
def test_states_in_tuples_and_caches(block: type[nn.Module]) -> None:
    model = Net(block)
    rewired = rewire.compile(model, "denseformer", example_inputs=(vectors(),))  # validated
    torch.testing.assert_close(rewired(vectors()), model(vectors()))


def test_compiling_leaves_no_caches() -> None:
    model = Net(Remembers).eval()
    rewired = rewire.compile(model, "hc-static", example_inputs=(vectors(),))
    for each in (model, rewired):
        assert not any(module.cache for module in each.modules() if isinstance(module, Remembering))


class Halving(nn.Module):
    """In the first blocks the stream is another one between the branches."""

    def __init__(self, halves: bool) -> None:
        super().__init__()
        self.one, self.two, self.halves = Branch(), Branch(), halves

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.one(x)
        if self.halves:
            x = x.unfold(1, 2, 2).mean(-1)
        return x + self.two(x)


class AddsInBetween(Net):
    """An add of one trunk stands in the loop that the others pass, too (Granite Speech)."""

    def __init__(self, at: int) -> None:
        super().__init__(Branch)
        self.blocks = nn.ModuleList(Halving(halves) for halves in (True, True, False))
        self.middle, self.at = Branch(), at

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == self.at:
                x = x + self.middle(x)
        return self.head(x)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_an_add_of_one_trunk_in_a_loop_of_several(at: int) -> None:
    model, x = AddsInBetween(at), vectors(length=16)
    rewired = rewire.compile(model, "denseformer", example_inputs=(x,))
    torch.testing.assert_close(rewired(x), model(x))


class AddsOnce(nn.Module):
    """One iteration of a loop makes another add, too."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.branches, self.extra, self.at = nn.ModuleList(Branch() for _ in range(3)), Branch(), at

    def forward(self, x: Tensor) -> Tensor:
        for number, branch in enumerate(self.branches):
            x = x + branch(x)
            if number == self.at:
                x = x + self.extra(x)
        return x


class AddsOnceInAnExpression(AddsOnce):
    def forward(self, x: Tensor) -> Tensor:
        for number, branch in enumerate(self.branches):
            x = x + branch(x)
            x = x + self.extra(x) if number == self.at else x
        return x


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("kind", [AddsOnce, AddsOnceInAnExpression])
def test_an_add_in_one_iteration(kind: Callable[[int], nn.Module], at: int) -> None:
    model, x = kind(at), vectors()
    rewired = rewire.compile(model, "denseformer", example_inputs=(x,))
    assert [len(c.layout.units) for c in rewire.connections(rewired).values()] == [4]
    torch.testing.assert_close(rewired(x), model(x))
    rewired.at = None
    with pytest.raises(rewire.OutOfOrder):
        rewired(x)


class ReturnsInBoth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branch = Branch()

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x = x + self.branch(x)
            return x
        else:
            x = x + self.branch(x)
            return x


def test_no_lines_that_never_run() -> None:
    model = Net(ReturnsInBoth)
    rewired = rewire.compile(model, "denseformer", example_inputs=(vectors(),))
    assert "reach" not in rewire.source(rewired, "blocks.0")
    torch.testing.assert_close(rewired(vectors()), model(vectors()))


class Added(Branch):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class SideBySide(nn.Module):
    """The next state is the sum of what two residual blocks return."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inp = nn.Linear(8, WIDTH)
        self.left, self.right = (nn.ModuleList(Added() for _ in range(3)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for left, right in zip(self.left, self.right, strict=True):
            x = 0.5 * (left(x) + right(x))
        return x


@pytest.mark.parametrize("validate", [True, False])
def test_blocks_side_by_side(validate: bool) -> None:
    plain = SideBySide()
    rewired = rewire.compile(plain, "ancre-ingoing", example_inputs=(vectors(),), validate=validate)
    torch.testing.assert_close(rewired(vectors()), plain(vectors()))
    assert "right" in rewire.connections(rewired)


class Streams(Added):
    """Has another method that makes the same residual add."""

    def step(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))

    def norms(self, x: Tensor) -> Tensor:
        return self.norm(x)


class NamesItsBranches(Branch):
    """Two methods name all branches and add something, and neither adds to a state."""

    def __init__(self) -> None:
        super().__init__()
        self.size = self.up.weight.numel() + self.down.weight.numel()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))

    def numbers(self) -> int:
        return self.up.weight.numel() + self.down.weight.numel()


class StepsInEvaluation(Streams):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x)))) if self.training else self.step(x)


@pytest.mark.parametrize(("cls", "warned"), [(Streams, 1), (StepsInEvaluation, 0), (NamesItsBranches, 0)])
def test_methods_that_stay_plain_are_named(cls: type[nn.Module], warned: int, caplog: pytest.LogCaptureFixture) -> None:
    rewire.compile(nn.Sequential(cls(), cls(), cls()), "ancre-ingoing", example_inputs=(torch.randn(2, WIDTH),))
    said = [record.getMessage() for record in caplog.records if "in another way" in record.getMessage()]
    assert len(said) == warned
    assert all("'Streams.step'" in each and "test_several.py:" in each for each in said)


class Positioned(Branch):
    """State and positions travel as a tuple (ESPnet)."""

    def forward(self, x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        h, positions = x
        return h + super().forward(h + positions), positions


class DropsLayers(nn.Module):
    """Leaves out blocks in training, where the variable behind the loop is the tuple."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inp, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Positioned() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = (self.inp(x), torch.ones(WIDTH))
        for block in self.blocks:
            if self.training and torch.empty(1).uniform_().item() < 0.5:
                continue
            h = block(h)
        return h[0]


@pytest.mark.parametrize("validate", [True, False])
def test_dropped_layers_where_a_tuple_carries_the_state(validate: bool) -> None:
    plain, x = DropsLayers(), torch.randn(2, WIDTH)
    for seed in range(4):
        torch.manual_seed(seed)
        rewired = rewire.compile(plain, "ancre-ingoing", example_inputs=(x,), validate=validate)
        for again in range(4):
            results = []
            for model in (plain, rewired):
                torch.manual_seed(again)
                results.append(model(x))
            torch.testing.assert_close(*results)


class FeedForward(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.norm, self.name = nn.LayerNorm(WIDTH), name
        setattr(self, name, nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + getattr(self, self.name)(x))


@pytest.mark.parametrize(
    ("name", "sites"),
    [
        *((name, 3) for name in ("pos_ffn", "position_wise_ffn", "pos_feed_forward")),
        *((name, 0) for name in ("pos_embed",)),
    ],
)
def test_a_position_wise_feed_forward_adds_no_positions(name: str, sites: int) -> None:
    net = nn.Sequential(*(FeedForward(name) for _ in range(3)))
    assert sum(len(trunk.sites) for trunk in rewire.inspect(net, (torch.randn(2, WIDTH),)).trunks) == sites


class DropsRows(Branch):
    """Chooses rows by an index on the CPU, which the meta device does not take."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x + super().forward(x)
        rows = torch.randperm(len(x))[: len(x) // 2]
        return torch.index_add(x, 0, rows, super().forward(x[rows]), alpha=2)


def test_training_that_does_not_run_on_the_meta_device_is_run() -> None:
    plain, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(DropsRows() for _ in range(3))), torch.randn(4, 5, WIDTH)
    rewired = rewire.compile(plain, "ancre-ingoing", example_inputs=(x,), validate=False)
    for training in (False, True):
        results = []
        for model in (plain, rewired):
            torch.manual_seed(1)
            results.append(model.train(training)(x))
        torch.testing.assert_close(*results)


class Pairs(nn.Module):
    """Both streams of a pair go through each block, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Added() for _ in range(3))

    def forward(self, *pair: Tensor) -> tuple[Tensor, ...]:
        for block in self.blocks:
            pair = tuple([block(x) for x in pair])
        return pair


class Zipped(Pairs):
    def forward(self, *pair: Tensor) -> tuple[Tensor, ...]:
        for block in self.blocks:
            pair = tuple(block(x) for x, _ in zip(pair, "ab", strict=True))
        return pair


class Asks(Pairs):
    """Asks what it got: streams do not pass such a function as they are."""

    def forward(self, *pair: Tensor) -> tuple[Tensor, ...]:
        for block in self.blocks:
            pair = tuple([block(x) for x in pair]) if type(pair) is tuple else pair
        return pair


class Fuses(Pairs):
    """May mix the two, and does not here."""

    fusion: nn.Module | None = None

    def forward(self, *pair: Tensor) -> tuple[Tensor, ...]:
        for block in self.blocks:
            pair = tuple([block(x) for x in pair])
            if self.fusion is not None:
                pair = self.fusion(*pair)
        return pair


class Reads(Pairs):
    def forward(self, *pair: Tensor) -> tuple[Tensor, ...]:
        a, b = pair
        for block in self.blocks:
            a, b = block(a), block(b)
            if a.mean() > b.mean() + 100:
                a, b = b, a
        return a, b


class OfBoth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Added()

    def forward(self, *pair: Tensor) -> tuple[Tensor, ...]:
        return tuple([self.block(x) for x in pair])


class InBlocks(Asks):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(OfBoth() for _ in range(3))

    def forward(self, *pair: Tensor) -> tuple[Tensor, ...]:
        for block in self.blocks:
            pair = block(*pair) if type(pair) is tuple else block(pair)
        return pair


@pytest.mark.parametrize("cls", [Pairs, Zipped, Asks, Fuses, Reads, InBlocks])
@pytest.mark.parametrize("topology", ["residual", "ancre-ingoing", "hc-dynamic"])
def test_two_streams_in_turns(cls: type[nn.Module], topology: str) -> None:
    """Neither knows of the other."""
    a, b = torch.randn(2, 3, WIDTH), torch.randn(2, 3, WIDTH)
    rewired = rewire.compile(cls(), topology, example_inputs=(a, b))
    (connection,) = rewire.connections(rewired).values()
    assert len(connection.layout.units) == 3
    for parameter in connection.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    (made, other), (swapped, alone) = rewired(a, b), rewired(b, a)
    assert torch.equal(made, alone) and torch.equal(other, swapped)


class Skips(nn.Module):
    """A U-net whose skips one loop adds, as NAFNet's: the outer one is around the inner one."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = (nn.ModuleList(nn.Sequential(Added(), Added()) for _ in range(2)) for _ in range(2))
        self.maps = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.middle = nn.Sequential(Added(), Added())

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for stage, change in zip(self.down, self.maps[:2], strict=True):
            x = stage(x)
            skips.append(x)
            x = change(x)
        x = self.middle(x)
        for stage, change, skip in zip(self.up, self.maps[2:], skips[::-1], strict=True):
            x = change(x)
            x = x + skip
            x = stage(x)
        return x


def test_skips_that_one_loop_adds() -> None:
    model, x = Skips(), torch.randn(2, 3, WIDTH)
    rewired = rewire.compile(model, "residual", example_inputs=x)
    assert {*rewire.connections(rewired)} == {"down.0", "down.1", "up.0", "up.1", "middle"}
    torch.testing.assert_close(rewired(x), model(x))


class SkipsOfOneLoop(Skips):
    """Its way down is written out."""

    def forward(self, x: Tensor) -> Tensor:
        outer = self.down[0](x)
        inner = self.down[1](self.maps[0](outer))
        x = self.middle(self.maps[1](inner))
        for stage, change, skip in zip(self.up, self.maps[2:], (inner, outer), strict=True):
            x = change(x)
            x = x + skip
            x = stage(x)
        return x


def test_skips_that_one_loop_adds_behind_levels_without_one(caplog: pytest.LogCaptureFixture) -> None:
    model, x = SkipsOfOneLoop(), torch.randn(2, 3, WIDTH)
    rewired = rewire.compile(model, "residual", example_inputs=x)
    assert list(rewire.connections(rewired)) == ["middle"] and torch.equal(rewired(x), model(x))
    assert "runs 2 times between two residual adds, for other streams, too" in caplog.text


class Summed(nn.Module):
    """Two sums of the state go through one expression, as in PyTorch Geometric's GPSConv."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.branch = Branch(), Branch(), Branch()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        one = self.norms[0](x + self.one(x))
        two = self.norms[1](x + self.two(x))
        out: Any = sum([one, two])
        return cast("Tensor", out + self.branch(out))


def test_several_sums_in_one_expression() -> None:
    model, x = nn.Sequential(Summed(), Summed()), torch.randn(2, 3, WIDTH)
    rewired = rewire.compile(model, "residual", example_inputs=x)
    assert rewire.connections(rewired) and torch.equal(rewired(x), model(x))


class Made(nn.Module):
    def forward(self, a: Tensor | None, b: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        return (None if a is None else 2 * a), (None if b is None else 2 * b)


class TwoInOneLoop(nn.Module):
    """Of two streams in one loop, a call may bring one alone, as those of policies with a cache of their prefix do."""

    def __init__(self, made: bool) -> None:
        super().__init__()
        self.a, self.b = (nn.ModuleList(Branch() for _ in range(2)) for _ in range(2))
        self.made = Made() if made else None

    def forward(self, states: Any) -> Any:
        if self.made is not None:
            states = self.made(*states)
        for branches in zip(self.a, self.b, strict=True):
            new = []
            for branch, x in zip(branches, states, strict=True):
                new.append(None if x is None else x + branch(x))
            states = new
        return states


class TwoInADict(TwoInOneLoop):
    def forward(self, states: dict[str, Tensor]) -> dict[str, Tensor]:
        states = dict(states)
        for branches in zip(self.a, self.b, strict=True):
            for branch, name in zip(branches, "ab", strict=True):
                if name in states:
                    x = states[name]
                    states[name] = x + branch(x)
        return states


@dataclasses.dataclass
class Two:
    a: Tensor | None
    b: Tensor | None


class MadeInData(Made):
    def forward(self, a: Tensor | None, b: Tensor | None) -> Two:
        return Two(*super().forward(a, b))


class TwoInData(TwoInOneLoop):
    """The two come in a dataclass."""

    def __init__(self) -> None:
        super().__init__(True)
        self.made = MadeInData()

    def forward(self, states: Any) -> Any:
        two = self.made(*states)
        states = [two.a, two.b]
        for branches in zip(self.a, self.b, strict=True):
            states = [None if x is None else x + branch(x) for branch, x in zip(branches, states, strict=True)]
        return states


@pytest.mark.parametrize("topology", ["ancre-ingoing", "hc-dynamic"])
@pytest.mark.parametrize("made", [False, True])
def test_one_of_two_streams_keeps_its_weights_without_the_other(made: bool, topology: str) -> None:
    a, b = vectors(1, 2), vectors(2, 3)
    rewired = shaken(rewire.compile(TwoInOneLoop(made), topology, example_inputs=([a, b],)), 0.1, 7)
    both = rewired([a, b])
    torch.testing.assert_close(rewired([a, None])[0], both[0])
    torch.testing.assert_close(rewired([None, b])[1], both[1])


def test_one_of_two_streams_in_a_dataclass_keeps_its_weights_without_the_other() -> None:
    a, b = vectors(1, 2), vectors(2, 3)
    rewired = shaken(rewire.compile(TwoInData(), example_inputs=([a, b],)), 0.1, 7)
    both = rewired([a, b])
    torch.testing.assert_close(rewired([a, None])[0], both[0])
    torch.testing.assert_close(rewired([None, b])[1], both[1])


def test_one_of_two_streams_in_a_dict_keeps_its_weights_without_the_other() -> None:
    a, b = vectors(1, 2), vectors(2, 3)
    rewired = shaken(rewire.compile(TwoInADict(False), example_inputs=({"a": a, "b": b},)), 0.1, 7)
    both = rewired({"a": a, "b": b})
    torch.testing.assert_close(rewired({"a": a})["a"], both["a"])
    torch.testing.assert_close(rewired({"b": b})["b"], both["b"])


def test_a_stream_that_the_example_did_not_bring_takes_no_weights_of_the_other() -> None:
    rewired = rewire.compile(TwoInOneLoop(False), example_inputs=([None, vectors(1, 2)],))
    with pytest.raises(rewire.OutOfOrder, match="has another shortcut"):
        rewired([vectors(1, 2), None])
