from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreter import INTERPRETED, interpret, starts_interpreter
from torch import Tensor, nn
from twins import F32, F64, TOLERANCES, compare, distance, drawn, leaves_of, penalty_gradients, precise_copy

from rewire.kernels import switch
from rewire.kernels.cpu import native
from rewire.kernels.sums.spec import MAX_OUTPUTS
from rewire.mixes.claimed import Table
from rewire.mixes.mix import pending_mix
from rewire.mixes.norms import mark
from rewire.mixes.several import mixes
from rewire.topologies.base import materialize

M, N, WIDTH = 3, 4, 9
WEIGHTED = [("scalar", False), ("scalar", True), ("channel", False), ("channel", True), ("none", True)]


def twin_of_mixes(sources: Sequence[Tensor], weights: Tensor | None, scores: Tensor | None) -> Tensor:
    """[M, ..., D]."""
    stacked, total = torch.stack(list(sources)), torch.zeros(())
    if weights is not None:
        total = total + torch.einsum("mnd,n...d->m...d" if weights.dim() == 3 else "mn,n...d->m...d", weights, stacked)
    return total if scores is None else total + torch.einsum("...mn,n...d->m...d", scores, stacked)


def arguments_of_mixes(kind: str, scored: bool, dtype: torch.dtype, m: int = M, n: int = N) -> tuple[Any, ...]:
    precise = torch.promote_types(dtype, F32)
    shape = {"scalar": (m, n), "channel": (m, n, WIDTH)}
    weights = None if kind == "none" else drawn(*shape[kind], dtype=precise)
    scores = drawn(2, 3, m, n, dtype=precise) if scored else None
    return [drawn(2, 3, WIDTH, dtype=dtype) for _ in range(n)], weights, scores


def stacked_mixes(*arguments: Any) -> Tensor:
    return torch.stack(mixes(*arguments)[0])


class Cases:
    """Run as they are, and again by kernels."""

    dtypes: tuple[torch.dtype, ...]

    @pytest.mark.parametrize(("kind", "scored"), WEIGHTED)
    def test_mixes(self, kind: str, scored: bool) -> None:
        for dtype in self.dtypes:
            got = compare(stacked_mixes, twin_of_mixes, arguments_of_mixes(kind, scored, dtype), TOLERANCES[dtype])
            assert got.dtype == dtype

    @pytest.mark.parametrize("outputs", [1, 2, MAX_OUTPUTS, MAX_OUTPUTS + 1])
    def test_any_number_of_mixes(self, outputs: int) -> None:
        compare(stacked_mixes, twin_of_mixes, arguments_of_mixes("scalar", True, F32, outputs, 2), 1e-5)

    def test_shapes_that_broadcast(self) -> None:
        first, second, weights = drawn(2, 3, WIDTH), drawn(1, 3, WIDTH), drawn(M, 2)

        def broadcast(*given: Tensor) -> Tensor:
            *sources, w = given
            return twin_of_mixes(torch.broadcast_tensors(*sources), w, None)

        def several(*given: Tensor) -> Tensor:
            return stacked_mixes(given[:2], given[2])

        compare(several, broadcast, (first, second, weights), 1e-5)

    def test_only_some_results_are_used(self) -> None:
        arguments = arguments_of_mixes("scalar", True, F32)
        compare(lambda *a: mixes(*a)[0][1], lambda *a: twin_of_mixes(*a)[1], arguments, 1e-5)

    def test_only_some_inputs_need_gradients(self) -> None:
        sources, weights, scores = arguments_of_mixes("scalar", True, F32)
        frozen = [sources[0].detach(), sources[1], *(x.detach() for x in sources[2:])]
        up = torch.randn(M, 2, 3, WIDTH)
        (want,) = torch.autograd.grad(stacked_mixes(sources, weights, scores), sources[1], up)
        (got,) = torch.autograd.grad(stacked_mixes(frozen, weights.detach(), scores.detach()), sources[1], up)
        assert torch.equal(got, want)

    @pytest.mark.parametrize(("kind", "scored"), [("scalar", True), ("channel", False)])
    def test_second_derivatives(self, kind: str, scored: bool) -> None:
        """Of a function of the first ones, against float64."""
        arguments = arguments_of_mixes(kind, scored, F32)
        exact = precise_copy(arguments)
        found = penalty_gradients(stacked_mixes(*arguments).sin(), leaves_of(arguments))
        wanted = penalty_gradients(twin_of_mixes(*exact).sin(), leaves_of(exact))
        for a, b in zip(found, wanted, strict=True):
            assert distance(a, b) <= 1e-4


class TestPlain(Cases):
    __test__ = not INTERPRETED
    dtypes = (F32, F64, torch.bfloat16, torch.float16)

    @pytest.mark.parametrize(("kind", "scored"), WEIGHTED)
    def test_gradients_of_gradients_of_mixes(self, kind: str, scored: bool) -> None:
        sources, weights, scores = arguments_of_mixes(kind, scored, F64, 2, 2)

        def function(*leaves: Tensor) -> Tensor:
            w, s = (None if kind == "none" else leaves[2]), (leaves[-1] if scored else None)
            return stacked_mixes(leaves[:2], w, s)

        leaves = leaves_of((sources, weights, scores))
        assert torch.autograd.gradcheck(function, leaves)
        assert torch.autograd.gradgradcheck(function, leaves)


class TestWithoutCompiler(Cases):
    __test__ = not INTERPRETED
    dtypes = (F32, F64)

    @pytest.fixture(autouse=True)
    def without(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(native, "knows", lambda x: False)


@pytest.mark.slow
@starts_interpreter
def test_in_the_interpreter(tmp_path: Path) -> None:
    interpret(f"{__file__}::TestByKernels", tmp_path)


class TestByKernels(Cases):
    __test__ = INTERPRETED
    dtypes = (F32, torch.bfloat16)

    __test__ = INTERPRETED
    dtypes = (F32, torch.bfloat16)

    def test_they_are_kernels(self) -> None:
        sources, weights, scores = arguments_of_mixes("scalar", True, F32)
        results, _ = mixes(sources, weights, scores)
        assert {type(y.grad_fn).__name__ for y in results} == {"_SeveralBackward"}
        assert results[0].grad_fn is results[1].grad_fn

    @pytest.mark.parametrize("norm", ["rms", "layer", "frozen", None])
    def test_second_derivatives_of_a_mix_and_its_norm(self, norm: str | None) -> None:
        module = nn.RMSNorm(WIDTH, eps=1e-2) if norm == "rms" else nn.LayerNorm(WIDTH, eps=1e-2)
        mark(module)
        module.requires_grad_(norm != "frozen")
        sources, weights, _ = arguments_of_mixes("scalar", False, F32)
        leaves = [*sources, weights, *(p for p in module.parameters() if p.requires_grad and norm)]

        def result() -> Tensor:
            total, after = pending_mix(sources, weights[0]).normed(module)
            return (total * after.sin()).sin() if norm else total.sin()

        by_kernels = penalty_gradients(result(), leaves)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(switch, "ON", False)
            plain = penalty_gradients(result(), leaves)
        for a, b in zip(by_kernels, plain, strict=True):
            assert distance(a, b) <= 1e-4

    @pytest.mark.parametrize("channels", [False, True])
    def test_second_derivatives_of_claims(self, channels: bool) -> None:
        """12 mixes: blocks of them begin, and blocks of states are gathered."""
        count = 12
        flat = (drawn(count * (count + 1) // 2, *([WIDTH] if channels else [])) * 0.3).detach().requires_grad_()
        x, branches = drawn(2, WIDTH), drawn(count, 2, WIDTH)

        def result() -> Tensor:
            table, state = Table(flat, count), x
            history = table.history()
            for t in range(1, count + 1):
                history = history.read(t, state)
                state = materialize(history.mix(table[t], added=(torch.tanh(state) * branches[t - 1],)))
            return state

        leaves = [flat, x, branches]
        assert Table(flat, count).blocks.block < count
        by_kernels = penalty_gradients(result(), leaves)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(switch, "ON", False)
            plain = penalty_gradients(result(), leaves)
        for a, b in zip(by_kernels, plain, strict=True):
            assert distance(a, b) <= 1e-4
