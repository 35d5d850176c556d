"""Gradient-preserving activation scaling (GPAS, arXiv 2506.22049).

    y_t = x_{t-1} + f_t(x_{t-1})
    x_t = y_t - silu(a_t) stop_gradient(y_t)                            output: x_T

``scaled="shortcut"``: x_t = x_{t-1} - silu(a_t) stop_gradient(x_{t-1}) + f_t(x_{t-1}), as the authors do where a norm
follows.
"""

import torch


def parameters(depth, width, attention=(), **options):
    return {"a": torch.zeros(depth, dtype=torch.float64)}


def forward(x, weights, branches, kept, *, scaled="sum"):
    for a, branch in zip(weights["a"], branches, strict=True):
        gate = a * torch.sigmoid(a)
        if scaled == "sum":
            y = x + branch(x)
            x = kept(y - gate * y.detach())
        else:
            x = kept(x - gate * x.detach() + branch(x))
    return x
