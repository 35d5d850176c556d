"""Writes in place on another way than the example inputs took: noticed in each mode, or without effect."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mixing import shaken
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from written_nets import BLOCK, BODY, WIDTH, written_input, written_net

import rewire

OTHER = "if x.shape[1] == 4:\n    "
LOST = "written to in place"


def other_input() -> Tensor:
    return torch.randn(2, 4, WIDTH)


def connected(block: str = BLOCK, body: str = BODY, topology: str = "ancre-ingoing") -> nn.Module:
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


@pytest.mark.each_once
@pytest.mark.parametrize("topology", ["ancre-ingoing", "muddformer", "attnres"])
@pytest.mark.parametrize(("block", "body"), KEPT)
def test_what_later_blocks_read_is_not_changed_in_silence(block: str, body: str, topology: str) -> None:
    rewired, x = connected(block, body, topology), other_input()
    with torch.no_grad(), pytest.raises(rewire.OutOfOrder, match=LOST):
        rewired(x)
    if ".data" not in block:  # see docs/limits.md
        assert_refused_or_right(rewired, connected(topology=topology), x)
    with torch.no_grad(), pytest.raises(RuntimeError, match=f"OutOfOrder.*{LOST}"):
        torch.compile(rewired, backend="eager")(x)


@pytest.mark.parametrize(("block", "body"), KEPT)
def test_what_no_block_reads_any_more_may_be_written_to(block: str, body: str) -> None:
    rewired, x = connected(block, body, "residual"), other_input()
    expected = connected(topology="residual")(x).detach()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            torch.testing.assert_close(rewired(x), expected)


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
