"""Gated hyper-connections (Qwen4-Exp: transformers' Qwen4ExpTextGatedResidual).

H starts as n copies of x_0, H [n, D]. Unit t, per token:

    N   = rms_norm(H) * (1 + w)                                         each stream normed by itself, w [n, D]
    x   = vec(N)                                                        [n D]
    g   = sigmoid(silu(x W_down / n) W_up)                              [n, D]
    r_t = (1/n) sum_i g_i * N_i
    b   = 2 sigmoid(x W_inject / n)                                     [n]
    H'  = H + b f_t(r_t)^T
    output: one more read

Not in that model: ``reads="streams"``, r_t = (2/n) sum_i g_i * H_i.
"""

import math

import torch

DRAWN = {"down": "normal(0, 0.02)", "up": "normal(0, 0.02)", "inject": "normal(0, 0.02)"}


def parameters(depth, width, attention=(), *, streams=4, rank=16, **options):
    n, f64 = streams, torch.float64
    return {
        "norm": torch.zeros(depth + 1, n, width, dtype=f64),
        "down": torch.full((depth + 1, n * width, rank), math.nan, dtype=f64),
        "up": torch.full((depth + 1, rank, n * width), math.nan, dtype=f64),
        "inject": torch.full((depth, n * width, n), math.nan, dtype=f64),
    }


def forward(x, weights, branches, kept, *, streams=4, rank=16, reads="normed", norm_eps=1e-6):
    n, tokens = streams, range(len(x))

    def read(H, t):
        """r_t and vec(N) of one token."""
        N = H / torch.sqrt((H**2).mean(-1, keepdim=True) + norm_eps) * (1 + weights["norm"][t])
        hidden = torch.nn.functional.silu(N.flatten() @ weights["down"][t] / n)
        g = torch.sigmoid(hidden @ weights["up"][t]).unflatten(0, (n, -1))
        total = (
            sum(g[i] * N[i] for i in range(n)) / n if reads == "normed" else sum(g[i] * H[i] for i in range(n)) * 2 / n
        )
        return total, N.flatten()

    H = torch.stack([x] * n, 1)  # [N, n, D]
    for t, branch in enumerate(branches):
        found = [read(H[token], t) for token in tokens]
        f = branch(torch.stack([r for r, _ in found]))
        b = [2 * torch.sigmoid(vector @ weights["inject"][t] / n) for _, vector in found]
        H = kept(torch.stack([H[token] + torch.outer(b[token], f[token]) for token in tokens]))
    return torch.stack([read(H[token], len(branches))[0] for token in tokens])
