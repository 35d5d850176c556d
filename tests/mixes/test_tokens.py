from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rewire.mixes.tokens import project, project_normed, rms_norm


@pytest.mark.parametrize("shape", [(6,), (5, 6), (2, 5, 6), (0, 6)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_project(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape).to(dtype).requires_grad_()
    weight = torch.randn(6, 3, requires_grad=True)
    got = project(x, weight)
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    want = exact[0] @ exact[1]
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    upstream = torch.randn_like(got)
    grads = torch.autograd.grad(got, (x, weight), upstream)
    wanted = torch.autograd.grad(want, exact, upstream.double())
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
    for grad, expected, like in zip(grads, wanted, (x, weight), strict=True):
        assert grad.dtype == like.dtype and grad.shape == like.shape
        torch.testing.assert_close(grad.double(), expected, rtol=tolerance, atol=tolerance)


def test_second_derivatives() -> None:
    inputs = [torch.randn(4, 6, dtype=torch.float64, requires_grad=True), torch.randn(6, 3, dtype=torch.float64)]
    assert torch.autograd.gradgradcheck(project, [t.requires_grad_() for t in inputs])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_project_normed(dtype: torch.dtype) -> None:
    x, weight = torch.randn(2, 5, 6).to(dtype).requires_grad_(), torch.randn(6, 3, requires_grad=True)
    got, want = project_normed(x, weight, 0.1), project(rms_norm(x, 0.1), weight)
    torch.testing.assert_close(got, want)
    upstream, tolerance = torch.randn_like(got), 1e-2 if dtype == torch.bfloat16 else 1e-5
    found, wanted = (torch.autograd.grad(out, (x, weight), upstream) for out in (got, want))
    for grad, expected in zip(found, wanted, strict=True):
        assert grad.dtype == expected.dtype
        torch.testing.assert_close(grad, expected, rtol=tolerance, atol=tolerance)


def test_derivatives_of_project_normed() -> None:
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((4, 6), (6, 3))]
    assert torch.autograd.gradcheck(project_normed, inputs) and torch.autograd.gradgradcheck(project_normed, inputs)
    x = torch.zeros(2, 6, requires_grad=True)
    assert torch.autograd.grad(project_normed(x, torch.ones(6, 2)).sum(), x)[0].isfinite().all()


def test_project_normed_keeps_no_copy() -> None:
    x, weight = torch.randn(5, 64).bfloat16().requires_grad_(), torch.randn(64, 2, requires_grad=True)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        scores = project_normed(x, weight)
    assert [t.data_ptr() for t in kept[:2]] == [x.data_ptr(), weight.data_ptr()]
    assert [t.shape for t in kept[2:]] == [scores.shape, (5, 1)]  # and a number for each row


def test_project_is_float32_under_autocast_and_keeps_no_copy() -> None:
    x, weight = torch.randn(5, 64).bfloat16().requires_grad_(), torch.randn(64, 2, requires_grad=True)
    kept: list[Tensor] = []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t),
        torch.autocast("cpu", dtype=torch.bfloat16),
    ):
        got = project(x, weight)
    assert torch.equal(got, x.float() @ weight)
    assert [t.data_ptr() for t in kept] == [x.data_ptr(), weight.data_ptr()]


@pytest.mark.parametrize("function", [project, project_normed])
def test_project_compiles_in_one_graph(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    x, weight = torch.randn(5, 6).bfloat16().requires_grad_(), torch.randn(6, 2, requires_grad=True)
    expected = torch.autograd.grad(function(x, weight).sum(), (x, weight))
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for got, want in zip(torch.autograd.grad(compiled(x, weight).sum(), (x, weight)), expected, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rms_norm(dtype: torch.dtype) -> None:
    x = torch.randn(2, 5, 6).to(dtype)
    got = rms_norm(x)
    assert got.dtype == torch.promote_types(dtype, torch.float32)
    want = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)
    zero = torch.zeros(2, 6, requires_grad=True)
    (grad,) = torch.autograd.grad(rms_norm(zero).sum(), zero)
    assert torch.equal(rms_norm(zero), torch.zeros(2, 6)) and grad.isfinite().all()
