"""Reads that attend over all states: what the tests of topologies do not reach."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from interpreter import INTERPRETED, interpret, starts_interpreter
from torch import Tensor

from rewire.kernels import operators, switch
from rewire.kernels.cpu import plain
from rewire.mixes import again, claimed
from rewire.mixes.attended import AttendedTable
from rewire.mixes.mix import softmax
from rewire.topologies.base import materialize

WIDTH, READS = 6, 5


def chain(
    x: Tensor,
    queries: Tensor,
    scaled: bool,
    in_place: bool = False,
    ignored: int | None = None,
    block: int | None = None,
    group: int = 1,
) -> Tensor:
    """The last of reads in turn, each of whose branches starts with a function that may write to what it reads.

    In groups, their branches are summed.
    """
    table = AttendedTable(queries, scaled, block, group)
    history, state = table.history(), x
    for number in range(len(queries) + 1):
        history = history.read(number + 1, state)
        state = history.newest
        of_read = history.mix(table[number + 1])
        value = materialize(of_read)
        branch = torch.sin_(value) if in_place and number else torch.sin(value)
        branch = branch.detach() if number == ignored else branch * 2
        history = history.kept
        state = state + branch if number % group else branch
    return state


def gradients(x: Tensor, queries: Tensor, scaled: bool, **options: Any) -> tuple[Tensor, ...]:
    upstream = torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x)
    out = chain(x, queries, scaled, **options)
    return out.detach(), *torch.autograd.grad(out, (x, queries), upstream)


def leaves(reads: int = READS, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    x, queries = torch.randn(2, 3, WIDTH), torch.randn(reads, WIDTH)
    return x.to(dtype).requires_grad_(), queries.requires_grad_()


@pytest.fixture
def left_to_autograd(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(claimed, "left_to_autograd", lambda x, sources, static: True)
    return monkeypatch


@pytest.mark.each_once
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("group", [1, 2, 3, 10])
@pytest.mark.parametrize("options", [{}, {"in_place": True}, {"ignored": 2}, {"ignored": 4, "in_place": True}], ids=str)
def test_gradients_are_those_of_autograd(
    options: dict[str, Any], group: int, scaled: bool, left_to_autograd: pytest.MonkeyPatch
) -> None:
    """Also where the value was written to, which backward wants, and where one of the reads has no gradient."""
    wanted = gradients(*leaves(), scaled, ignored=options.get("ignored"), group=group)
    left_to_autograd.undo()
    torch.testing.assert_close(gradients(*leaves(), scaled, group=group, **options), wanted)


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
    calls.clear()
    gradients(*leaves(), True, group=3)  # those of a group come together, and four reads have one state more
    assert sorted(calls) == [1, 1, 1, 1, 2, 3]


def test_second_derivatives_of_a_value_that_was_written_to() -> None:
    """Where it is not made again its own gradient is no longer known: autograd says so."""

    def second(in_place: bool) -> tuple[Tensor, ...]:
        x, queries = leaves()
        total = chain(x, queries, True, in_place=in_place).sum()
        of_both = torch.autograd.grad(total, (x, queries), create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in of_both), (x, queries))

    assert all(map(torch.equal, second(True), second(False)))
    kept = mock.patch.object(again, "saved_tensor_hooks", return_value=(None, None))
    with kept, pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second(True)


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


@pytest.mark.parametrize("block", [1, 2, 3])
def test_blocks_of_states_need_no_kernels(block: int, left_to_autograd: pytest.MonkeyPatch) -> None:
    """Gradients of all later reads come once for each block, those of the others by state."""
    wanted = gradients(*leaves(), True)
    left_to_autograd.undo()
    torch.testing.assert_close(gradients(*leaves(), True, block=block), wanted)


def test_equal_scores_weigh_exactly_one() -> None:
    for count in range(2, 130):
        shares, (largest, divisor) = softmax(torch.full((count, 3), 1.7), True)
        assert (shares == 1).all() and (divisor == 1).all() and (largest == torch.tensor(1.7)).all()


def test_large_scores_neither_overflow_nor_vanish() -> None:
    x, queries = leaves()
    for found in gradients(x, (1e4 * queries).detach().requires_grad_(), False):
        assert found.isfinite().all()


@pytest.mark.slow
@starts_interpreter
def test_in_the_interpreter(tmp_path: Path) -> None:
    interpret(f"{__file__}::TestKernels", tmp_path)


class TestKernels:
    """Reads begun in blocks, and states gathered in blocks, against all of it in float64 by autograd."""

    __test__ = INTERPRETED

    @pytest.mark.parametrize("ignored", [None, 4])
    @pytest.mark.parametrize(
        "options", [*({"block": n} for n in (None, 1, 2, 3, 100)), *({"group": n} for n in (2, 5))], ids=str
    )
    @pytest.mark.parametrize("reads", [1, 2, 8, 11])
    def test_blocks(
        self, reads: int, options: dict[str, Any], ignored: int | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(claimed, "left_to_autograd", lambda x, sources, *_: x.dtype == torch.float64)
        wanted = gradients(*leaves(reads), False, ignored=ignored, group=options.get("group", 1))
        found = gradients(*leaves(reads, torch.float32), False, ignored=ignored, **options)
        for got, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(got.double(), want.double(), rtol=1e-4, atol=5e-5)

    def test_blocks_of_bfloat16(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Sums begin in float32: what is read is rounded once, as without blocks."""
        sources = [x.bfloat16() for x in torch.randn(9, 2, 3, WIDTH, generator=torch.Generator().manual_seed(1))]
        queries = leaves(8)[1].detach()
        for number in (2, 5, 8):
            tables = [AttendedTable(queries, False, block) for block in (2, 100)]
            in_blocks, one_by_one = (
                materialize(table.history().after(sources[: number + 1]).mix(table[number + 1])) for table in tables
            )
            assert in_blocks.dtype == torch.bfloat16
            torch.testing.assert_close(in_blocks, one_by_one, rtol=2**-8, atol=0)

    def test_equal_scores_weigh_exactly_one_in_blocks(self) -> None:
        """The preserving start is the plain sum, in its order."""
        states = torch.randn(12, 2, 3, WIDTH, generator=torch.Generator().manual_seed(1)).unbind()
        table, total = AttendedTable(torch.zeros(11, WIDTH), True), torch.zeros(2, 3, WIDTH)
        history = table.history()
        assert table.blocks.block == 4
        for t, x in enumerate(states, start=1):
            history, total = history.read(t, x), total + x
            assert torch.equal(materialize(history.mix(table[t])), total)

    def test_second_derivatives(self) -> None:
        def second() -> tuple[Tensor, ...]:
            x, queries = leaves(9, torch.float32)
            first = torch.autograd.grad(chain(x, queries, False).sum(), (x, queries), create_graph=True)
            return torch.autograd.grad(sum(g.square().sum() for g in first), (x, queries))

        found = second()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(switch, "ON", False)
            wanted = second()
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)

    @pytest.mark.parametrize("count", [1, 5, 8, 70])
    @pytest.mark.parametrize("begun", [False, True])
    def test_softmax_of_any_number(self, count: int, begun: bool) -> None:
        """Kernels are for powers of two; those of many have fewer rows."""
        earlier, *scores = torch.randn(1 + count, 150, generator=torch.Generator().manual_seed(4)).unbind()
        before = torch.stack([earlier, torch.full_like(earlier, 2.0)]) if begun else None  # two of that score
        shares, (largest, divisor) = operators.softmax(scores, before, count)
        seen = torch.stack([*scores, earlier, earlier] if begun else scores).double()
        wanted = count * seen.softmax(0)
        torch.testing.assert_close(shares[begun:].double(), wanted[:count], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(largest, seen.amax(0).float())
        total = (seen - seen.amax(0)).exp().sum(0) / count
        torch.testing.assert_close(divisor.double(), total, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("count", [3, 18])
    def test_rows_of_several_programs(self, count: int) -> None:
        """Each program has a part of the columns, and so of the products; kernels are chained for many reads."""
        generator = torch.Generator().manual_seed(3)
        states, grads = (torch.randn(n, 5, 300, generator=generator).unbind() for n in (2, count))
        scores = torch.randn(2, 5, count, generator=generator).unbind()
        tallies = torch.rand(count, 3, 5, generator=generator).add(0.5).unbind()
        *dx, of_scores = operators.gather_attended(grads, states, scores, tallies, [])
        largest, divisor, mean = torch.stack(tallies, -1).double().unsqueeze(-2)
        shares = (torch.stack(scores, -2).double() - largest).exp() / divisor  # [5, 2, count]
        xs, gs = torch.stack(states, -2).double(), torch.stack(grads, -2).double()
        torch.testing.assert_close(torch.stack(dx, -2).double(), shares @ gs, rtol=1e-5, atol=1e-4)
        wanted = shares * (xs @ gs.mT - mean)
        torch.testing.assert_close(of_scores.double(), wanted, rtol=1e-5, atol=1e-3)
