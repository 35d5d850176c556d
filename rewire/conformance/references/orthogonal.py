"""Orthogonal residual updates (arXiv 2505.11881).

    s_t = <x_{t-1}, f_t> / (|x_{t-1}|^2 + eps),  f_t = f_t(x_{t-1})
    x_t = x_{t-1} + f_t - s_t x_{t-1}                                   per token; output: x_T

Not in the paper: ``form="gated"``, x_t = x_{t-1} + f_t - c_t s_t x_{t-1}.
"""

import torch


def parameters(depth, width, attention=(), *, form="orthogonal"):
    """With gates ``c`` [T]."""
    return {"c": torch.ones(depth, dtype=torch.float64)} if form == "gated" else {}


def forward(x, weights, branches, kept, *, form="orthogonal", eps=1e-6):
    for t, branch in enumerate(branches):
        f, new = branch(x), []
        for x_n, f_n in zip(x, f, strict=True):  # each token
            s = (x_n @ f_n) / (x_n @ x_n + eps)
            c = weights["c"][t] if form == "gated" else 1
            new.append(x_n + f_n - c * s * x_n)
        x = kept(torch.stack(new))
    return x
