"""Review residuals (arXiv 2606.31859, eq. 1).

    r_t = sigmoid(W_t [rms_norm(x_{t-1}), rms_norm(f_t)] + b_t),  f_t = f_t(x_{t-1})
    x_t = x_{t-1} + r_t * f_t                                           per token and channel; output: x_T

b is in the author's code, not in the paper. Not in either: ``form="difference"``, (1 + r_t - 1/2) * f_t.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]
Kept = Callable[[Tensor], Tensor]


def parameters(depth: int, width: int, attention: Collection[int] = (), **options: Any) -> dict[str, Tensor]:
    f64 = torch.float64
    return {"W": torch.zeros(depth, width, 2 * width, dtype=f64), "b": torch.zeros(depth, width, dtype=f64)}


def forward(
    x: Tensor,
    weights: Weights,
    branches: Sequence[Any],
    kept: Kept,
    *,
    form: str = "sigmoid",
    norm_eps: float = 1e-5,
) -> Tensor:
    for W, b, branch in zip(weights["W"], weights["b"], branches, strict=True):
        f, new = branch(x), []
        for x_n, f_n in zip(x, f, strict=True):  # each token
            r = torch.sigmoid(W @ torch.cat([rms_norm(x_n, norm_eps), rms_norm(f_n, norm_eps)]) + b)
            new.append(x_n + (r if form == "sigmoid" else 1 + r - 0.5) * f_n)
        x = kept(torch.stack(new))
    return x


def rms_norm(x: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x**2).mean() + eps)
