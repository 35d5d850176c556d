"""ANCRe's ablation with a learned scalar on each plain shortcut (arXiv 2602.09009, Section 5.4, Table 5).

    x_t = f_t(x_{t-1}) + a_t x_{t-1}                                    output: x_T

``cascade="keep"`` adds x_{t-1}.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]
Kept = Callable[[Tensor], Tensor]


def parameters(depth: int, width: int, attention: Collection[int] = (), **options: Any) -> dict[str, Tensor]:
    return {"a": torch.ones(depth, dtype=torch.float64)}


def forward(x: Tensor, weights: Weights, branches: Sequence[Any], kept: Kept, *, cascade: str = "replace") -> Tensor:
    for t, branch in enumerate(branches):
        new = branch(x) + weights["a"][t] * x
        x = kept(new + x if cascade == "keep" else new)
    return x
