"""What input-dependent connection weights are computed with: in float32, whatever autocast says."""

from __future__ import annotations

import torch
from torch import Tensor


def project(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight`` in float32 (float64 for float64), outside autocast.

    Args:
        x: [..., D], any floating dtype.
        weight: float32 [D, K].

    Returns:
        [..., K], float32 or float64.
    """
    precision = torch.promote_types(x.dtype, weight.dtype)
    with torch.autocast(device_type=x.device.type, enabled=False):
        return x.to(precision) @ weight.to(precision)


def rms_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """``x / sqrt(mean(x^2) + eps)`` over the last dimension, without a learned scale, in float32 or better.

    Args:
        x: [..., D], any floating dtype.
        eps: keeps an all-zero x at zero.

    Returns:
        [..., D], float32 or float64.
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
