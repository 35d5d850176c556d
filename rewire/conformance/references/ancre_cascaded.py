"""ANCRe's ablation with a learned scalar on each plain shortcut (arXiv 2602.09009, Section 5.4, Table 5).

    x_t = f_t(x_{t-1}) + a_t x_{t-1}                                    output: x_T

``cascade="keep"`` adds x_{t-1}.
"""

import torch


def parameters(depth, width, attention=(), **options):
    return {"a": torch.ones(depth, dtype=torch.float64)}


def forward(x, weights, branches, kept, *, cascade="replace"):
    for t, branch in enumerate(branches):
        new = branch(x) + weights["a"][t] * x
        x = kept(new + x if cascade == "keep" else new)
    return x
