"""Example inputs: in all forms, and those that the plain model does not take."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
import torch
from torch import nn
from written_nets import BLOCK, BODY, WIDTH, written_input, written_net

import rewire
from rewire.passes.inputs import normalise_inputs


def test_one_tensor_and_any_mapping_are_taken() -> None:
    x = written_input()
    for given in (x, (x,), [x], {"x": x}, UserDict(x=x), ((x,), {}), ((), UserDict(x=x))):
        args, kwargs = normalise_inputs(given)
        assert (args[0] if args else kwargs["x"]) is x and type(kwargs) is dict
        assert len(rewire.inspect(written_net(), given).trunks) == 1
    rewired = rewire.compile(written_net(), "residual", example_inputs=x)
    assert rewire.freeze(rewired, 0.1, example_inputs=x)[1].change == 0


@pytest.mark.parametrize("given", [3, "x", object(), nn.Linear(2, 2)])
def test_other_things_are_refused(given: Any) -> None:
    with pytest.raises(rewire.BadExampleInputs, match="a pair of both, or one tensor, not"):
        rewire.compile(written_net(), example_inputs=given)
    with pytest.raises(rewire.BadExampleInputs, match="have 1 for the name of an argument"):
        rewire.compile(written_net(), example_inputs={1: written_input()})


def test_inputs_with_gaps_that_the_plain_model_does_not_take() -> None:
    viewing = "b, t, d = x.shape\nx = x + self.f(x.view(b * t, d)).view(b, t, d)\nreturn x + self.g(x)"
    net = written_net(viewing)
    net.stem = nn.Identity()
    turned = torch.randn(2, WIDTH, 3).transpose(1, 2)
    said = "Net does not run on the example inputs, of which some are not contiguous in memory: RuntimeError: view"
    with pytest.raises(rewire.BadExampleInputs, match=said) as raised:
        rewire.compile(net, "residual", example_inputs=turned)
    assert "example_inputs that it takes" not in str(raised.value)


#: Models that are refused, or that raise when they are called in another way than the one that was seen.
REFUSED = {
    "nothing is found": ("return self.f(x)", BODY),
    "another way": ("if x.shape[1] > 3:\n    x = x * 2\nx = x + self.f(x)\nreturn x + self.g(x)", BODY),
    "a branch less": (
        "left = [self.g, self.f]\nwhile left and len(left) > 3 - x.shape[1]:\n    x = x + left.pop()(x)\nreturn x",
        BODY,
    ),
    "another order": (BLOCK, "for block in self.blocks if x.shape[1] == 3 else self.blocks[::-1]:\n    x = block(x)"),
    "a state in a slot": (
        "x.x = x.x + self.f(x.x)\nreturn x",
        "s = type('S', (), {'__slots__': 'x'})()\ns.x = x\nfor block in self.blocks:\n    s = block(s)\nx = s.x",
    ),
    "nothing is returned": ("x[0] = x[0] + self.f(x[0])", "x = [x]\nfor block in self.blocks:\n    block(x)\nx = x[0]"),
}


@pytest.mark.each_once
@pytest.mark.parametrize("validate", [True, False])
@pytest.mark.parametrize("name", REFUSED)
def test_no_message_asks_for_inputs_that_were_given(name: str, validate: bool) -> None:
    net = written_net(*REFUSED[name])
    with pytest.raises(rewire.RewireError) as raised:
        _called(rewire.compile(net, "residual", example_inputs=(written_input(),), validate=validate))
    assert "example_inputs" not in str(raised.value)


def _called(rewired: nn.Module) -> None:
    for length in (3, 2, 5):
        rewired(torch.randn(2, length, WIDTH))


def test_where_none_were_given_it_is_advised_to() -> None:
    rewired = rewire.compile(written_net(*REFUSED["another way"]), "residual", validate=False)
    with pytest.raises(rewire.OutOfOrder, match="rewired without example_inputs: pass some that take this way"):
        rewired(torch.randn(2, 5, WIDTH)), rewired(torch.randn(2, 3, WIDTH))
