"""Constant scales of shortcuts and branches (DeepNorm, arXiv 2203.00555; CompleteP, arXiv 2505.01618).

    x_t = a x_{t-1} + b f_t(x_{t-1})                                    output: x_T
    a = shortcut T^shortcut_power,  b = branch T^branch_power

T is the number of residual adds, 2 L of a transformer with L layers: DeepNorm has a = (2 L)^(1/4), CompleteP b = 1/L.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

Weights = Mapping[str, Tensor]
Kept = Callable[[Tensor], Tensor]


def parameters(depth: int, width: int, attention: Collection[int] = (), **options: Any) -> dict[str, Tensor]:
    return {}


def forward(
    x: Tensor,
    weights: Weights,
    branches: Sequence[Any],
    kept: Kept,
    *,
    shortcut: float = 1.0,
    branch: float = 1.0,
    shortcut_power: float = 0.0,
    branch_power: float = 0.0,
) -> Tensor:
    T = len(branches)
    for compute in branches:
        x = kept(shortcut * T**shortcut_power * x + branch * T**branch_power * compute(x))
    return x
