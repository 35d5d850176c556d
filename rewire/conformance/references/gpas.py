"""Gradient-preserving activation scaling (GPAS, arXiv 2506.22049).

    y_t = x_{t-1} + f_t(x_{t-1})
    x_t = y_t - silu(a_t) stop_gradient(y_t)                            output: x_T

``scaled="shortcut"``: x_t = x_{t-1} - silu(a_t) stop_gradient(x_{t-1}) + f_t(x_{t-1}), as the authors do where a norm
follows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]
Kept = Callable[[Tensor], Tensor]


def parameters(depth: int, width: int, attention: Collection[int] = (), **options: Any) -> dict[str, Tensor]:
    return {"a": torch.zeros(depth, dtype=torch.float64)}


def forward(x: Tensor, weights: Weights, branches: Sequence[Any], kept: Kept, *, scaled: str = "sum") -> Tensor:
    for a, branch in zip(weights["a"], branches, strict=True):
        gate = a * torch.sigmoid(a)
        if scaled == "sum":
            y = x + branch(x)
            x = kept(y - gate * y.detach())
        else:
            x = kept(x - gate * x.detach() + branch(x))
    return x
