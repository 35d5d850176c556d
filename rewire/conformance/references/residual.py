"""Plain residual connections (arXiv 1512.03385).

x_t = x_{t-1} + f_t(x_{t-1})                                        (eq. 1)
output: x_T
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

Weights = Mapping[str, Tensor]
Kept = Callable[[Tensor], Tensor]


def parameters(depth: int, width: int, attention: Collection[int] = ()) -> dict[str, Tensor]:
    return {}


def forward(x: Tensor, weights: Weights, branches: Sequence[Any], kept: Kept) -> Tensor:
    for branch in branches:
        x = kept(x + branch(x))  # eq. 1
    return x
