"""Weights by the states that they weigh, where reads have several ways, or states come in groups."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from rewire.mixes.blocks import Blocks
from rewire.mixes.by_state import ByState, parts


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("first", [1, 2])
@pytest.mark.parametrize(("group", "span"), [(2, 1), (2, 2), (3, 2), (20, 20), (20, 3)])
@pytest.mark.parametrize("ways", [[1], [1, 1, 1, 1, 1, 1, 1], [3, 1, 1, 3, 3]], ids=str)
def test_groups(ways: list[int], group: int, span: int, first: int, channels: bool) -> None:
    """Read t (from 0) has the states 0, S, 2 S, .. of t + first in turn, and the last of these."""
    of_reads = [sorted({*range(0, t + first, group), t + first - 1}) for t in range(len(ways))]
    of_mixes = [(t, i) for t, way in enumerate(ways) for _ in range(way) for i in of_reads[t]]
    flat = torch.arange(float(len(of_mixes)))
    flat = torch.stack([flat, -flat], 1) if channels else flat
    found = ByState.of(flat, Blocks(len(ways), first, 99, 99, group, span), ways)
    assert found.near == found.later == ()

    starts = [n for n in range(len(ways) + first - 1) if n % group % span == 0]  # the newest state of its first read
    assert len(found.spans) == len(starts)
    for start, own in zip(starts, found.spans, strict=True):
        end = min(start + span, start - start % group + group)
        complete = range(0, start + 1, group)
        wanted = [
            n for i in complete for n, of in enumerate(of_mixes) if of[1] == i and start <= of[0] + first - 1 < end
        ]
        assert torch.equal(own, flat[wanted])
    for t, own in enumerate(found.joined):
        newest = t + first - 1
        wanted = [n for n, of in enumerate(of_mixes) if of == (t, newest) and newest % group]
        assert torch.equal(own, flat[wanted])


@pytest.mark.parametrize("gathered", [1, 2, 99])
def test_ways(gathered: int) -> None:
    ways = [3, 1, 3, 1, 1]
    of_mixes = [(t, i) for t, way in enumerate(ways) for _ in range(way) for i in range(t + 1)]
    flat = torch.arange(float(len(of_mixes)))
    found = ByState.of(flat, Blocks(len(ways), 1, 99, gathered), ways)
    for i, near in enumerate(found.near):
        last = i // gathered * gathered + gathered - 1
        assert torch.equal(near, flat[[n for n, (t, state) in enumerate(of_mixes) if state == i and t < last]])
    for number, later in enumerate(found.later):
        block = range(number * gathered, (number + 1) * gathered)
        wanted = [n for i in block for n, (t, state) in enumerate(of_mixes) if state == i and t >= block[-1]]
        assert torch.equal(later, flat[wanted])


@pytest.mark.slow
def test_compiled_steps_leave_weights_alone() -> None:
    """Of copies that Inductor leaves out, backward would take the weights' memory for its own."""
    weights = nn.Parameter(torch.randn(6, 32))
    before = weights.detach().clone()

    def forward(x: Tensor) -> Tensor:
        y = x
        for rows in parts(weights.float(), [1, 2, 3]):
            y = torch.sin(sum(x * row for row in rows) + y)
        return y

    torch.compile(forward)(torch.randn(2, 7, 32, requires_grad=True)).square().sum().backward()
    assert torch.equal(before, weights)
