"""A function beside its twin, the same formula in float64: results, and the gradients of all tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

F32, F64 = torch.float32, torch.float64
TOLERANCES = {F64: 1e-12, F32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def drawn(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.randn(shape).to(dtype).requires_grad_()


def leaves_of(value: Any) -> list[Tensor]:
    return [x for x in torch.utils._pytree.tree_leaves(value) if isinstance(x, Tensor)]


def precise_copy(value: Any) -> Any:
    return torch.utils._pytree.tree_map_only(Tensor, lambda x: x.detach().to(F64).requires_grad_(), value)


def compare(function: Any, twin: Any, arguments: tuple[Any, ...], tolerance: float) -> Tensor:
    """Results and the gradients of all tensors; returns the result."""
    got, exact = function(*arguments), precise_copy(arguments)
    want = twin(*exact)
    up = torch.randn(want.shape).to(got.dtype)
    found = torch.autograd.grad(got, leaves_of(arguments), up)
    wanted = torch.autograd.grad(want, leaves_of(exact), up.double())
    for a, b in zip((got, *found), (want, *wanted), strict=True):
        assert distance(a, b) <= tolerance
    return got


def distance(a: Tensor, b: Tensor) -> float:
    """Relative to the norm of ``b``."""
    return float((a.double() - b.double()).norm().detach() / b.norm().detach())


def penalty_gradients(result: Tensor, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    """The gradients of ``|d result.sum() / d leaves|^2``."""
    first = torch.autograd.grad(result.sum(), leaves, create_graph=True)
    return torch.autograd.grad(sum((g.square().sum() for g in first), torch.zeros(())), leaves)
