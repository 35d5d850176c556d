"""Backward hooks in rewired models: called where tensors pass, refused where a stream does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models import PreNorm, Stack, vectors
from torch import nn

import rewire

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")

REGISTERING = ["register_full_backward_hook", "register_full_backward_pre_hook", "register_backward_hook"]


def ignore(*_: Any) -> None:
    pass


@pytest.mark.parametrize("register", REGISTERING)
def test_on_blocks_they_are_refused(register: str) -> None:
    rewired = rewire.compile(Stack(PreNorm), example_inputs=(vectors(),))
    for model in (rewired, copy.deepcopy(rewired)):
        for number in (0, 1, 2):  # a stream goes out of the first, and comes into the last
            with pytest.raises(rewire.UnsupportedCall, match=rf"'layers\.{number}' \(.*models\.py:\d+\).*norms"):
                getattr(model.layers[number], register)(ignore)
    getattr(rewire.restore(rewired).layers[1], register)(ignore)


def test_elsewhere_they_are_called() -> None:
    model, called = Stack(PreNorm), list[str]()
    model.register_full_backward_pre_hook(lambda *_: called.append("model"))
    rewired = rewire.compile(model, example_inputs=(vectors(),))
    rewired.layers[1].ln_1.register_full_backward_hook(lambda *_: called.append("norm"))
    rewired.layers[1].mlp.register_full_backward_hook(lambda *_: called.append("branch"))
    called.clear()
    rewired(vectors()).sum().backward()
    assert called == ["model", "branch", "norm"]


@pytest.mark.parametrize("topology", ["ancre-ingoing", "mhc"])
def test_blocks_that_have_some_are_not_rewired(topology: str) -> None:
    model = Stack(PreNorm)
    handle = model.layers[1].register_full_backward_hook(ignore)
    with pytest.raises(rewire.EditError, match=r"'layers\.1' \(.*\) has backward hooks"):
        rewire.compile(model, topology, example_inputs=(vectors(),))
    handle.remove()
    rewire.compile(model, topology, example_inputs=(vectors(),))


@pytest.mark.parametrize("name", ["register_module_full_backward_hook", "register_module_full_backward_pre_hook"])
def test_global_hooks_are_refused_while_they_are_there(name: str) -> None:
    rewired = rewire.compile(Stack(PreNorm), "denseformer", validate=False)
    expected, handle = rewired(vectors()), getattr(nn.modules.module, name)(lambda *given: None)
    try:
        with pytest.raises(
            rewire.UnsupportedCall, match=r"global backward hooks.*register hooks on norms and branches"
        ):
            rewired(vectors())
    finally:
        handle.remove()
    assert torch.equal(rewired(vectors()), expected)
