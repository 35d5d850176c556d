"""Deep Delta Learning (arXiv 2601.00417), the case d_v = 1: states are vectors.

    k_t = f_t / |f_t|,  f_t = f_t(x_{t-1})
    b_t = 2 sigmoid(w_t . rms_norm(x_{t-1}) + s_t)
    v_t = u_t . x_{t-1} + c_t
    x_t = (I - b_t k_t k_t^T) x_{t-1} + b_t v_t k_t                     per token; output: x_T

Not in the paper: ``form="difference"``, x_t = x_{t-1} + f_t + (b_t - 1) (v_t - k_t . x_{t-1}) k_t.
"""

import torch


def parameters(depth, width, attention=(), **options):
    f64 = torch.float64
    return {
        "w": torch.zeros(depth, width, dtype=f64),
        "s": torch.zeros(depth, dtype=f64),
        "u": torch.zeros(depth, width, dtype=f64),
        "c": torch.full((depth,), 2.0, dtype=f64),
    }


def forward(x, weights, branches, kept, *, form="delta", norm_eps=1e-6, least=1e-6):
    for t, branch in enumerate(branches):
        w, s, u, c = (weights[name][t] for name in "wsuc")
        f, new = branch(x), []
        for x_n, f_n in zip(x, f, strict=True):  # each token
            k = f_n / torch.linalg.vector_norm(f_n).clamp(min=least)
            b = 2 * torch.sigmoid(w @ (x_n / torch.sqrt((x_n**2).mean() + norm_eps)) + s)
            v = u @ x_n + c
            if form == "delta":
                new.append(x_n - b * k * (k @ x_n) + b * v * k)
            else:
                new.append(x_n + f_n + (b - 1) * (v - k @ x_n) * k)
        x = kept(torch.stack(new))
    return x
