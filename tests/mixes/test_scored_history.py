"""Reads with weights of which a part is computed from the state: what the tests of topologies do not reach."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreter import INTERPRETED, interpret, starts_interpreter
from torch import Tensor

from rewire.kernels import switch
from rewire.mixes import claimed
from rewire.mixes.claimed import Table
from rewire.topologies.base import materialize

WIDTH = 6


Leaves = tuple[Tensor, Tensor, Tensor]


def leaves(ways: list[int], channels: bool, dtype: torch.dtype, group: int = 1) -> Leaves:
    """The first state, the constant weights, the queries."""
    torch.manual_seed(0)
    entries = sum(way * (-(-t // group) + 1) for t, way in enumerate(ways))
    flat = torch.randn(entries, *([WIDTH] if channels else [])) / len(ways) ** 0.5
    x, queries = torch.randn(2, 3, WIDTH), torch.randn(sum(ways), WIDTH) / WIDTH
    return x.to(dtype).requires_grad_(), flat.requires_grad_(), queries.requires_grad_()


def chain(x: Tensor, flat: Tensor, queries: Tensor, ways: list[int], ignored: int | None, group: int) -> Tensor:
    """The last of reads in turn; a branch sees the sum of a read's ways. In groups, branches are summed."""
    table = Table(flat, ways, group=group, queries=queries)
    history, state = table.history(), x
    for number in range(len(ways)):
        history = history.read(number + 1, state)
        state = history.newest
        branch = torch.sin(sum(materialize(mix) for mix in history.mixes(table[number + 1])))  # type: ignore[arg-type]
        branch, history = branch.detach() if number == ignored else branch, history.kept
        state = state + branch if number % group else branch
    return state


def written_out(x: Tensor, flat: Tensor, queries: Tensor, ways: list[int], ignored: int | None, group: int) -> Tensor:
    """The same by the formula."""
    states, weights, query = [x], iter(flat.double()), iter(queries.double())
    for number, way in enumerate(ways):
        total = torch.zeros_like(x)
        for _ in range(way):
            w = next(query)
            for state in states:
                total = total + (next(weights) + (state @ w).clamp(min=0).unsqueeze(-1)) * state
        branch = torch.sin(total)
        branch = branch.detach() if number == ignored else branch
        states = [*states[:-1], states[-1] + branch] if number % group else [*states, branch]
    return states[-1]


def gradients(
    function: Any, leaves: tuple[Tensor, ...], ways: list[int], ignored: int | None, group: int = 1
) -> tuple[Tensor, ...]:
    out = function(*leaves, ways, ignored, group)
    upstream = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return out.detach(), *torch.autograd.grad(out, leaves, upstream)


WAYS = [[1, 1, 1], [1, 3, 1, 3], [1] * 12]


@pytest.mark.each_once
@pytest.mark.parametrize("ignored", [None, 1])
@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("group", [1, 2, 5, 12])
@pytest.mark.parametrize("ways", [*WAYS, [3] * 9], ids=len)
def test_formula(ways: list[int], group: int, channels: bool, ignored: int | None) -> None:
    given = leaves(ways, channels, torch.float64, group)
    wanted = gradients(written_out, given, ways, ignored, group)
    torch.testing.assert_close(gradients(chain, given, ways, ignored, group), wanted)


@pytest.mark.parametrize("group", [1, 3])
def test_left_to_autograd(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in compiled regions without kernels; also from a state on, which another function has pushed."""
    ways = [1, 3, 1, 3, 1, 1, 3, 1]
    given = leaves(ways, True, torch.float64, group)
    wanted = gradients(written_out, given, ways, None, group)
    for first in (0, 3):
        calls = itertools.count()
        monkeypatch.setattr(
            claimed, "left_to_autograd", lambda x, sources, static, n=calls, first=first: next(n) >= first
        )
        torch.testing.assert_close(gradients(chain, given, ways, None, group), wanted)


@pytest.mark.slow
@starts_interpreter
def test_in_the_interpreter(tmp_path: Path) -> None:
    interpret(f"{__file__}::TestKernels", tmp_path)


class TestKernels:
    __test__ = INTERPRETED

    @pytest.mark.parametrize("ignored", [None, 4])
    @pytest.mark.parametrize("channels", [False, True])
    @pytest.mark.parametrize("ways", [*WAYS, [1] * 10, [3, 1] * 5 + [1]], ids=len)
    def test_formula(self, ways: list[int], channels: bool, ignored: int | None) -> None:
        """From 9 states on, reads of one way begin in blocks of four, and gradients are gathered in blocks."""
        blocks, deep = Table(leaves(ways, channels, torch.float32)[1], ways).blocks, len(ways) > 8
        assert blocks.block == (4 if deep and max(ways) == 1 else len(ways) + 1)
        assert blocks.gathered == (4 if deep else len(ways) + 1)
        wanted = gradients(written_out, leaves(ways, channels, torch.float64), ways, ignored)
        found = gradients(chain, leaves(ways, channels, torch.float32), ways, ignored)
        for got, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(got.double(), want.double(), rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("ignored", [None, 3])
    @pytest.mark.parametrize("channels", [False, True])
    @pytest.mark.parametrize("group", [2, 3])
    @pytest.mark.parametrize("ways", [[1, 3, 1, 3, 1], [1] * 12], ids=len)
    def test_groups(self, ways: list[int], group: int, channels: bool, ignored: int | None) -> None:
        """Of six states there are two gathers."""
        wanted = gradients(written_out, leaves(ways, channels, torch.float64, group), ways, ignored, group)
        found = gradients(chain, leaves(ways, channels, torch.float32, group), ways, ignored, group)
        for got, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(got.double(), want.double(), rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("group", [1, 3])
    def test_second_derivatives(self, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
        def second() -> tuple[Tensor, ...]:
            given = leaves([1] * 10, True, torch.float32, group)
            first = torch.autograd.grad(chain(*given, [1] * 10, None, group).sum(), given, create_graph=True)
            return torch.autograd.grad(sum(g.square().sum() for g in first), given)

        found = second()
        monkeypatch.setattr(switch, "ON", False)
        monkeypatch.setattr(claimed, "left_to_autograd", lambda x, sources, static: True)
        torch.testing.assert_close(found, second(), rtol=1e-3, atol=1e-4)
