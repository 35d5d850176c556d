"""Skips from the first half of the units to the second (modded-nanogpt, train_gpt.py of 2025: skip_weights).

r_t = x_{t-1} + l_t x_{T+1-t}                                       in the last T // 2 units, else r_t = x_{t-1}
x_t = r_t + f_t(r_t)                                                output: x_T
"""

import torch


def parameters(depth, width, attention=()):
    """``l`` [T // 2], of the last units, ascending."""
    return {"l": torch.ones(depth // 2, dtype=torch.float64)}


def forward(x, weights, branches, kept):
    depth, states = len(branches), [x]
    for t, branch in enumerate(branches, start=1):
        r, skip = states[t - 1], t - (depth - depth // 2)  # from 1 in the last T // 2 units
        if skip >= 1:
            r = r + weights["l"][skip - 1] * states[depth + 1 - t]
        states.append(kept(r + branch(r)))
    return states[-1]
