"""What an edited forward hands to its `Depth` in some calls only."""

from __future__ import annotations

import pytest
import torch
from comparing import assert_close, evaluate
from mixing import shaken
from models import PreNorm, vectors
from torch import Tensor, nn
from written_nets import BLOCK, BODY, WIDTH, assert_right, written_input, written_net

import rewire
from rewire.errors import UnsupportedCall


@pytest.mark.each_once
@pytest.mark.parametrize("topology", ["residual", "ancre-ingoing", "hc-static"])
@pytest.mark.parametrize(
    "block",
    [
        "x = x + (self.f(x) if x.shape[1] == 3 else 0)\nreturn x + self.g(x)",
        "x = x.clone()\nx += self.f(x.clone()) if x.shape[1] == 3 else 0.0\nreturn x",
        "h = self.f(x) if x.shape[1] == 3 else 0\nreturn x + h + self.g(x)",
    ],
)
def test_a_branch_that_is_a_number_in_some_calls(block: str, topology: str) -> None:
    net = written_net(block)
    rewired = rewire.compile(net, topology, example_inputs=(written_input(),))
    for length in (3, 2):
        given = (torch.randn(2, length, WIDTH),)
        assert_close(evaluate(net, given, {}), evaluate(rewired, given, {}), 1e-5, 1e-4)


@pytest.mark.parametrize("topology", ["residual", "ancre-ingoing", "hc-static"])
def test_parallel_branches_in_two_statements_keep_the_factor_of_the_first(topology: str) -> None:
    net = written_net("h = self.f(x)\ny = torch.add(x, h, alpha=0.5)\nreturn y + self.g(x)")
    rewired = rewire.compile(net, topology, validate=False)
    given = (torch.randn(2, 3, WIDTH),)
    assert_close(evaluate(net, given, {}), evaluate(rewired, given, {}), 1e-5, 1e-4)


def test_a_factor_on_the_state_that_was_1() -> None:
    """Where others give a mask: the message has its shape, and not all its numbers."""
    net = written_net(body="for block in self.blocks:\n    x = block(x) * self.factor")
    net.factor = 1.0
    rewired = rewire.compile(net, "denseformer", example_inputs=(written_input(),))
    for factor, said in ((torch.ones(2, 3, 1), r"a tensor of shape \[2, 3, 1\]"), (2.0, "2.0")):
        rewired.factor = factor
        with pytest.raises(rewire.OutOfOrder, match=f"multiplies the residual stream by {said}, but did so by 1 when"):
            rewired(written_input())


TWO = 'state = {"a": x, "b": 2 * x}\nfor block in self.blocks:\n    state = block(state)\nx = state["a"] + state["b"]'
STEPS = [
    'state["b"] = state["b"] + self.g(state["b"])\n    return state',
    'state["b"] = state["b"] + self.g(state["b"])\n    return {**state}',
    'state["b"] = state["b"] + self.g(state["b"])\n    return state["b"].mean()',
]


@pytest.mark.parametrize("step", STEPS)
def test_a_helper_that_changes_one_of_two_streams_in_a_dict(step: str) -> None:
    block = f'def step(state):\n    {step}\nx["a"] = x["a"] + self.f(x["a"])\nstep(x)\nreturn x'
    assert_right(written_net(block, TWO), 6)


class Stage(nn.Module):
    """As U-nets have them: it returns the state, and those behind its blocks, the state again among them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(PreNorm() for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        states: tuple[Tensor, ...] = ()
        for block in self.blocks:
            x = block(x)
            states += (x,)
        return x, states


class Stages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.stages = nn.Linear(32, 32), nn.ModuleList(Stage() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x, kept = self.stem(x), []
        for stage in self.stages:
            x, states = stage(x)
            kept += states
        return x + sum(kept)


@pytest.mark.parametrize("topology", ["ancre-ingoing", "denseformer", "muddformer"])
def test_a_stream_that_is_returned_twice_is_one_value(topology: str) -> None:
    x = vectors(width=32)
    rewired = rewire.compile(Stages(), topology, example_inputs=(x,))
    assert sum(len(c.layout.units) for c in rewire.connections(rewired).values()) == 8


@pytest.mark.each_once
@pytest.mark.parametrize("topology", ["ancre-ingoing", "hc-static"])
@pytest.mark.parametrize(
    "block",
    [
        "f = self.f(x)\nif x.shape[1] == 3:\n    x = x + f\nelse:\n    x += f\nreturn x + self.g(x)",
        "x = x + self.f(x)\nf = self.g(x)\nif x.shape[1] == 3:\n    x = x + f\nelse:\n    x += f\nreturn x",
        "x = x + self.f(x)\nif x.shape[1] != 3:\n    x.mul_(2)\nx = x.transpose(0, 1)\n"
        "return (x + self.g(x)).transpose(0, 1)",
        "if x.shape[1] != 3:\n    x.mul_(2)\nx = x + self.f(x)\nreturn x + self.g(x)",
    ],
)
def test_writes_in_place_on_another_way_are_not_lost(block: str, topology: str) -> None:
    """The skipped add in front of a block's end, or a view, would read the stream anew."""
    rewired = rewire.compile(written_net(block), topology, example_inputs=(written_input(),))
    given, place = torch.randn(2, 4, WIDTH), r"written to in place in block 'blocks\.0'"
    for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with context(), pytest.raises(rewire.OutOfOrder, match=place):
            rewired(given.clone())
        with context(), pytest.raises(RuntimeError, match=r"OutOfOrder: .* written to in place"):
            torch.compile(rewired, backend="eager")(given.clone())


@pytest.mark.each_once
@pytest.mark.parametrize("topology", ["ancre-ingoing", "attnres", "muddformer"])
@pytest.mark.parametrize(
    ("block", "body"),
    [
        ("f = self.f(x)\nx = x.clone() + f\nreturn x + self.g(x)", BODY),
        ("f = self.f(x)\nx = (x.double() + f).float()\nreturn x + self.g(x)", BODY),
        # streams that code reads that did not run when the model was rewired
        (
            BLOCK,
            "kept = []\nfor block in self.blocks:\n    x = block(x)\n    kept.append(x)\n"
            "if x.shape[1] == 4:\n    x = torch.cat(kept, -1)",
        ),
    ],
)
def test_casts_and_reads_in_inference_mode(block: str, body: str, topology: str) -> None:
    """Torch counts no writes to the tensors that they make."""
    rewired = shaken(rewire.compile(written_net(block, body), topology, example_inputs=(written_input(),)), 0.2)
    given = torch.randn(2, 4, WIDTH)
    expected = rewired(given)
    with torch.inference_mode():
        torch.testing.assert_close(rewired(given), expected)


@pytest.mark.each_once
@pytest.mark.parametrize("topology", ["residual", "ancre-ingoing", "muddformer"])
@pytest.mark.parametrize("end", ["x = {}\nreturn x", "return {}"])
def test_states_that_other_operations_may_follow_in_inference_mode(end: str, topology: str) -> None:
    """The norm behind a block's last add makes the next state; behind the first block, further operations do."""
    state = "F.layer_norm(x + self.{}(x), ({},))"
    block = f"x = {state.format('f', WIDTH)}\n" + end.format(state.format("g", WIDTH))
    body = "for i, block in enumerate(self.blocks):\n    x = block(x)\n    if i == 0:\n        x = x.sigmoid()"
    rewired = shaken(rewire.compile(written_net(block, body), topology, example_inputs=(written_input(),)), 0.2)
    assert "more=True" in rewire.diff(rewired)
    given = torch.randn(2, 4, WIDTH)
    expected = rewired(given)
    with torch.inference_mode():
        torch.testing.assert_close(rewired(given), expected)


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.f = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, keys: Tensor) -> Tensor:
        f = self.f(self.norm(keys))
        return x + f.mean(1, keepdim=True) * self.norm(x)


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attending() for _ in range(3))

    def forward(self, x: Tensor, cache: Tensor | None = None) -> Tensor:
        for block in self.blocks:
            x = block(x, x if cache is None else torch.cat([cache, x], 1))
        return x


@pytest.mark.parametrize("topology", ["residual", "ancre-ingoing", "denseformer", "attnres"])
def test_a_tensor_in_place_of_the_stream_in_another_argument(topology: str) -> None:
    """As keys of a cache are in calls that decode: they are no stream, in the first block either."""
    x, cache = vectors(length=3), vectors(length=4)
    net = Cached()
    rewired = shaken(rewire.compile(net, topology, example_inputs=(x,)), 0.2)
    decoding = rewire.compile(net, topology, example_inputs=(x, cache))
    decoding.load_state_dict(rewired.state_dict())
    torch.testing.assert_close(rewired(x, cache), decoding(x, cache))
    with torch.inference_mode():
        torch.testing.assert_close(rewired(x, cache), decoding(x, cache))


@pytest.mark.parametrize("topology", ["hc-dynamic", "grn-v1", "x0-lambdas", "two-lanes"])
def test_a_tensor_beside_a_first_read_that_is_not_the_input(topology: str) -> None:
    """Its keys would be made of the input, and the queries of what the topology reads."""
    x, cache = vectors(length=3), vectors(length=4)
    rewired = rewire.compile(Cached(), topology, example_inputs=(x,))
    rewired(x)
    for training in (True, False):
        with pytest.raises(UnsupportedCall, match=r"block 'blocks.0' .*test_depth.py.* another tensor .*'blocks'"):
            rewired.train(training)(x, cache)
    rewire.compile(Cached(), topology, example_inputs=(x, cache))(x, cache)


@pytest.mark.each_once
@pytest.mark.parametrize("topology", ["ancre-ingoing", "attnres", "hc-dynamic"])
@pytest.mark.parametrize(
    "block",
    [
        "f = self.f(x)\nwith torch.enable_grad():\n    x = x + f\nf = self.g(x)\nwith torch.enable_grad():\n"
        "    x = x + f\nreturn x",
        "def add(x, f):\n    return x.float() + f\nf = self.f(x)\nwith torch.enable_grad():\n    x = add(x, f)\n"
        "f = self.g(x)\nwith torch.enable_grad():\n    x = add(x, f)\nreturn x",
    ],
)
def test_gradients_that_are_switched_on_for_adds_alone(block: str, topology: str) -> None:
    """Megatron's are, in evaluation, too."""
    net = written_net(block)
    rewired = shaken(rewire.compile(net, topology, example_inputs=(written_input(),)), 0.2)
    x = written_input()
    expected = rewired(x)
    with torch.no_grad():
        result = rewired(x)
    torch.testing.assert_close(result, expected)
    assert not result.requires_grad


@pytest.mark.parametrize(
    ("block", "body"),
    [
        ("return x + self.f(x)", "for n, block in enumerate(self.blocks):\n    with torch.set_grad_enabled(n > on):\n"
         "        x = block(x)"),
        ("with torch.set_grad_enabled(x.shape[1] == 3):\n    x = x + self.f(x)\nreturn x + self.g(x)", BODY),
    ],
)  # fmt: skip
def test_gradients_of_a_part_of_the_blocks_are_refused(block: str, body: str) -> None:
    """Also where no branch has gradients: the connections in front would have none."""
    net = written_net(block, f"on = -1 if x.shape[1] == 3 else 1\n{body}").requires_grad_(False)
    rewired = rewire.compile(net, example_inputs=(written_input(),))
    with pytest.raises(rewire.UnsupportedCall, match="gradients switched"):
        rewired(torch.randn(2, 4, WIDTH))


def test_gradients_that_stay_on_behind_an_add_are_refused() -> None:
    block = "with torch.enable_grad():\n    x = x + self.f(x)\n    return x + self.g(x)"
    rewired = rewire.compile(written_net(block), example_inputs=(written_input(),))
    with torch.no_grad(), pytest.raises(rewire.UnsupportedCall, match="began with gradients switched off"):
        rewired(written_input())


@pytest.mark.each_once
@pytest.mark.parametrize("topology", ["residual", "ancre-ingoing", "hc-static"])
def test_adds_in_a_loop_that_runs_once_too_often_at_the_trunks_end(topology: str) -> None:
    net = written_net("for _ in range(2 if x.shape[1] != 4 else 3):\n    x = x + self.f(x)\nreturn x")
    net.blocks = nn.ModuleList([net.get_submodule("blocks.0")])
    rewired = rewire.compile(net, topology, example_inputs=(written_input(),), validate=False)
    with pytest.raises(rewire.OutOfOrder, match="runs more often"):
        rewired(torch.randn(2, 4, WIDTH))


@pytest.mark.parametrize("topology", ["attnres", "hc-dynamic", "hc-static"])
def test_reads_are_no_views(topology: str) -> None:
    """As sums are none: Megatron's `make_viewless_tensor` would make something else of a view."""
    block = "x = x + self.f(x)\nx = x if x._base is None else x.clone()\nx = x + self.g(x)\n"
    net = written_net(f"{block}return x if x._base is None else x.clone()")
    rewired = shaken(rewire.compile(net, topology, example_inputs=(written_input(),)), 0.2)
    x = written_input()
    expected = rewired(x)
    with torch.no_grad():
        torch.testing.assert_close(rewired(x), expected)


def test_a_view_in_a_list() -> None:
    block = (
        "import einops\nx, shapes = einops.pack([x], '* d')\nx = x + self.f(x)\n"
        "x, = einops.unpack(x, shapes, '* d')\nreturn x + self.g(x)"
    )
    assert_right(written_net(block), 6)
