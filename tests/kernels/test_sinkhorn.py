"""Sinkhorn-Knopp by kernels, against the formulas in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from interpreter import INTERPRETED, interpret, starts_interpreter

from rewire.kernels import native, sinkhorn_cpu
from rewire.topologies.manifolds import _gradient, sinkhorn, sinkhorn_steps


@pytest.mark.slow
@starts_interpreter
def test_in_the_interpreter(tmp_path: Path) -> None:
    interpret(f"{__file__}::TestByKernels", tmp_path)


class TestByKernels:
    __test__ = INTERPRETED

    @pytest.mark.parametrize("n", [2, 3, 4, 8])
    @pytest.mark.parametrize("iterations", [1, 2, 20])
    @pytest.mark.parametrize("eps", [0.0, 1e-6])
    @pytest.mark.parametrize("scale", [1.0, 40.0])
    def test_matrices_of_any_size(self, n: int, iterations: int, eps: float, scale: float) -> None:
        logits = (scale * torch.randn(n * n, 3, 11)).movedim(0, -1).unflatten(-1, (n, n)).requires_grad_()  # strided
        exact = logits.detach().double()
        up = torch.randn(3, 11, n, n)
        result = sinkhorn(logits, iterations, eps)
        (found,) = torch.autograd.grad(result, logits, up)
        torch.testing.assert_close(result.double(), sinkhorn_steps(exact, iterations, eps), rtol=1e-4, atol=1e-6)
        want = _gradient(up.double(), exact, iterations, eps)
        assert float((found - want).norm() / want.norm()) <= 2e-6 * (1 + scale)

    def test_gradients_of_gradients(self) -> None:
        logits = torch.randn(5, 4, 4, requires_grad=True)
        exact = logits.detach().double().requires_grad_()

        def penalty(x: torch.Tensor) -> torch.Tensor:
            (first,) = torch.autograd.grad(sinkhorn(x, 7, 0.0).square().sum(), x, create_graph=True)
            return torch.autograd.grad(first.square().sum(), x)[0]

        torch.testing.assert_close(penalty(logits).double(), penalty(exact), rtol=1e-3, atol=1e-5)

    def test_no_matrices(self) -> None:
        assert sinkhorn(torch.empty(0, 4, 4), 3, 0.0).shape == (0, 4, 4)


class TestOnACPU:
    __test__ = not INTERPRETED

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("n", [1, 2, 4, 7])
    @pytest.mark.parametrize("iterations", [1, 2, 20])
    @pytest.mark.parametrize("eps", [0.0, 1e-6])
    @pytest.mark.parametrize("scale", [1.0, 40.0])
    def test_the_compiled_kernel(
        self, dtype: torch.dtype, n: int, iterations: int, eps: float, scale: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(native, "GRAIN", 8)  # both threads have something to do
        logits = (scale * torch.randn(n * n, 3, 11, dtype=dtype)).movedim(0, -1).unflatten(-1, (n, n))  # strided
        exact, up = logits.double(), torch.randn(3, 11, n, n, dtype=dtype).mT
        assert sinkhorn_cpu.fits(logits) and not sinkhorn_cpu.fits(logits.half())
        found = sinkhorn_cpu.forward(logits, iterations, eps), sinkhorn_cpu.backward(up, logits, iterations, eps)
        slack = 1e-12 if dtype == torch.float64 else 1e-5
        torch.testing.assert_close(found[0].double(), sinkhorn_steps(exact, iterations, eps), rtol=slack, atol=slack)
        want = _gradient(up.double(), exact, iterations, eps)
        assert float((found[1] - want).norm()) <= slack * (1 + scale) * (1 + float(want.norm()))
        zero = torch._efficientzerotensor(*up.shape, dtype=dtype)
        assert not sinkhorn_cpu.backward(zero, logits, iterations, eps).any()
