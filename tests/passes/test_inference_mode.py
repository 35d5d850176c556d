"""Models that are rewired in `torch.inference_mode` can be trained; those that were made in it cannot."""

from __future__ import annotations

import copy

import pytest
import torch
from written_nets import written_input, written_net

import rewire


@pytest.mark.parametrize("topology", ["ancre-ingoing", "hc-dynamic", "denseformer"])
def test_rewired_in_inference_mode(topology: str) -> None:
    net = written_net()
    with torch.inference_mode():
        rewired = rewire.compile(net, topology, example_inputs=torch.randn(2, 3, 8))
        plain = rewire.restore(rewired)
    assert not any(p.is_inference() for p in (*rewired.parameters(), *plain.parameters()))
    rewired(written_input()).sum().backward()
    assert all(p.grad is not None for p in rewired.parameters() if p.requires_grad)


@pytest.mark.parametrize("validate", [True, False])
def test_made_in_inference_mode(validate: bool) -> None:
    with torch.inference_mode():
        net = written_net()
    with pytest.raises(rewire.RewireError, match=r"'stem.weight' was made in torch.inference_mode\(\)"):
        rewire.compile(net, example_inputs=written_input(), validate=validate)
    assert len(rewire.inspect(net).trunks) == 1  # of a trace
    assert "rewire copy.deepcopy(model)" in str(rewire.inspect(net, written_input()).left)
    assert rewire.compile(copy.deepcopy(net), example_inputs=written_input(), validate=validate)
