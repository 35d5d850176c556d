"""Sinkhorn-Knopp by its compiled loop, against the formulas in float64."""

from __future__ import annotations

import pytest
import torch
from interpreter import INTERPRETED

from rewire.kernels.cpu import native
from rewire.kernels.cpu import sinkhorn as sinkhorn_cpu
from rewire.topologies.manifolds import _gradient, sinkhorn_steps


class TestOnACPU:
    __test__ = not INTERPRETED

    @pytest.mark.each_once
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
