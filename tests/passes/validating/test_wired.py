"""What is lost where connection weights have moved is noticed, and what is right is not refused."""

from __future__ import annotations

import dataclasses
import logging
import operator
from typing import Any
from unittest import mock

import pytest
import torch
from mixing import llama, shaken
from models import NanoGPT, PostNorm, PreNorm, SeparateAttention, Stack, UNet, token_ids, vectors
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from written_nets import written_input, written_net

import rewire
from rewire.passes import find
from rewire.passes.validating.wires import Wires
from rewire.runtime.layout import Layout
from rewire.runtime.live import Live
from rewire.runtime.separate import SeparateInputs
from rewire.runtime.stream import Stream

WIDTH = 16
X = torch.randn(3, 5, WIDTH, generator=torch.Generator().manual_seed(1))
MOVED = "connection weights that have moved"


class Identity(torch.autograd.Function):
    """As functions that gather a sequence over ranks are written."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Stop(Identity):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.zeros_like(grad)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn, self.mlp = nn.LayerNorm(WIDTH), SeparateAttention(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm(x))
        return x + self.mlp(torch.tanh(x))


class Applied(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(Identity.apply(self.norm(x)))
        return x + self.mlp(torch.tanh(x))


class Net(nn.Module):
    def __init__(self, block: type[nn.Module] = Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(block() for _ in range(4))

    def between(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i == 1:
                x = self.between(x)
        return x


class Detached(Net):
    def between(self, x: Tensor) -> Tensor:
        return x.detach()


class Scaled(Net):
    def between(self, x: Tensor) -> Tensor:
        return x.detach() * self.stem.bias


class Data(Net):
    def between(self, x: Tensor) -> Tensor:
        return x.data


class Anew(Net):
    def between(self, x: Tensor) -> Tensor:
        return x.detach().requires_grad_()


class Stopped(Net):
    def between(self, x: Tensor) -> Tensor:
        return Stop.apply(x)


class Copied(Net):
    def between(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return x.clone()


# -- what is wrong -----------------------------------------------------------------------------------------------------


def lost(inputs: SeparateInputs, function: Any, *values: Any) -> Any:
    """As when the receiver of a call was taken for the value."""
    return function(*values)


def test_a_value_that_is_lost_on_its_way_to_an_attention_is_noticed():
    with mock.patch.object(SeparateInputs, "apply", lost), pytest.raises(rewire.OutOfOrder, match="separate inputs"):
        rewire.compile(Net(Applied), "dca", example_inputs=(X,))


@pytest.mark.parametrize("topology", ["dca", "muddformer"])
def test_and_where_nothing_else_notices_it_the_comparison_does(topology):
    with (
        mock.patch.object(SeparateInputs, "apply", lost),
        mock.patch.object(SeparateInputs, "_projected", SeparateInputs._taken),
        mock.patch.object(Live, "apart", property(lambda _: True, lambda *_: None), create=True),
        pytest.raises(rewire.ValidationMismatch, match=MOVED),
    ):
        rewire.compile(Net(Applied), topology, example_inputs=(X,))


@pytest.mark.parametrize("topology", ["ancre-ingoing", "denseformer"])
def test_gradients_that_pass_by_a_cut_are_noticed(topology):
    with (
        mock.patch.object(find, "why_cut", return_value=""),
        mock.patch.object(Stream, "_check_passes"),
        pytest.raises(rewire.ValidationMismatch, match=f"only.*{MOVED}"),
    ):
        rewire.compile(Detached(), topology, example_inputs=(X,))


@pytest.mark.each_once
@pytest.mark.parametrize(("one", "other"), [("q", "k"), ("k", "v"), ("q", "v")])
@pytest.mark.parametrize("topology", ["dca", "muddformer"])
def test_queries_keys_and_values_that_change_places_are_noticed(topology, one, other):
    project, swapped = SeparateInputs.project, {one: other, other: one}
    with (
        mock.patch.object(SeparateInputs, "project", lambda self, f, way: project(self, f, swapped.get(way, way))),
        pytest.raises(rewire.ValidationMismatch, match=MOVED),
    ):
        rewire.compile(Net(), topology, example_inputs=(X,))


def of_another_unit(stream: Stream) -> Any:
    """What a unit reads by the weights of the one before."""
    layout = stream.layout
    units = tuple(max(1, unit - 1) for unit in layout.units)
    other = Layout(layout.trunk, layout.topology, units, layout.dims.width, layout.dims.attention)
    return _DUE(Stream(stream.states, stream.held, stream.shared, other, stream.position))


_DUE = Stream._due


def test_weights_of_another_unit_are_noticed():
    with mock.patch.object(Stream, "_due", of_another_unit), pytest.raises(rewire.ValidationMismatch, match=MOVED):
        rewire.compile(Net(), "x0-lambdas", example_inputs=(X,))


def without_the_first(stream: Stream, *given: Any) -> Any:
    """Between the units, the first state is forgotten."""
    written = _WRITTEN(stream, *given)
    return Stream(
        written.states[-1:] * len(written.states), written.held, written.shared, written.layout, written.position
    )


_WRITTEN = Stream._written


def test_a_state_that_is_dropped_is_noticed():
    with (
        mock.patch.object(Stream, "_written", without_the_first),
        pytest.raises(rewire.ValidationMismatch, match=MOVED),
    ):
        rewire.compile(Net(), "x0-lambdas", example_inputs=(X,))


# -- what is cut -------------------------------------------------------------------------------------------------------


@pytest.mark.each_once
@pytest.mark.parametrize("net", [Detached, Scaled, Data, Anew, Stopped, Copied])
@pytest.mark.parametrize("validate", [True, False])
def test_a_stream_whose_gradients_are_cut_is_left_alone(net, validate):
    with pytest.raises(rewire.RewireError, match=r"gradients (do not pass|switched)"):
        rewire.compile(net(), "ancre-ingoing", example_inputs=(X,), validate=validate)


def test_a_cut_between_the_branches_of_one_sum_is_told():
    """It was counted as one residual add with two parallel branches."""
    net = written_net("def add(x):\n    with torch.no_grad():\n        return x + self.f(x)\nreturn add(x) + self.g(x)")
    with pytest.raises(rewire.NoResidualAdds, match="gradients do not pass"):
        rewire.compile(net, example_inputs=(written_input(),))


def test_a_cut_that_no_run_showed_is_refused_when_it_runs():
    class Later(Net):
        cut = False

        def between(self, x: Tensor) -> Tensor:
            return (x.detach() if self.cut else x) * 0.5

    rewired = rewire.compile(Later(), "ancre-ingoing", example_inputs=(X,))
    rewired(X)
    rewired.cut = True
    with pytest.raises(rewire.UnsupportedCall, match="gradients do not pass from residual add 4"):
        rewired(X)
    with torch.no_grad():
        rewired(X)


# -- what is right -----------------------------------------------------------------------------------------------------

RIGHT = {
    "pre-norm": (lambda: Stack(PreNorm), vectors),
    "post-norm": (lambda: Stack(PostNorm), vectors),
    "U-Net": (UNet, vectors),
    "GPT": (NanoGPT, token_ids),
    "in a call": (lambda: Net(Applied), lambda: X),
    "llama": (llama, lambda: token_ids(2, 12, 97)),
    "llama in bfloat16": (lambda: llama().bfloat16(), lambda: token_ids(2, 12, 97)),
}


@pytest.mark.each_once
@pytest.mark.parametrize("model", RIGHT)
@pytest.mark.parametrize("topology", ["ancre-ingoing", "dca", "hc-dynamic"])
def test_what_is_right_is_compared_and_not_refused(model, topology, caplog):
    make, inputs = RIGHT[model]
    with caplog.at_level(logging.INFO, logger="rewire"):
        try:
            rewire.compile(make(), topology, example_inputs=(inputs(),))
        except rewire.UnsupportedTopology:
            return  # no attention, or a post-norm block
    assert f"{MOVED}: " in caplog.text and "was not validated" not in caplog.text


@pytest.mark.parametrize("topology", ["denseformer", "grn-v1", "hc-static", "hc-dynamic"])
@pytest.mark.parametrize(
    ("block", "branch"),
    [
        ("return x + self.f(x) + x", "return x + (self.f(x) + x)"),
        ("y = x + self.f(x)\nreturn y + self.g(y) + x", "y = x + self.f(x)\nreturn y + (self.g(y) + x)"),
    ],
)
def test_a_state_that_is_added_once_more(block: str, branch: str, topology: str) -> None:
    """It is a part of the branch."""
    x, found = written_input(), []
    for forward in (block, branch):
        torch.manual_seed(0)
        rewired = rewire.compile(written_net(forward), topology, example_inputs=(x,), granularity="block")
        found.append(shaken(rewired, 0.2, 3)(x))
    torch.testing.assert_close(*found)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def test_what_cannot_be_wired_is_said(caplog):
    class Inside(Net):
        def between(self, x: Tensor) -> Tensor:
            return Doubled.apply(x)

    with caplog.at_level(logging.WARNING, logger="rewire"):
        rewire.compile(Inside(), "ancre-ingoing", example_inputs=(X,))
    assert f"not validated with {MOVED}" in caplog.text and "autograd function" in caplog.text


class AtTheRoot(nn.Module):
    """Its stream starts with the model's own input, and its adds are the root's."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class InADict(AtTheRoot):
    def step(self, state: dict[str, Tensor], block: nn.Module) -> int:
        state["x"] = state["x"] + block(state["x"])
        return 1

    def forward(self, x: Tensor) -> Tensor:
        state = {"x": torch.tanh(x)}
        for block in self.blocks:
            self.step(state, block)
        return state["x"]


@pytest.mark.parametrize("net", [AtTheRoot, InADict])
@pytest.mark.parametrize("topology", ["ancre-ingoing", "ancre-none", "grn-v1", "hc-static"])
def test_streams_that_start_with_an_input_are_compared(
    net: type[nn.Module], topology: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        rewire.compile(net(), topology, example_inputs=(X,))
    assert MOVED in caplog.text and "was not validated" not in caplog.text


class Drawing(nn.Module):
    """A post-norm trunk, and random numbers behind it (the latent variables of ACT)."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.norms = (
            nn.ModuleList(make(16) for _ in range(3)) for make in (lambda n: nn.Linear(n, n), nn.LayerNorm)
        )

    def forward(self, x: Tensor) -> Tensor:
        for f, norm in zip(self.f, self.norms, strict=True):
            x = norm(x + f(x))
        return x + torch.randn_like(x)


def test_random_numbers_behind_a_trunk_are_drawn_as_in_the_original(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        rewire.compile(Drawing(), "denseformer", example_inputs=(X,))
    assert MOVED in caplog.text and "was not validated" not in caplog.text


def test_a_reference_that_is_wired_wrongly_refuses_nothing(caplog: pytest.LogCaptureFixture) -> None:
    start = Wires.start
    with mock.patch.object(Wires, "start", lambda self, x: start(self, 2 * x)):
        rewire.compile(Net(), "ancre-ingoing", example_inputs=(X,))
    assert "was not validated with connection weights that have moved" in caplog.text
    assert "wired by plain connections, the original is not itself" in caplog.text


@dataclasses.dataclass
class Carried:
    x: Tensor


class InADataclass(Block):
    """Changes the object in which the state comes."""

    def forward(self, carried: Carried) -> Carried:
        carried.x = super().forward(carried.x)
        return carried


class Carrying(Net):
    def forward(self, x: Tensor) -> Tensor:
        carried = Carried(self.stem(x))
        for block in self.blocks:
            carried = block(carried)
        return carried.x


class Hooked(Net):
    """Pre-hooks change what most blocks get."""

    def __init__(self, block: type[nn.Module] = Block) -> None:
        super().__init__(block)
        for made in self.blocks[1:]:
            made.register_forward_pre_hook(lambda _, args: (0.5 * args[0],))


class Gated(SeparateAttention):
    def __init__(self) -> None:
        super().__init__(WIDTH)
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.sigmoid(self.gate(x))


class GatedBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.attn = Gated()


class Both(Block):
    """One attention reads two streams."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.LayerNorm(WIDTH)

    def forward(self, streams: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, y = streams
        h = self.attn(torch.cat([self.norm(x), self.other(y)], 1))
        x, y = x + h[:, : x.shape[1]], y + h[:, x.shape[1] :]
        return x + self.mlp(torch.tanh(x)), y + self.mlp(torch.tanh(y))


class Meeting(Net):
    def forward(self, x: Tensor) -> Tensor:
        streams = self.stem(x), self.stem(x.flip(1))
        for block in self.blocks:
            streams = block(streams)
        return torch.cat(streams, 1)


class Recomputed(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x + checkpoint(lambda h: self.attn(self.norm(h)), x, use_reentrant=False)
        return x + self.mlp(torch.tanh(x))


@pytest.mark.parametrize(
    ("net", "block"),
    [(Carrying, InADataclass), (Hooked, Block), (Net, GatedBlock), (Meeting, Both)],
)
def test_a_projection_is_fed_as_the_block_feeds_it(
    net: type[Net], block: type[nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    rewire.compile(net(block), "muddformer", example_inputs=(X,))
    assert "was not validated" not in caplog.text


def test_blocks_that_are_checkpointed(caplog: pytest.LogCaptureFixture) -> None:
    """What the checkpoint would run again in backward, nothing would wire."""

    class Net(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = self.inp(x)
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)  # type: ignore[assignment]
            return self.out(x)  # type: ignore[no-any-return]

    rewire.compile(Net(PreNorm, depth=3), "hc-static", example_inputs=(vectors(),))
    assert "was not validated" not in caplog.text


@pytest.mark.parametrize("by_hand", [False, True])
def test_branches_that_are_checkpointed_where_they_are_added(by_hand: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The add runs behind the checkpoint, whose hooks must not keep what it saves."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.branches = nn.Linear(8, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for f in self.branches:
                run = (lambda y, f=f: f(y.square()).tanh()) if by_hand else f
                x = x + checkpoint(run, x, use_reentrant=False)
            return x

    rewired = rewire.compile(Net(), "ancre-ingoing", example_inputs=(torch.randn(2, 8),))
    assert len(rewire.connections(rewired)) == 1
    assert "was not validated" not in caplog.text


def test_an_attention_in_a_checkpointed_lambda_reads_all_three() -> None:
    found, wanted = (rewire.compile(Net(block), "dca", example_inputs=(X,)) for block in (Recomputed, Block))
    torch.testing.assert_close(shaken(found, 0.3, seed=3)(X), shaken(wanted, 0.3, seed=3)(X))


@pytest.mark.parametrize("topology", ["denseformer", "muddformer"])
def test_states_that_are_kept_where_training_scales_them(topology: str, caplog: pytest.LogCaptureFixture) -> None:
    net = written_net(
        "if self.training:\n    x = x * 0.5\nreturn x + self.f(x)",
        "kept = []\nfor block in self.blocks:\n    kept.append(x)\n    x = block(x)\nx = x + sum(kept)",
    )
    rewire.compile(net, topology, example_inputs=(written_input(),))
    assert "is kept, or read by others than the next block" in caplog.text


class CallsForwards(nn.Module):
    """As SqueezeBERT: no hook is told of its blocks."""

    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block.forward(x)
        return x


@pytest.mark.parametrize("topology", ["ancre-ingoing", "muddformer"])
def test_blocks_whose_forwards_are_called(topology: str, caplog: pytest.LogCaptureFixture) -> None:
    rewire.compile(CallsForwards(Block), topology, example_inputs=(X,))
    assert not caplog.text


class Tried(nn.Module):
    """Blocks are called again where they do not take an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            try:
                x = block(x, mask=None)
            except TypeError:
                x = block(x)
        return x


class Normed(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.norm, self.part = nn.LayerNorm(WIDTH), part

    def forward(self, x: Tensor) -> Tensor:
        return self.part(self.norm(x))


class Tied(nn.Module):
    """One attention, which the model's own forward calls in each pass of a loop, and adds."""

    def __init__(self) -> None:
        super().__init__()
        attention, mlp = Normed(SeparateAttention(WIDTH)), Normed(nn.Linear(WIDTH, WIDTH))
        self.layers = nn.ModuleList(nn.ModuleList([attention, mlp]) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for attention, mlp in self.layers:
            x = x + attention(x)
            x = x + mlp(x)
        return x


@pytest.mark.each_once
@pytest.mark.parametrize("net", [Tried, Tied])
@pytest.mark.parametrize("topology", ["muddformer", "grn-v3", "hc-dynamic"])
def test_calls_that_fail_and_calls_of_shared_modules(net: Any, topology: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "rewire"):
        rewire.compile(net(), topology, example_inputs=(X,), granularity="sublayer")
    assert "not validated" not in caplog.text


class Summed(AtTheRoot):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = operator.add(x, block(x))
        return x


def test_a_model_that_has_run_often(caplog: pytest.LogCaptureFixture) -> None:
    """Python 3.11 runs calls of functions in C by another instruction then, in the middle of a run, too."""
    net = Summed()
    net.blocks.extend(nn.Linear(WIDTH, WIDTH) for _ in range(9))
    for _ in range(4):
        rewired = rewire.compile(net, "ancre-ingoing", example_inputs=(X,))
    assert "not validated" not in caplog.text
    assert [len(one.layout.units) for one in rewire.connections(rewired).values()] == [12]


class ByName(Stack):
    """Says how it is rebuilt, by a class that is named (as NVIDIA's `persistent_class` does, of EDM and StyleGAN)."""

    def __init__(self) -> None:
        super().__init__(PreNorm, depth=3)

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuilt, (self.__getstate__(),)


def rebuilt(state: dict[str, Any]) -> ByName:
    made = ByName.__new__(ByName)
    made.__setstate__(state)
    return made


def test_a_model_that_says_how_it_is_rebuilt(caplog: pytest.LogCaptureFixture) -> None:
    """The copies of the reference are wired, too."""
    rewire.compile(ByName(), "denseformer", example_inputs=(vectors(),))
    assert "was not validated" not in caplog.text


class Scores(nn.Module):
    """As attentions of RealFormer and Uni-Mol: the first makes the scores that the others add to, and reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.qk, self.v = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k = self.qk(x).chunk(2, -1)
        scores = q @ k.transpose(1, 2)
        if before is not None:
            scores = before + scores
        return x + scores.softmax(-1) @ self.v(x), scores


class AddsUpScores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scores() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        scores, read = None, []
        for layer in self.layers:
            x, scores = layer(x, scores)
            read.append(x)
        return torch.stack(read)


@pytest.mark.parametrize("topology", ["hc-static", "grn-v1", "x0-lambdas", "denseformer"])
def test_a_first_state_that_is_read_where_it_is_made(topology: str, caplog: pytest.LogCaptureFixture) -> None:
    """It is read as it is, and not what the topology reads of it."""
    model = AddsUpScores()
    (scores,) = (trunk.name for trunk in rewire.inspect(model, example_inputs=(X,)).trunks if len(trunk.sites) == 3)
    rewired = shaken(rewire.compile(model, topology, example_inputs=(X,), trunks=[scores]), 0.3, seed=1)
    assert "not validated" not in caplog.text
    plain = rewire.restore(rewired)
    torch.testing.assert_close(rewired(X)[0], plain(X)[0])
    assert not torch.allclose(rewired(X)[1], plain(X)[1])
