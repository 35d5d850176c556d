"""Review residuals (arXiv 2606.31859, eq. 1).

    r_t = sigmoid(W_t [rms_norm(x_{t-1}), rms_norm(f_t)] + b_t),  f_t = f_t(x_{t-1})
    x_t = x_{t-1} + r_t * f_t                                           per token and channel; output: x_T

b is in the author's code, not in the paper. Not in either: ``form="difference"``, (1 + r_t - 1/2) * f_t.
"""

import torch


def parameters(depth, width, attention=(), **options):
    f64 = torch.float64
    return {"W": torch.zeros(depth, width, 2 * width, dtype=f64), "b": torch.zeros(depth, width, dtype=f64)}


def forward(x, weights, branches, kept, *, form="sigmoid", norm_eps=1e-5):
    for W, b, branch in zip(weights["W"], weights["b"], branches, strict=True):
        f, new = branch(x), []
        for x_n, f_n in zip(x, f, strict=True):  # each token
            r = torch.sigmoid(W @ torch.cat([rms_norm(x_n, norm_eps), rms_norm(f_n, norm_eps)]) + b)
            new.append(x_n + (r if form == "sigmoid" else 1 + r - 0.5) * f_n)
        x = kept(torch.stack(new))
    return x


def rms_norm(x, eps):
    return x / torch.sqrt((x**2).mean() + eps)
