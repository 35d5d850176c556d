"""Reads with weights of which a part is computed from the state: what the tests of topologies do not reach."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from interpreter import INTERPRETED, interpret, starts_interpreter
from torch import Tensor

from rewire.kernels import operators, scored
from rewire.kernels.scored import ScoredHistory, ScoredTable
from rewire.topologies.base import materialize

WIDTH = 6


def leaves(ways: list[int], channels: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The first state, the constant weights, the queries."""
    torch.manual_seed(0)
    entries = sum(way * t for t, way in enumerate(ways, start=1))
    flat = torch.randn(entries, *([WIDTH] if channels else [])) / len(ways) ** 0.5
    x, queries = torch.randn(2, 3, WIDTH), torch.randn(sum(ways), WIDTH) / WIDTH
    return x.to(dtype).requires_grad_(), flat.requires_grad_(), queries.requires_grad_()


def chain(x: Tensor, flat: Tensor, queries: Tensor, ways: list[int], ignored: int | None = None) -> Tensor:
    """The last of reads in turn; a branch sees the sum of a read's ways."""
    history, state = ScoredHistory(ScoredTable(flat, queries, ways)), x
    for number in range(len(ways)):
        history = history.push(state)
        state = torch.sin(sum(materialize(mix) for mix in history.read(number)))  # type: ignore[arg-type]
        state = state.detach() if number == ignored else state
    return state


def written_out(x: Tensor, flat: Tensor, queries: Tensor, ways: list[int], ignored: int | None = None) -> Tensor:
    """The same by the formula."""
    states, weights, query = [x], iter(flat.double()), iter(queries.double())
    for number, way in enumerate(ways):
        total = torch.zeros_like(x)
        for _ in range(way):
            w = next(query)
            for state in states:
                total = total + (next(weights) + (state @ w).clamp(min=0).unsqueeze(-1)) * state
        state = torch.sin(total)
        states.append(state.detach() if number == ignored else state)
    return states[-1]


def gradients(function: Any, leaves: tuple[Tensor, ...], ways: list[int], ignored: int | None) -> tuple[Tensor, ...]:
    out = function(*leaves, ways, ignored)
    upstream = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return out.detach(), *torch.autograd.grad(out, leaves, upstream)


WAYS = [[1, 1, 1], [1, 3, 1, 3], [1] * 12]


@pytest.mark.parametrize("ignored", [None, 1])
@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("ways", WAYS, ids=len)
def test_formula(ways: list[int], channels: bool, ignored: int | None) -> None:
    given = leaves(ways, channels, torch.float64)
    wanted = gradients(written_out, given, ways, ignored)
    torch.testing.assert_close(gradients(chain, given, ways, ignored), wanted)


@pytest.mark.slow
@starts_interpreter
def test_in_the_interpreter(tmp_path: Path) -> None:
    interpret(f"{__file__}::TestKernels", tmp_path)


class TestKernels:
    __test__ = INTERPRETED

    @pytest.mark.parametrize("ignored", [None, 4])
    @pytest.mark.parametrize("channels", [False, True])
    @pytest.mark.parametrize("ways", [*WAYS, [1] * 10], ids=len)
    def test_formula(self, ways: list[int], channels: bool, ignored: int | None) -> None:
        """Of one way and 9 reads on, they begin in blocks of four."""
        assert ScoredTable(*leaves(ways, channels, torch.float32)[1:], ways).blocks.block == (
            4 if len(ways) > 9 else len(ways) + 1
        )
        wanted = gradients(written_out, leaves(ways, channels, torch.float64), ways, ignored)
        found = gradients(chain, leaves(ways, channels, torch.float32), ways, ignored)
        for got, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(got.double(), want.double(), rtol=1e-4, atol=1e-5)

    def test_second_derivatives(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def second() -> tuple[Tensor, ...]:
            given = leaves([1] * 10, True, torch.float32)
            first = torch.autograd.grad(chain(*given, [1] * 10).sum(), given, create_graph=True)
            return torch.autograd.grad(sum(g.square().sum() for g in first), given)

        found = second()
        monkeypatch.setattr(operators, "SWITCHED_ON", False)
        monkeypatch.setattr(scored, "left_to_autograd", lambda x, sources: True)
        torch.testing.assert_close(found, second(), rtol=1e-3, atol=1e-4)
