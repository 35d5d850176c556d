"""Reads that attend over all states: what the tests of topologies do not reach."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rewire.kernels import attended, plain, scored
from rewire.kernels.attended import AttendedHistory, AttendedTable
from rewire.kernels.mix import softmax
from rewire.kernels.tokens import rms_norm
from rewire.topologies.base import materialize

WIDTH, READS = 6, 5


def chain(x: Tensor, queries: Tensor, scaled: bool, in_place: bool = False, ignored: int | None = None) -> Tensor:
    """The last of reads in turn, each of whose branches starts with a function that may write to what it reads."""
    history, state = AttendedHistory(AttendedTable(queries, scaled)), x
    for number in range(len(queries) + 1):
        history = history.push(state)
        value = materialize(history.read(number)[0])
        state = torch.sin_(value) if in_place and number else torch.sin(value)
        state = state.detach() if number == ignored else state * 2
    return state


def gradients(x: Tensor, queries: Tensor, scaled: bool, **options: Any) -> tuple[Tensor, ...]:
    upstream = torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x)
    out = chain(x, queries, scaled, **options)
    return out.detach(), *torch.autograd.grad(out, (x, queries), upstream)


def leaves() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    x, queries = torch.randn(2, 3, WIDTH).double(), torch.randn(READS, WIDTH)
    return x.requires_grad_(), queries.requires_grad_()


@pytest.fixture
def left_to_autograd(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(scored, "left_to_autograd", lambda x, sources: True)
    return monkeypatch


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("options", [{}, {"in_place": True}, {"ignored": 2}, {"ignored": 4, "in_place": True}], ids=str)
def test_gradients_are_those_of_autograd(
    options: dict[str, Any], scaled: bool, left_to_autograd: pytest.MonkeyPatch
) -> None:
    """Also where the value was written to, which backward wants, and where one of the reads has no gradient."""
    wanted = gradients(*leaves(), scaled, ignored=options.get("ignored"))
    left_to_autograd.undo()
    torch.testing.assert_close(gradients(*leaves(), scaled, **options), wanted)


def test_backward_reads_each_state_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    gather = plain.combine_with_token_dots

    def counted(grads: Any, *rest: Any) -> Any:
        calls.append(len(grads))
        return gather(grads, *rest)

    monkeypatch.setattr(plain, "combine_with_token_dots", counted)
    monkeypatch.setattr(plain, "combine_backward", None)
    gradients(*leaves(), True)
    assert sorted(calls) == [1, 2, 3, 4, 5, 5]


def test_a_value_that_was_written_to_has_no_second_derivative() -> None:
    """Its own gradient is no longer known: autograd says so."""
    x, queries = leaves()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(chain(x, queries, True, in_place=True).sum(), (x, queries), create_graph=True)


def test_third_derivatives(left_to_autograd: pytest.MonkeyPatch) -> None:
    def third() -> tuple[Tensor, ...]:
        x, queries = (leaf.detach().double().requires_grad_() for leaf in leaves())
        total = chain(x, queries, True).sum()
        for _ in range(2):
            total = sum(g.square().sum() for g in torch.autograd.grad(total, (x, queries), create_graph=True))
        return torch.autograd.grad(total, (x, queries))

    wanted = third()
    left_to_autograd.undo()
    torch.testing.assert_close(third(), wanted)


def test_scores_by_themselves_can_be_differentiated_twice() -> None:
    """As where the gradient of a gradient comes back for them, and for no read."""

    def second(scores_of: Any) -> tuple[Tensor, ...]:
        x, queries = (leaf.detach().double().requires_grad_() for leaf in leaves())
        first = torch.autograd.grad(scores_of(x, queries).sin().sum(), (x, queries), create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), (x, queries))

    wanted = second(lambda x, queries: rms_norm(x) @ queries.T)
    torch.testing.assert_close(second(lambda x, queries: attended._Claims.apply(queries.T, x)[-1]), wanted)


def test_equal_scores_weigh_exactly_one() -> None:
    for count in range(2, 130):
        shares, (largest, divisor) = softmax(torch.full((count, 3), 1.7), True)
        assert (shares == 1).all() and (divisor == 1).all() and (largest == torch.tensor(1.7)).all()


def test_large_scores_neither_overflow_nor_vanish() -> None:
    x, queries = leaves()
    for found in gradients(x, (1e4 * queries).detach().requires_grad_(), False):
        assert found.isfinite().all()
