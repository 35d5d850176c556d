"""Long skips around blocks, in any order, leave the blocks' own adds to the trunk."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from flows import CODE, Written
from models import PreNorm, vectors
from torch import Tensor, nn
from written_nets import assert_right, written_input, written_net

import rewire
from rewire.passes.finding.chains import LONG, chains
from rewire.passes.finding.flow import Op

COLLECTED = "states = []\nfor block in self.blocks:\n    x = block(x)\n    states.append(x)\n"


@pytest.mark.parametrize(
    "skips",
    [
        "for h in states[::-1]:\n    x = x + h",
        "while states:\n    x = states.pop() + x",
        "for h in states[-2::-1]:\n    x = x.clone()\n    x += h",
        "for h in sorted(states, key=lambda h: float(h.detach().mean())):\n    x = x.add(h)",
        "states = collections.deque(states)\nwhile states:\n    x = x + states.popleft()",
        "y = x\nfor h in states[::-1]:\n    y = y + h\nx = y + x",
        "x = sum(states[::-1], x)",
        "x = functools.reduce(torch.add, states[::-1])",
        "x = states[-3] + (states[-2] + states[-1])",
    ],
)
def test_skips_behind_the_blocks(skips: str) -> None:
    assert_right(written_net(body=COLLECTED + skips), adds=6)


@pytest.mark.parametrize("shortcut", ["x[:]", "x[..., :]", "x.narrow(0, 0, len(x))", "x[None][0]"])
def test_a_shortcut_that_is_indexed_whole(shortcut: str) -> None:
    assert_right(written_net(f"x = x + self.f(x)\nreturn {shortcut} + self.g(x)"), adds=6)


def test_a_trunk_begins_where_a_state_gets_other_dimensions_in_ways_that_are_no_view() -> None:
    body = "for block in self.blocks[:2]:\n    x = block(x)\nx = x.as_strided((6, 8), (8, 1))\nx = self.blocks[2](x)"
    net = written_net(body=body)
    trunks = rewire.inspect(net, (written_input(),)).trunks
    assert [len(trunk.sites) for trunk in trunks] == [4, 2]
    assert_right(net, adds=6)


@pytest.mark.parametrize("topology", ["denseformer", "hc-static"])
def test_states_are_padded_alike_up_to_a_multiple_of_a_window(topology: str) -> None:
    """The example needs no padding, and other inputs do."""
    net = written_net("n = x.shape[1]\nx = F.pad(x, (0, 0, 0, -n % 4))\nx = x + self.f(x)\nreturn x[:, :n]")
    rewired = rewire.compile(net, topology, example_inputs=(torch.randn(2, 8, 8),))
    (connection,) = rewire.connections(rewired).values()
    assert len(connection.layout.units) == 3 and not connection.layout.posts
    for weight in connection.parameters():
        nn.init.normal_(weight, 0.5, 0.5)
    x = torch.randn(2, 7, 8)
    torch.testing.assert_close(rewired(x)[:, :4], rewired(x[:, :4]))
    torch.testing.assert_close(rewired(x)[:, 3:], rewired(x[:, 3:]))


def test_skips_in_one_forward() -> None:
    body = "states = []\nfor block in self.blocks:\n    x = x + block.f(x)\n    states.append(x)\n"
    assert_right(written_net(body=body + "for h in states[::-1]:\n    x = x + h"), adds=3)


def test_skips_into_blocks_are_adds_of_the_stream() -> None:
    assert_right(written_net(body=COLLECTED + "for block in self.blocks:\n    x = block(x) + states.pop()"), adds=12)


@pytest.mark.parametrize("last", ["relu", "layer_norm", ""])
def test_what_follows_the_last_add_belongs_to_it_if_it_follows_the_others(last: str) -> None:
    """All adds stand in one forward: the network's final norm does, too."""
    net = Written()
    x = net.op("input")
    for number, name in enumerate(["relu", "relu", last]):
        x = net.op("add", x, net.linear(x, f"layers.{number}"), place=(CODE, 0))
        x = net.op(name, x) if name else x
    (chain,), _ = chains(net.flow())
    assert [[op.name for op in add.post] for add in chain.adds] == [["relu"], ["relu"], ["relu"] * (last == "relu")]


def test_what_follows_the_last_add_is_compared_with_those_of_its_own_expression() -> None:
    net = Written()
    x = net.op("input")
    x = net.op("add", x, net.linear(x, "first"), place=(CODE, 2))
    for number in range(2):
        x = net.op("relu", net.op("add", x, net.linear(x, f"layers.{number}"), place=(CODE, 0)))
    (chain,), _ = chains(net.flow())
    assert [[op.name for op in add.post] for add in chain.adds] == [[], ["relu"], ["relu"]]


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("norm", ["F.layer_norm(x, (8,))", "block.f[0](x)"])
def test_a_final_norm_in_place_of_the_last_ones_own_is_none_of_the_loops(norm: str, outside: bool) -> None:
    """As in x-transformers with ``pre_norm=False``."""
    loop = f"for n, block in enumerate(self.blocks):\n    x = x + block.f(x)\n    if n < 2:\n        x = {norm}"
    net = written_net(body=loop if outside else f"{loop}\nx = {norm}")
    net = nn.Sequential(net, nn.LayerNorm(8)) if outside else net
    rewired = rewire.compile(net, "denseformer", example_inputs=(written_input(),))
    (connection,) = rewire.connections(rewired).values()
    assert connection.layout.posts == {0, 1}


@pytest.mark.parametrize("last", ["layer_norm", "relu"])
def test_what_a_block_does_behind_its_add_belongs_to_the_last_one_too(last: str) -> None:
    """Whatever the other blocks do there; what follows the blocks does not."""
    net = Written()
    x = net.op("input")
    for block, name in zip("012", ["layer_norm", "layer_norm", last], strict=True):
        x = net.op("add", x, net.linear(x, f"{block}.f"), at=block)
        x = net.op(name, x, at=f"{block}.norm")
    net.op("layer_norm", x, at="norm")
    (chain,), _ = chains(net.flow())
    assert [[op.scope.path for op in add.post] for add in chain.adds] == [["0.norm"], ["1.norm"], ["2.norm"]]


def test_a_skip_around_all_adds_of_a_forward_is_a_long_one() -> None:
    net = Written()
    x = first = net.op("input")
    for number in range(3):
        x = net.op("add", x, net.linear(x, f"layers.{number}"), place=(CODE, 0))
    around = net.op("add", first, net.op("relu", x), place=(CODE, 2))
    (chain,), rejected = chains(net.flow())
    assert len(chain.adds) == 3 and {add.op: why for add, why in rejected.items()} == {around: LONG}


def test_of_two_ways_on_the_longer_one_is_the_stream() -> None:
    net = Written()
    x = net.op("input")
    x = net.op("add", x, net.linear(x, "0"))
    net.op("add", x, net.linear(x, "aside"))
    end = net.op("add", x, net.linear(x, "1"))
    last = net.op("add", end, net.linear(end, "2"))
    found, _ = chains(net.flow())
    assert [add.op for add in found[0].adds] == [x, end, last]


def test_a_stream_that_ends_in_the_code_of_another_is_cut_there() -> None:
    """The last pass through a loop, whose state began anew, goes on with the stream of another name."""
    net = Written()

    def loop(x: Op) -> None:
        for number in range(2):
            x = net.op("add", x, net.linear(x, f"layers.{number}"), place=(CODE, 2 * number))

    loop(net.op("input"))
    x = net.op("input")
    loop(net.op("add", x, net.linear(x, "first"), place=(CODE, 8)))
    assert [len(chain.adds) for chain in chains(net.flow())[0]] == [2, 1, 2]


class TurnedNorm(nn.LayerNorm):
    """As SqueezeBERT's: of channels in front of the positions."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 1)).permute(0, 2, 1)


class TurnedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Conv1d(8, 8, 1) for _ in range(2))
        self.norms = nn.ModuleList(TurnedNorm(8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norms[0](x + self.branches[0](x))
        return self.norms[1](x + self.branches[1](x))


def test_a_norm_that_turns_its_input_and_turns_it_back(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.randn(2, 8, 5)
    model = nn.Sequential(nn.Conv1d(8, 8, 1), *(TurnedBlock() for _ in range(2)))
    rewired = rewire.compile(model, "ancre-ingoing", example_inputs=(x,))
    assert sum(len(c.layout.units) for c in rewire.connections(rewired).values()) == 4 and not caplog.text
    torch.testing.assert_close(rewired(x), model(x))


class KeepsAside(nn.Module):
    def __init__(self, kept: str) -> None:
        super().__init__()
        self.norm, self.mlp, self.kept = nn.LayerNorm(8), nn.Linear(8, 8), kept

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = x + self.mlp(self.norm(x))
        if self.kept == "returned":
            return x, x.relu()
        self.aside = x.detach() if self.kept == "detached" else x.relu()
        return x


class GoesOn(nn.Module):
    """Its last state is its output: nothing follows that tells what the last block's state is."""

    def __init__(self, kept: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(KeepsAside(kept) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x = x[0] if isinstance(x, tuple) else x
        return x


@pytest.mark.parametrize("kept", ["detached", "relu", "returned"])
def test_what_the_last_block_keeps_beside_its_state_is_no_post(kept: str) -> None:
    model = rewire.compile(GoesOn(kept), "hc-dynamic", example_inputs=(torch.randn(2, 8),))
    (connection,) = rewire.connections(model).values()
    assert len(connection.layout.units) == 3 and not connection.layout.posts


class ChannelsFirst(nn.Module):
    """A convolutional branch with channels in front, between stages that have them last, as in GCViT."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv = TurnedNorm(16), nn.Conv1d(16, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return x + self.conv(x)


class Stage(nn.Module):
    def __init__(self, down: bool) -> None:
        super().__init__()
        self.down = ChannelsFirst() if down else nn.Identity()
        self.blocks = nn.ModuleList(PreNorm(16) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(x).permute(0, 2, 1)
        for block in self.blocks:
            x = block(x)
        return x.permute(0, 2, 1).contiguous()


def test_a_norm_between_two_stages_that_turns_its_input_makes_no_state(caplog: pytest.LogCaptureFixture) -> None:
    model, x = nn.Sequential(nn.Conv1d(16, 16, 1), *map(Stage, (False, True, True))), torch.randn(2, 16, 5)
    rewired = rewire.compile(model, "ancre-ingoing", example_inputs=(x,))
    found = {name: len(c.layout.units) for name, c in rewire.connections(rewired).items()}
    assert found == {"1.blocks": 4, "2": 5, "3": 5} and not caplog.text
    torch.testing.assert_close(rewired(x), model(x))


class Levels(nn.Module):
    """A U-Net in two loops, as k-diffusion's HDiT; its levels are `torch.nn.Sequential`s of blocks."""

    def __init__(self, skip: Callable[[Tensor, Tensor], Tensor], widths: Sequence[int]) -> None:
        super().__init__()
        self.skip, pairs = skip, [*itertools.pairwise(widths)]
        self.downs, self.ups = (nn.ModuleList(self.level(width) for width, _ in pairs) for _ in range(2))
        self.merges = nn.ModuleList(nn.Linear(narrow, wide) for narrow, wide in pairs)
        self.splits = nn.ModuleList(nn.Linear(wide, narrow) for narrow, wide in pairs)
        self.mid = self.level(widths[-1])

    def level(self, width: int) -> nn.Module:
        return nn.Sequential(*(PreNorm(width) for _ in range(2)))

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for down, merge in zip(self.downs, self.merges, strict=True):
            x = down(x)
            skips.append(x)
            x = merge(x)
        x = self.mid(x)
        for up, split, skip in reversed([*zip(self.ups, self.splits, skips, strict=True)]):
            x = self.skip(split(x), skip)
            x = up(x)
        return x


@pytest.mark.parametrize("skip", [torch.add, lambda x, skip: torch.lerp(skip, x, 0.5), lambda x, skip: x])
@pytest.mark.parametrize("widths", [(32, 64, 32), (32, 32, 32, 32)])
def test_levels_that_run_in_one_loop_are_trunks_of_their_own(skip: Any, widths: tuple[int, ...]) -> None:
    net = Levels(skip, widths)
    rewired = rewire.compile(net, "denseformer", example_inputs=(vectors(width=32),))
    levels = {*(f"{way}.{n}" for n in range(len(widths) - 1) for way in ("downs", "ups")), "mid"}
    assert {name: len(c.layout.units) for name, c in rewire.connections(rewired).items()} == dict.fromkeys(levels, 4)
    left = [each for each in rewire.inspect(net, (vectors(width=32),)).left if each.why == LONG]
    assert len(left) == (skip is torch.add) * (len(widths) - 1)


def test_two_streams_of_which_one_loop_runs_the_blocks_are_not_cut() -> None:
    """Their adds take turns, in both loops."""
    block = "x, y, f, n = x\nif n % 2:\n    return x, y + f(x)\nreturn x + f(y), y"
    loops = [f"for n, block in enumerate(self.blocks):\n    x, y = block((x, y, block.{f}, n))\n" for f in "fg"]
    loops = f"y = x.tanh()\n{''.join(loops)}x = torch.cat([x, y])"
    trunks = rewire.inspect(written_net(block, loops), (written_input(),)).trunks
    assert sorted(len(trunk.sites) for trunk in trunks) == [2, 3]  # the first adds what was made of another value


class Bias(nn.Module):
    """An attention of one stream with a bias from another one."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, m: Tensor, z: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(self.q(m), self.k(m), self.v(m), z.mean(-1)[:, None, :])


class Evoformer(nn.Module):
    """Two streams, of which the first one is added to the second before or behind its own add (multimers: before)."""

    def __init__(self, before: bool) -> None:
        super().__init__()
        self.att, self.outer, self.pair, self.before = Bias(), nn.Linear(8, 12), nn.Linear(12, 12), before

    def forward(self, m: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        if self.before:
            z = z + self.outer(m)
        m = m + self.att(m.tanh(), z)
        if not self.before:
            z = z + self.outer(m)
        z = z + self.pair(z.tanh())
        return m, z


class Evoformers(nn.Module):
    def __init__(self, before: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Evoformer(before) for _ in range(3))

    def forward(self, m: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.blocks:
            m, z = block(m, z)
        return m, z


@pytest.mark.parametrize("before", [False, True])
def test_a_branch_of_another_stream_is_named_or_said_to_be_beside(before: bool) -> None:
    inputs = torch.randn(2, 5, 8), torch.randn(2, 5, 12)
    report = rewire.inspect(Evoformers(before), inputs)
    first, second = report.trunks
    assert [(site.branch, site.kind) for site in first.sites] == 3 * [("att", "attention")]
    assert [site.branch for site in second.sites] == 3 * (["pair"] if before else ["outer", "pair"])
    beside = [each for each in report.left if each.why.startswith("adds what is not computed from the state")]
    assert [each.path for each in beside] == (["blocks.1.outer", "blocks.2.outer"] if before else [])
    assert all(each.written == "z + self.outer(m)" for each in beside)
    rewire.compile(Evoformers(before), "denseformer", example_inputs=inputs)
