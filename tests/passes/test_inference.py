"""Models that make their residual adds elsewhere in the code if no gradients are recorded."""

from __future__ import annotations

import logging

import pytest
import torch
from mixing import shaken
from written_nets import written_input, written_net

import rewire
from rewire.passes.validate import INFERENCE, MOVED, MOVED_INFERENCE

BLOCKS = [
    "f = self.f(x)\nif torch.is_grad_enabled():\n    x = x + f\nelse:\n    x += f\nreturn x + self.g(x)",
    "f = self.f(x)\nx = x + f if x.requires_grad else f.add_(x)\ng = self.g(x)\n"
    "return x + g if torch.is_grad_enabled() else g.add_(x)",
    "x = x + self.f(x)\nif not torch.is_grad_enabled():\n    return x.add_(self.g(x))\nreturn x + self.g(x)",
    # as Megatron-LM adds, and in a function inside the forward
    "def add(x, f):\n    if self.training or f.requires_grad:\n        return x + f\n    f.add_(x)\n    return f\n"
    "x = add(x, self.f(x))\nreturn add(x, self.g(x))",
]
#: Another function without gradients.
OTHER = "f = self.f(x)\nx = x + f if torch.is_grad_enabled() else x + 0.5 * f\nreturn x + self.g(x)"


@pytest.mark.each_once
@pytest.mark.parametrize("topology", ["ancre-ingoing", "hc-dynamic", "muddformer"])
@pytest.mark.parametrize("validate", [True, False])
@pytest.mark.parametrize("block", BLOCKS)
def test_what_is_learned_is_computed_without_gradients_too(block: str, validate: bool, topology: str) -> None:
    net, x = written_net(block), written_input()
    rewired = shaken(rewire.compile(net, topology, example_inputs=(x,), validate=validate), 0.2)
    expected = rewired(x)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            torch.testing.assert_close(rewired(x), expected.detach())
    torch.testing.assert_close(rewired.eval()(x), expected)


@pytest.mark.parametrize("block", [*BLOCKS, OTHER])
def test_both_ways_are_compared(block: str, caplog: pytest.LogCaptureFixture) -> None:
    """At the start, and with connection weights that have moved, by the formulas of what the branches return there."""
    net, x = written_net(block), written_input()
    with caplog.at_level(logging.INFO, "rewire"):
        rewired = rewire.compile(net, "ancre-ingoing", example_inputs=(x,))
    for setting in (INFERENCE, MOVED, MOVED_INFERENCE):
        assert f"{setting.name}: 1 outputs" in caplog.text
    assert "not validated" not in caplog.text
    with torch.no_grad():
        torch.testing.assert_close(rewired(x), net(x))


def test_a_way_that_cannot_be_connected_is_told_when_the_model_is_rewired() -> None:
    net = written_net("f = self.f(x)\nx = x + f if torch.is_grad_enabled() else x - f\nreturn x + self.g(x)")
    with pytest.raises(rewire.OutOfOrder, match=r"in evaluation mode without gradients.*another way.*written_\w+\.py:"):
        rewire.compile(net, example_inputs=(written_input(),))


def test_fewer_blocks_without_gradients() -> None:
    blocks = "self.blocks[: 3 if torch.is_grad_enabled() else 2]"
    net, x = written_net(body=f"for block in {blocks}:\n    x = block(x)"), written_input()
    rewired = rewire.compile(net, "ancre-ingoing", example_inputs=(x,))
    with torch.no_grad():
        torch.testing.assert_close(rewired(x), net(x))
