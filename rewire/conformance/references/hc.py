"""Hyper-connections: n parallel streams H [n, D] (arXiv 2409.19606, Section 2).

H starts as n copies of x_0. Unit t, with A_m [n], A_r [n, n] and B [n]:

    r_t = A_m^T H                                                       what the unit reads
    H'  = A_r^T H + B f_t(r_t)^T                                        A_r[i, j] takes stream i to stream j

Dynamic (DHC), per token, with W_m [D], W_r [D, n], W_b [D] and the scales s_a and s_b:

    A_m(H) = A_m + s_a tanh(norm(H) W_m)
    A_r(H) = A_r + s_a tanh(norm(H) W_r)
    B(H)   = B   + s_b tanh(norm(H) W_b)

The norm is over the channels of each stream, an RMS norm. The output is the sum of the streams. Not in the paper:
``output="mean"``, or ``"learned"``, one more read A_m^T H.
"""

import torch


def parameters(depth, width, attention=(), *, dynamic=False, streams=4, output="sum"):
    n, f64 = streams, torch.float64
    found = {
        "A_m": torch.eye(n, dtype=f64)[[t % n for t in range(1, depth + 1)]],  # e_{t mod n}
        "A_r": torch.eye(n, dtype=f64).repeat(depth, 1, 1),
        "B": torch.ones(depth, n, dtype=f64),
    }
    if dynamic:
        found["W_m"] = torch.zeros(depth, width, dtype=f64)
        found["W_r"] = torch.zeros(depth, width, n, dtype=f64)
        found["W_b"] = torch.zeros(depth, width, dtype=f64)
        found["s_a"] = found["s_b"] = torch.full((depth,), 0.01, dtype=f64)
    if output == "learned":
        found["last_A_m"] = torch.full((n,), 1 / n, dtype=f64)
        if dynamic:
            found["last_W_m"] = torch.zeros(width, dtype=f64)
            found["last_s_a"] = torch.full((1,), 0.01, dtype=f64)
    return found


def forward(x, weights, branches, kept, *, dynamic=False, streams=4, output="sum", norm_eps=1e-6):
    n, tokens = streams, range(len(x))
    H = torch.stack([x] * n, 1)  # [N, n, D]
    for t, branch in enumerate(branches):
        w = {name: value[t] for name, value in weights.items() if not name.startswith("last")}
        A_m, A_r, B = [], [], []
        for token in tokens:
            m, r, b = w["A_m"], w["A_r"], w["B"]
            if dynamic:
                normed = norm(H[token], norm_eps)
                m = m + w["s_a"] * torch.tanh(normed @ w["W_m"])
                r = r + w["s_a"] * torch.tanh(normed @ w["W_r"])
                b = b + w["s_b"] * torch.tanh(normed @ w["W_b"])
            A_m.append(m)
            A_r.append(r)
            B.append(b)
        read = torch.stack([sum(A_m[token][i] * H[token, i] for i in range(n)) for token in tokens])
        f = branch(read)
        new = [
            torch.stack(
                [sum(A_r[token][i, j] * H[token, i] for i in range(n)) + B[token][j] * f[token] for j in range(n)]
            )
            for token in tokens
        ]
        H = kept(torch.stack(new))
    if output == "learned":
        return torch.stack([last_read(H[token], weights, dynamic, norm_eps) for token in tokens])
    return H.sum(1) if output == "sum" else H.mean(1)


def last_read(H, weights, dynamic, norm_eps):
    m = weights["last_A_m"]
    if dynamic:
        m = m + weights["last_s_a"] * torch.tanh(norm(H, norm_eps) @ weights["last_W_m"])
    return m @ H


def norm(H, eps):
    """Each stream by itself."""
    return H / torch.sqrt((H**2).mean(-1, keepdim=True) + eps)
