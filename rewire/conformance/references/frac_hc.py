"""Frac-connections: hyper-connections between m fractions of one hidden state (arXiv 2503.14125).

x_0 is split into m fractions of D / m channels, H [m, D / m]. Unit t, with A_m [m, m], A_r [m, m] and B [m]:

    r_t = A_m^T H, its m rows side by side
    H'  = A_r^T H + diag(B) F, where F [m, D / m] are the fractions of f_t(r_t)
    output: H, its rows side by side

Dynamic: s tanh(norm(H) W) is added to A_m, A_r and B, as in hyper-connections; the norm is over each fraction.
"""

import torch


def parameters(depth, width, attention=(), *, fractions=4, dynamic=True):
    m, f64 = fractions, torch.float64
    eye = torch.eye(m, dtype=f64).repeat(depth, 1, 1)
    found = {"A_m": eye, "A_r": eye.clone(), "B": torch.ones(depth, m, dtype=f64)}
    if dynamic:
        found["W_m"] = torch.zeros(depth, width // m, m, dtype=f64)
        found["W_r"] = torch.zeros(depth, width // m, m, dtype=f64)
        found["W_b"] = torch.zeros(depth, width // m, dtype=f64)
        found["s_a"] = found["s_b"] = torch.full((depth,), 0.01, dtype=f64)
    return found


def forward(x, weights, branches, kept, *, fractions=4, dynamic=True, norm_eps=1e-6):
    m, tokens = fractions, range(len(x))
    H = x.unflatten(-1, (m, -1))  # [N, m, D / m]
    for t, branch in enumerate(branches):
        w = {name: value[t] for name, value in weights.items()}
        A_m, A_r, B = [], [], []
        for token in tokens:
            read, carry, write = w["A_m"], w["A_r"], w["B"]
            if dynamic:
                normed = H[token] / torch.sqrt((H[token] ** 2).mean(-1, keepdim=True) + norm_eps)
                read = read + w["s_a"] * torch.tanh(normed @ w["W_m"])
                carry = carry + w["s_a"] * torch.tanh(normed @ w["W_r"])
                write = write + w["s_b"] * torch.tanh(normed @ w["W_b"])
            A_m.append(read)
            A_r.append(carry)
            B.append(write)
        read = torch.stack([torch.cat([A_m[n][:, k] @ H[n] for k in range(m)]) for n in tokens])
        F = branch(read).unflatten(-1, (m, -1))
        new = [torch.stack([A_r[n][:, j] @ H[n] + B[n][j] * F[n, j] for j in range(m)]) for n in tokens]
        H = kept(torch.stack(new))
    return H.flatten(1)
