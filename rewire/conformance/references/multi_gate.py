"""Multi-Gate Residuals with independent gates (arXiv 2605.23259, as implemented in burn-mamba).

    streams: s_1 = x_0, and what the first n - 1 units return
    h_t = sum_i a_i s_i,   a = softmax_i(w_t . rms_norm(s_i) / sqrt(D))             what unit t reads
    f_t = f_t(h_t)
    s_i = s_i + b_i (f_t - s_i),   b_i = sigmoid(v_t . rms_norm(s_i) / sqrt(D) + c_ti)       with n streams
    output: one more read

All per token. ``bias``: of c at the start; None: -ln(sqrt(L / 21) (e^3 + 1) - n) of L units with gates.
"""

import math

import torch


def parameters(depth, width, attention=(), *, streams=4, bias=None):
    """``w`` [T, D], row t - 2 being w_t of the reads t = 2..T+1; ``v`` [L, D] and ``c`` [L, n] of the last L units."""
    found, gated = {"w": torch.zeros(depth, width, dtype=torch.float64)}, depth - streams + 1
    if gated > 0:
        start = -math.log(math.sqrt(gated / 21) * (math.exp(3) + 1) - streams) if bias is None else bias
        found["v"] = torch.zeros(gated, width, dtype=torch.float64)
        found["c"] = torch.full((gated, streams), start, dtype=torch.float64)
    return found


def forward(x, weights, branches, kept, *, streams=4, bias=None, norm_eps=1e-6):
    def score(s, w):  # [N]
        normed = s / torch.sqrt((s**2).mean(-1, keepdim=True) + norm_eps)
        return (normed * w).sum(-1) / math.sqrt(s.shape[-1])

    def read(t):
        if t == 1:
            return x
        a = torch.softmax(torch.stack([score(s, weights["w"][t - 2]) for s in held]), 0)
        return sum(a[i, :, None] * s for i, s in enumerate(held))

    held = [x]
    for t, branch in enumerate(branches, start=1):
        f = branch(read(t))
        if len(held) < streams:
            held = [*held, kept(f)]
            continue
        v, c = weights["v"][t - streams], weights["c"][t - streams]
        gates = [torch.sigmoid(score(s, v) + c[i])[:, None] for i, s in enumerate(held)]
        held = [kept(s + b * (f - s)) for s, b in zip(held, gates, strict=True)]
    return read(len(branches) + 1)
