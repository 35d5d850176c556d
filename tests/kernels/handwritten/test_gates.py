"""Gates of hyper-connections by kernels, against the formulas in float64."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreter import INTERPRETED, interpret, starts_interpreter
from torch import Tensor

from rewire.mixes import gating
from rewire.mixes.gating import Gating, read_off_gates
from rewire.topologies.manifolds import sinkhorn_steps

F64 = torch.float64


def formula_of(how: Gating) -> Any:
    """By the equations of the papers, of products, static values and scales."""
    n = how.streams

    def of_tokens(s: Tensor, b: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        values = b + a * torch.tanh(s)
        return values[..., :1], torch.cat([values[..., 1 : n + 1], values[..., n + 1 :].mT], -2)

    def constrained(s: Tensor, b: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        pre, post, res = (b + a * s).split([n, n, n * n], -1)
        carry = sinkhorn_steps(res.unflatten(-1, (n, n)), how.iterations, how.eps).mT
        write = how.magnitude * torch.sigmoid(post)
        return (torch.sigmoid(pre) + how.eps).unsqueeze(-1), torch.cat([carry, write.unsqueeze(-2)], -2)

    return constrained if how.iterations else of_tokens


def drawn(how: Gating, spread: float, *lead: int) -> tuple[Tensor, Tensor, Tensor]:
    n = how.streams
    rows, columns = ((), 2 * n + n * n) if how.iterations else ((n,), n + 2)
    products = spread * torch.randn(*lead, *rows, columns)
    scale = torch.randn(3, columns)[1]  # which starts anywhere
    return products.requires_grad_(), torch.randn(*rows, columns).requires_grad_(), scale.requires_grad_()


def gates_of(how: Gating, products: Tensor, static: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Of streams off which exactly these products are read: the weight is an identity, and there is no norm."""
    streams = products.unflatten(-1, (how.streams, -1)) if how.iterations else products
    weight = torch.eye(products.shape[-1])
    read, write, *_ = read_off_gates(how, formula_of(how), streams, weight, static, scale, None)
    return read, write


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm().detach() / b.norm().detach())


@pytest.mark.slow
@starts_interpreter
def test_in_the_interpreter(tmp_path: Path) -> None:
    interpret(f"{__file__}::TestByKernels", tmp_path)


@pytest.mark.skipif(INTERPRETED, reason="kernels take its place")
def test_without_kernels_it_is_the_formula() -> None:
    how = Gating(3)
    given = drawn(how, 1.0, 2)
    for found, want in zip(gates_of(how, *given), formula_of(how)(*given), strict=True):
        assert torch.equal(found, want)


ALL = [*(Gating(n) for n in (1, 2, 3, 4, 8))]
ALL += [Gating(n, iterations, eps, 2.0) for n in (2, 3, 4, 8) for iterations, eps in ((1, 0.0), (2, 1e-6), (20, 1e-6))]


class TestByKernels:
    __test__ = INTERPRETED

    @pytest.mark.parametrize(("how", "spread"), [*zip(ALL, itertools.cycle([1e-3, 1.0, 40.0]))], ids=str)
    def test_values_and_gradients(self, how: Gating, spread: float) -> None:
        given = drawn(how, spread, 3, 29)
        exact = [x.detach().double().requires_grad_() for x in given]
        found, want = gates_of(how, *given), formula_of(how)(*exact)
        assert type(found[0].grad_fn).__name__ == "_GatesBackward"
        for a, b in zip(found, want, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-6)
        up = [torch.randn(x.shape) for x in want]
        grads = torch.autograd.grad(found, given, up)
        wanted = torch.autograd.grad(want, exact, [x.double() for x in up])
        for a, b in zip(grads, wanted, strict=True):
            assert distance(a, b) <= 4e-6 * (1 + spread)

    @pytest.mark.parametrize("how", [Gating(4), Gating(4, 20, 1e-6, 1.5)], ids=str)
    def test_only_one_of_both_is_used(self, how: Gating) -> None:
        given = drawn(how, 1.0, 70)
        exact = [x.detach().double().requires_grad_() for x in given]
        for which in (0, 1):
            found, want = gates_of(how, *given)[which], formula_of(how)(*exact)[which]
            up = torch.randn(want.shape)
            for a, b in zip(
                torch.autograd.grad(found, given, up), torch.autograd.grad(want, exact, up.double()), strict=True
            ):
                assert distance(a, b) <= 1e-5

    @pytest.mark.parametrize("how", [Gating(3), Gating(3, 5, 0.0, 2.0)], ids=str)
    def test_saved_tensors_of_any_strides(self, how: Gating) -> None:
        """And a single token, and none."""
        products, static, scale = drawn(how, 1.0, 2, 5)
        want = gates_of(how, products, static, scale)
        up = [torch.randn(x.shape) for x in want]
        wanted = torch.autograd.grad(want, products, up)
        for again in (Tensor.contiguous, lambda t: t.repeat_interleave(2, -1)[..., ::2]):
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, again):
                found = gates_of(how, products, static, scale)
            for a, b in zip(found, want, strict=True):
                torch.testing.assert_close(a, b)
            torch.testing.assert_close(torch.autograd.grad(found, products, up, retain_graph=True), wanted)
        for few in (products[0, 0], products[:0]):
            found = gates_of(how, few, static, scale)
            (got,) = torch.autograd.grad(sum(x.sum() for x in found), static)
            assert found[0].shape == (*few.shape[: len(found[0].shape) - 2], 3, 1) and got.shape == static.shape

    @pytest.mark.parametrize("how", [Gating(3), Gating(3, 5, 0.0, 2.0)], ids=str)
    def test_gradients_of_gradients(self, how: Gating) -> None:
        def penalty(made: tuple[Tensor, Tensor], given: Any) -> tuple[Tensor, ...]:
            first = torch.autograd.grad(sum(x.square().sum() for x in made), given, create_graph=True)
            return torch.autograd.grad(sum(x.square().sum() for x in first), given)

        given = drawn(how, 1.0, 5)
        exact = [x.detach().double().requires_grad_() for x in given]
        found = penalty(gates_of(how, *given), given)
        for a, b in zip(found, penalty(formula_of(how)(*exact), exact), strict=True):
            assert distance(a, b) <= 1e-4

    def test_others_are_left_to_torch(self) -> None:
        for how in (Gating(gating.MOST + 1), Gating(2, gating.MOST_ITERATIONS + 1, 0.0, 2.0)):
            given = drawn(how, 1.0, 3)
            for a, b in zip(gates_of(how, *given), formula_of(how)(*given), strict=True):
                torch.testing.assert_close(a, b)  # the formula's rounding depends on the processor
                assert type(a.grad_fn).__name__ != "_GatesBackward"
