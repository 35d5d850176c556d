"""ReZero (arXiv 2003.04887, eq. 1), SkipInit (arXiv 2002.10444) and LayerScale (arXiv 2103.17239, Section 2).

    x_t = x_{t-1} + alpha_t * f_t(x_{t-1})                              output: x_T

alpha_t is a number, 0 at the start; of LayerScale it is in R^D, and ``start`` in all channels: 0.1 up to 18 blocks,
1e-5 up to 24, 1e-6 for deeper models (two units are counted as a block).
"""

import torch


def parameters(depth, width, attention=(), *, channels=False, start=None):
    if not channels:
        return {"alpha": torch.zeros(depth, dtype=torch.float64)}
    blocks = depth / 2
    value = start or (0.1 if blocks <= 18 else 1e-5 if blocks <= 24 else 1e-6)
    return {"alpha": torch.full((depth, width), value, dtype=torch.float64)}


def forward(x, weights, branches, kept, *, channels=False, start=None):
    for t, branch in enumerate(branches):
        x = kept(x + weights["alpha"][t] * branch(x))
    return x
