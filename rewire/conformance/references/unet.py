"""Skips from the first half of the units to the second (modded-nanogpt, train_gpt.py of 2025: skip_weights).

r_t = x_{t-1} + l_t x_{T+1-t}                                       in the last T // 2 units, else r_t = x_{t-1}
x_t = r_t + f_t(r_t)                                                output: x_T
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]
Kept = Callable[[Tensor], Tensor]


def parameters(depth: int, width: int, attention: Collection[int] = ()) -> dict[str, Tensor]:
    """``l`` [T // 2], of the last units, ascending."""
    return {"l": torch.ones(depth // 2, dtype=torch.float64)}


def forward(x: Tensor, weights: Weights, branches: Sequence[Any], kept: Kept) -> Tensor:
    depth, states = len(branches), [x]
    for t, branch in enumerate(branches, start=1):
        r, skip = states[t - 1], t - (depth - depth // 2)  # from 1 in the last T // 2 units
        if skip >= 1:
            r = r + weights["l"][skip - 1] * states[depth + 1 - t]
        states.append(kept(r + branch(r)))
    return states[-1]
