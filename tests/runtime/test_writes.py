"""Writes in place on another way than the example inputs took: noticed in each mode, or without effect."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mixing import shaken
from slow_cases import one_in
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from written_nets import BLOCK, BODY, WIDTH, written_input, written_net

import rewire
from rewire.topologies.registry import make_topology

OTHER = "if x.shape[1] == 4:\n    "
LOST = "written to in place"


def other_input() -> Tensor:
    return torch.randn(2, 4, WIDTH)


def connected(block: str = BLOCK, body: str = BODY, topology: Any = "ancre-ingoing") -> nn.Module:
    torch.manual_seed(0)  # the same weights for all
    rewired = rewire.compile(written_net(block, body), topology, example_inputs=(written_input(),), validate=False)
    return shaken(rewired, 0.3, seed=1)


def by_functional_call(model: nn.Module, x: Tensor) -> Any:
    return torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)).sum())(dict(model.named_parameters()))


def by_vmap(model: nn.Module, x: Tensor) -> Any:
    return torch.func.vmap(model)(x[None])


@pytest.mark.parametrize(
    ("run", "write"),
    [
        *[(by_vmap, "x.mul_(2)"), (by_vmap, "x[:, 0].mul_(2)"), (by_functional_call, "x.mul_(2)")],
        (by_functional_call, "torch._foreach_mul_([x], 2)"),  # of which vmap has none
    ],
)
def test_under_transforms(run: Callable[[nn.Module, Tensor], Any], write: str) -> None:
    """`vmap` counts them for the tensors that it wraps alone; so do others those of operators on lists."""
    with pytest.raises(rewire.OutOfOrder, match=LOST):
        run(connected(f"x = x + self.f(x)\n{OTHER}{write}\nreturn x + self.g(x)"), other_input())


PLAIN = "f, g = self.f(x), self.g(x)\nh = x + f\nreturn h + g"


@pytest.mark.each_once
@pytest.mark.parametrize("topology", ["residual", "ancre-ingoing"])
@pytest.mark.parametrize("written", ["h", "f"])
def test_sums_with_some_of_the_parallel_branches(written: str, topology: str) -> None:
    rewired, x = connected(PLAIN.replace("\nr", f"\n{OTHER}{written}.mul_(2)\nr"), topology=topology), other_input()
    for context in (torch.enable_grad, torch.no_grad):
        with context(), pytest.raises(rewire.OutOfOrder, match=LOST):
            rewired(x)
    assert_refused_or_right(rewired, connected(PLAIN, topology=topology), x)


#: Block, and code around it. On the other way they write to the first state, or to what a branch has returned.
KEPT = [
    (f"f = self.f(x)\nx = x + f\n{OTHER}f.mul_(2)\nreturn x + self.g(x)", BODY),
    (f"y = x\nx = x + self.f(x)\n{OTHER}y.data.mul_(2)\nreturn x + self.g(x)", BODY),
    (BLOCK, f"y = x\nfor block in self.blocks:\n    x = block(x)\n    {OTHER}    y.mul_(2)"),
    (  # one buffer for all branches
        "f = self.f(x)\nif x.shape[1] == 4 and not torch.is_grad_enabled():\n    f = self.buffer.copy_(f)\n"
        "x = x + f\nreturn x + self.g(x)",
        f"buffer = torch.zeros(2, 4, {WIDTH})\nfor block in self.blocks:\n    block.buffer = buffer\n{BODY}",
    ),
]


#: Whose states have sums with branches, not these themselves.
SUMMED = [*[(*each, "residual") for each in KEPT], (*KEPT[-1], "ancre-ingoing"), (*KEPT[-1], "muddformer")]
IN_STATES = [(*each, topology) for each in KEPT for topology in ("ancre-ingoing", "muddformer", "attnres")]


@pytest.mark.each_once
@pytest.mark.parametrize(("block", "body", "topology"), one_in(2, [each for each in IN_STATES if each not in SUMMED]))
def test_what_later_blocks_read_is_not_changed_in_silence(block: str, body: str, topology: str) -> None:
    rewired, x = connected(block, body, topology), other_input()
    with torch.no_grad(), pytest.raises(rewire.OutOfOrder, match=LOST):
        rewired(x)
    if ".data" not in block:  # see docs/limits.md
        assert_refused_or_right(rewired, connected(topology=topology), x)
    with torch.no_grad(), pytest.raises(RuntimeError, match=f"OutOfOrder.*{LOST}"):
        torch.compile(rewired, backend="eager")(x)


@pytest.mark.parametrize(("block", "body", "topology"), SUMMED)
def test_what_no_block_reads_any_more_may_be_written_to(block: str, body: str, topology: str) -> None:
    rewired, x = connected(block, body, topology), other_input()
    expected = connected(topology=topology)(x).detach()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            torch.testing.assert_close(rewired(x), expected)


class PreviousBranch(rewire.Topology[Any]):
    """Units read the state plus a share of the previous branch output: one that has that as a state."""

    def parameters(self, dims: rewire.Dims, start: Any) -> dict[str, Tensor]:
        return {"a": torch.zeros(dims.depth)}

    def start(self, x: Tensor, weights: Any) -> tuple[Tensor, ...]:
        return x, torch.zeros_like(x)

    def read(self, states: tuple[Tensor, ...], weights: Any, t: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        return states[0] + weights["a"][t - 1] * states[1], states

    def write(self, states: tuple[Tensor, ...], weights: Any, t: int, *branches: Tensor) -> tuple[Tensor, ...]:
        return states[0] + branches[0], branches[0]

    def finish(self, states: tuple[Tensor, ...], weights: Any, dims: rewire.Dims) -> Tensor:
        return states[0]

    def matrix(self, weights: Any, dims: rewire.Dims) -> Tensor:
        return torch.eye(dims.depth)


READ = "self.mine = x\nx = x + self.f(x)\nreturn x + self.g(x)"
RETURNED = "x = x + self.f(x)\nx = x + self.g(x)\nself.mine = x\nreturn x"
NORMED = f"x = F.layer_norm(x + self.f(x), ({WIDTH},))\nself.mine = x\nreturn F.layer_norm(x + self.g(x), ({WIDTH},))"
BRANCH = "f = self.f(x)\nself.mine = f\nreturn x + f"
#: The trunk's input is a state until its third unit reads it.
FEW = ("denseformer", {"units": [3], "sources": ["x0"]})
#: Block; whose tensor is written to on the other way, behind which of the three blocks; topology.
WRITTEN_LATER: list[tuple[str, str, int, Any]] = [
    (NORMED, "self.blocks[0].mine", 1, ("ancre-ingoing", {})),
    (RETURNED, "self.blocks[0].mine", 1, ("ancre-ingoing", {})),
    (RETURNED, "self.blocks[0].mine", 0, ("hc-static", {})),  # what the next branch reads, and not the streams
    # States that are used for the last time before the trunk's end.
    (BLOCK, "first", 1, FEW),
    (READ, "self.blocks[1].mine", 1, ("denseformer", {"units": [3], "sources": [1]})),
    (READ, "self.blocks[1].mine", 1, ("unet", {})),
    (READ, "self.blocks[1].mine", 1, ("laurel-pa", {})),
    (BRANCH, "self.blocks[0].mine", 1, ("grn-v3", {"units": [3], "sources": [1]})),
    (BRANCH, "self.blocks[0].mine", 0, PreviousBranch()),
    (BRANCH, "self.blocks[0].mine", 0, ("attnres", {"block": 2})),  # the first of a group is its sum so far
]


def written_later(block: str, written: str, after: int, topology: Any) -> nn.Module:
    """A model that writes to a tensor behind one of its blocks, on the other way."""
    loop = "for i, block in enumerate(self.blocks):\n    x = block(x)"
    body = f"first = x\n{loop}\n    if x.shape[1] == 4 and i == {after}:\n        {written}"
    made = make_topology(*topology) if isinstance(topology, tuple) else topology
    return connected(block, body, made)


@pytest.mark.each_once
@pytest.mark.parametrize(("block", "written", "after", "topology"), one_in(2, WRITTEN_LATER))
def test_what_the_model_remembers_is_not_changed_in_silence(
    block: str, written: str, after: int, topology: Any
) -> None:
    rewired, x = written_later(block, f"{written}.mul_(2)", after, topology), other_input()
    for context in (torch.no_grad, torch.enable_grad):
        with context(), pytest.raises(rewire.OutOfOrder, match=LOST):
            rewired(x)
    assert_refused_or_right(rewired, written_later(block, "pass", after, topology), x)
    with torch.no_grad(), pytest.raises(RuntimeError, match=f"OutOfOrder.*{LOST}"):
        torch.compile(rewired, backend="eager")(x)


def test_results_of_post_norms_in_inference_mode() -> None:
    block = f"x = F.layer_norm(x + self.f(x), ({WIDTH},))\nself.mine = x\nreturn x"
    rewired = written_later(block, "self.blocks[0].mine.mul_(2)", 0, "ancre-ingoing")
    with torch.inference_mode(), pytest.raises(rewire.OutOfOrder, match=LOST):
        rewired(other_input())


def test_what_a_norm_remembers() -> None:
    """The result of a post-norm, where the model reads a mix of it and others."""
    block = "x = x + self.f(x)\nreturn self.f[0](x + self.g(x))"
    rewired = written_later(block, "self.blocks[0].f[0].last.mul_(2)", 1, "denseformer")
    norm = rewired.get_submodule("blocks.0.f.0")
    norm.register_forward_hook(lambda norm, _, y: setattr(norm, "last", y))
    with torch.no_grad(), pytest.raises(rewire.OutOfOrder, match=LOST):
        rewired(other_input())


def test_what_a_hook_returns() -> None:
    few = "denseformer", {"units": [3], "sources": [1]}
    rewired = written_later(BLOCK, "self.blocks[0].mine.mul_(2)", 1, few)
    rewired.get_submodule("blocks.0").register_forward_hook(
        lambda block, _, y: setattr(block, "mine", y + 1) or block.mine
    )
    with torch.no_grad(), pytest.raises(rewire.OutOfOrder, match=LOST):
        rewired(other_input())


def test_frozen_models_drop_states_too() -> None:
    rewired = rewire.freeze(written_later(BLOCK, "first.mul_(2)", 0, FEW))[0]
    with torch.no_grad(), pytest.raises(rewire.OutOfOrder, match=LOST):
        rewired(other_input())


def test_the_first_of_two_branches_of_a_unit() -> None:
    block = f"f = self.f(x)\nx = x + f\ng = self.g(x)\n{OTHER}f.mul_(2)\nreturn x + g"
    with torch.no_grad(), pytest.raises(rewire.OutOfOrder, match=LOST):
        connected(block, topology="x0-lambdas")(other_input())


def test_the_trunks_input_in_the_first_unit() -> None:
    """Streams are views of it until they are written to."""
    block = f"f = self.f(x)\n{OTHER}self.first.mul_(2)\nx = x + f\nreturn x + self.g(x)"
    body = f"first = x\nfor block in self.blocks:\n    block.first = first\n{BODY}"
    with torch.no_grad(), pytest.raises(rewire.OutOfOrder, match=LOST):
        connected(block, body, "hc-static")(other_input())


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # of vmap
def test_what_no_block_reads_any_more_under_transforms() -> None:
    """There memory has to be told of the tensors that are wrapped."""
    body = "for block in self.blocks:\n    x = block(x)\n    block.last.mul_(2)"
    rewired, x = connected("f = self.f(x)\nself.last = f\nx = x + f\nreturn x + self.g(x)", body), other_input()
    with torch.no_grad():
        torch.testing.assert_close(torch.func.vmap(rewired)(x[None])[0], connected()(x))


def assert_refused_or_right(rewired: nn.Module, without: nn.Module, x: Tensor) -> None:
    """In inference mode, where torch does not count writes to all tensors."""
    expected = without(x).detach()
    with torch.inference_mode(), contextlib.suppress(rewire.OutOfOrder):
        torch.testing.assert_close(rewired(x), expected)


@pytest.mark.parametrize("topology", ["residual", "ancre-ingoing", "muddformer"])
@pytest.mark.parametrize(
    ("block", "body"),
    [
        ("h = x.clone()\nx = h + self.f(x)\nh = x.double()\nreturn (h + self.g(x)).float()", BODY),
        ("x = x.transpose(0, 1)\nx = (x + self.f(x)).contiguous()\nx = x.transpose(0, 1)\nreturn x + self.g(x)", BODY),
        (BLOCK, "states = []\nfor block in self.blocks:\n    x = block(x)\n    states.append(x)\nx = x + states[0]"),
    ],
)
def test_values_in_inference_mode(block: str, body: str, topology: str) -> None:
    """Copies, views and states that the model hands out."""
    rewired, x = connected(block, body, topology), written_input()
    expected = rewired(x)
    with torch.inference_mode():
        torch.testing.assert_close(rewired(x), expected.detach())
        torch.testing.assert_close(rewired(x.clone()), expected.detach())


def test_copies_of_a_state_in_inference_mode() -> None:
    block = f"h = x.clone()\n{OTHER}h.mul_(2)\nx = h + self.f(x)\nreturn x + self.g(x)"
    rewired, x = connected(block), other_input()
    for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with context(), pytest.raises(rewire.OutOfOrder, match=LOST):
            rewired(x)


def test_only_the_input_is_copied_in_inference_mode() -> None:
    """What reads return is made where torch counts writes to it."""
    rewired, x = connected(topology="residual"), other_input()
    with torch.inference_mode(), profile(activities=[ProfilerActivity.CPU]) as profiled:
        rewired(x)
    assert sum(event.name == "aten::clone" for event in profiled.events()) == 1


def test_views_between_blocks_under_compile() -> None:
    body = f"for block in self.blocks:\n    x = block(x)\n    {OTHER}    x[:, 0].mul_(2)"
    with pytest.raises(RuntimeError, match=f"OutOfOrder.*{LOST}"):
        torch.compile(connected(body=body), backend="eager")(other_input())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # which Dynamo itself hides
def test_behind_a_graph_break() -> None:
    """Dynamo cannot resume from one in a block, and would compile each read and write by itself."""
    rewired = connected(f"x = x + self.f(x)\n{OTHER}x.mul_(2)\ntorch._dynamo.graph_break()\nreturn x + self.g(x)")
    x = written_input()
    torch.testing.assert_close(torch.compile(rewired, backend="eager")(x), rewired(x))
    torch._dynamo.reset()  # else Dynamo no longer compiles what it failed to
    with pytest.raises(rewire.OutOfOrder, match=LOST):
        torch.compile(rewired, backend="eager")(other_input())
