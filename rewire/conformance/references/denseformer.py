"""DenseFormer: a depth-weighted average after each block (arXiv 2402.02622).

    x_t = y_{t-1} + f_t(y_{t-1}),  y_0 = x_0
    y_t = sum_{i<=t, i = t mod k} alpha_ti x_i                          if t is a multiple of p, else y_t = x_t
    output: y_T

k is ``dilation``, p is ``period``. Not in the paper: ``block=S``, averages over x_0, x_S, x_2S, .. and x_t alone.
"""

import torch


def parameters(depth, width, attention=(), *, dilation=1, period=1, block=None):
    """``alpha`` [T, T + 1]: row t - 1, column i is alpha_ti."""
    alpha = torch.zeros(depth, depth + 1, dtype=torch.float64)
    for t in range(period, depth + 1, period):
        alpha[t - 1, t] = 1
    return {"alpha": alpha}


def forward(x, weights, branches, kept, *, dilation=1, period=1, block=None):
    states, y = [x], x
    for t, branch in enumerate(branches, start=1):
        states.append(kept(y + branch(y)))
        y = states[t]
        if t % period == 0:
            averaged = [i for i in range(t + 1) if i % dilation == t % dilation]
            if block:
                averaged = [i for i in range(t + 1) if i % block == 0 or i == t]
            y = sum(weights["alpha"][t - 1, i] * states[i] for i in averaged)
    return y
