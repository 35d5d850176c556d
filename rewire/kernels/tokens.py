"""What input-dependent connection weights are computed with: in float32, whatever autocast says."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor


def outside_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """A region without autocast.

    Only where it is on: the meta device has none, and an empty region, as of a frozen topology, is one that
    torch.export cannot load again.
    """
    kind = device.type
    on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.autocast(kind, enabled=False) if on else contextlib.nullcontext()


def project(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight`` in float32 (float64 for float64), outside autocast.

    Args:
        x: [..., D], any floating dtype.
        weight: float32 [D, K].

    Returns:
        [..., K], float32 or float64.
    """
    with outside_autocast(x.device):
        return _Project.apply(x, weight)


class _Project(torch.autograd.Function):
    """Keeps ``x`` as it is for backward, and no float32 copy of it: every read projects every state."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        precision = torch.promote_types(x.dtype, weight.dtype)
        return x.to(precision) @ weight.to(precision)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        grad_x = (grad @ weight.to(grad.dtype).T).to(x.dtype)
        grad_weight = x.to(grad.dtype).reshape(-1, x.shape[-1]).T @ grad.reshape(-1, grad.shape[-1])
        return grad_x, grad_weight.to(weight.dtype)


def project_normed(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """``project(rms_norm(x, eps), weight)``."""
    with outside_autocast(x.device):
        return _ProjectNormed.apply(x, weight, eps)


class _ProjectNormed(torch.autograd.Function):
    """Keeps neither a float32 copy of ``x`` for backward nor what it is normed to, and makes neither in backward.

    With ``n = x r`` and ``r = (mean(x^2) + eps)^(-1/2)``, ``dx = r dn - r^3 mean(x dn) x``.
    """

    @staticmethod
    def forward(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed = rms_norm(x, eps)
        precision = torch.promote_types(normed.dtype, weight.dtype)
        return normed.to(precision) @ weight.to(precision)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
        *tensors, ctx.eps = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        like, w, r = x.to(grad.dtype), weight.to(grad.dtype), inverse_rms(x, ctx.eps).to(grad.dtype)
        along = (grad * (like @ w)).sum(-1, keepdim=True) / x.shape[-1]  # mean(x dn)
        scaled = r * grad
        grad_x = (scaled @ w.T).addcmul_(like, -(r**3) * along)
        grad_weight = like.reshape(-1, x.shape[-1]).T @ scaled.reshape(-1, grad.shape[-1])
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


def rms_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """``x / sqrt(mean(x^2) + eps)`` over the last dimension, without a learned scale, in float32 or better.

    Args:
        x: [..., D], any floating dtype.
        eps: keeps an all-zero x at zero.

    Returns:
        [..., D], float32 or float64.
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x * inverse_rms(x, eps)


def inverse_rms(x: Tensor, eps: float = 1e-6) -> Tensor:
    """``1 / sqrt(mean(x^2) + eps)``, what `rms_norm` multiplies ``x`` with: [..., 1], float32 or float64."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
