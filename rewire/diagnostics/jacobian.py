"""chi, the mean squared singular value of a Jacobian."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

#: Outputs of a function with fewer numbers than this get the exact Jacobian.
EXACT_BELOW = 513


@dataclasses.dataclass(frozen=True)
class Chi:
    """Mean squared singular value of a Jacobian.

    Attributes:
        value: exact, or an unbiased estimate.
        error: standard error of the estimate; 0 if it is exact, nan with a single probe.
        probes: random probes that it was estimated with; 0 if it is exact.
    """

    value: float
    error: float
    probes: int

    def __str__(self) -> str:
        return f"{self.value:.3g}" + (f" ± {self.error:.1g}" if self.probes > 1 else "")


def mean_squared_singular_value(
    function: Callable[[Tensor], Tensor], x: Tensor, probes: int = 16, seed: int = 0
) -> Chi:
    """``chi = ||J||_F^2 / min(m, n)`` for the Jacobian J [m, n] of ``function`` at ``x``.

    chi > 1: gradients grow on their way back; chi < 1: they vanish; 1 is the critical line (arXiv 2503.04626, Section
    2, after arXiv 1711.04735). With m <= 512 outputs, J is computed row by row. Else it is estimated: for v [m] of
    independent signs, ``E ||J^T v||^2 = ||J||_F^2`` (Hutchinson's estimator), one backward pass for each v. Rows, not
    columns: not all operations have forward-mode derivatives.

    Args:
        function: from a tensor to one tensor, differentiable.
        x: where; n numbers in any shape, floating dtype.
        probes: random vectors v, 1 or more.
        seed: of the probes, which are the same on all devices.

    Raises:
        ValueError: fewer than one probe.
    """
    if probes < 1:
        raise ValueError(f"probes={probes}: it takes at least one.")
    # Not torch.func.vjp, which takes neither autograd functions of the old style nor hooks that checkpointing sets.
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        y = function(x.clone())  # which it may write to
        exact = y.numel() < EXACT_BELOW
        directions = _rows(y) if exact else _signs(y, probes, seed)
        squares = [float(_square(torch.autograd.grad(y, x, v, retain_graph=True)[0])) for v in directions]
    values = min(x.numel(), y.numel())
    if exact:
        return Chi(sum(squares) / values, 0.0, 0)
    error = statistics.stdev(squares) / len(squares) ** 0.5 / values if probes > 1 else float("nan")
    return Chi(statistics.fmean(squares) / values, error, probes)


def _square(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32)).square().sum()


def _rows(y: Tensor) -> Iterator[Tensor]:
    for number in range(y.numel()):
        one_hot = torch.zeros(y.numel(), dtype=y.dtype, device=y.device)
        one_hot[number] = 1
        yield one_hot.view(y.shape)


def _signs(y: Tensor, probes: int, seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(probes):
        yield (2 * torch.randint(2, y.shape, generator=generator) - 1).to(y)
