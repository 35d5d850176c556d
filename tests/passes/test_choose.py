"""Which trunks a topology fits."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn

import rewire

WIDTH, COUNT = 8, 5


class Scores(nn.Module):
    """Sums of attention scores beside the hidden states, whose last dimension has no channels."""

    def __init__(self, states: bool) -> None:
        super().__init__()
        self.stem, self.states = nn.Linear(WIDTH, WIDTH), states
        self.branches = nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(3))
        self.mixes = nn.ParameterList(torch.randn(COUNT, COUNT) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.stem(x)
        scores = x @ x.transpose(1, 2)
        for branch, mix in zip(self.branches, self.mixes, strict=True):
            scores = scores + torch.einsum("bij,jk->bik", scores, mix)
            x = x + branch(x) if self.states else branch(x)
        return x, scores


@pytest.mark.parametrize("topology", ["hc-dynamic", "grn-v3", "layerscale"])
def test_trunks_of_unknown_width_are_left_out_beside_others(topology: str, caplog: pytest.LogCaptureFixture) -> None:
    x = torch.randn(2, COUNT, WIDTH)
    with caplog.at_level(logging.WARNING):
        rewired = rewire.compile(Scores(True), topology, example_inputs=(x,))
    assert [len(c.layout.units) for c in rewire.connections(rewired).values()] == [3]
    assert caplog.text.count("was left as it is: the topology has weights per channel") == 1
    assert len(rewire.connections(rewire.compile(Scores(True), "denseformer", example_inputs=(x,)))) == 2


def test_alone_or_by_name_they_are_refused() -> None:
    x = torch.randn(2, COUNT, WIDTH)
    with pytest.raises(rewire.UnsupportedTopology, match="the width of the trunk is not known"):
        rewire.compile(Scores(False), "hc-dynamic", example_inputs=(x,))
    named = [trunk.name for trunk in rewire.inspect(Scores(True), (x,)).trunks]
    with pytest.raises(rewire.UnsupportedTopology, match="the width of the trunk is not known"):
        rewire.compile(Scores(True), "hc-dynamic", example_inputs=(x,), trunks=named)
