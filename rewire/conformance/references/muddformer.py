"""MUDDFormer: multiway dynamic dense connections (arXiv 2502.12170, Section 2).

    A_t = gelu(rms_norm(x_{t-1}) W1_t) W2_t + a_t                       (eq. 6)
    r_t = sum_{i<t} A_ti x_i                                            (eq. 5)
    x_t = r_t + f_t(r_t)

Where an attention begins there are four such sums, for q, k, v and the residual (eq. 7 and 8), whose weights come
from one hidden layer; elsewhere one. Unit 1 reads x_0; the output is one more sum. The hidden layer has as many units
as it computes weights. Not in the paper: ``block=S``, sums over x_0, x_S, x_2S, .. and x_{t-1} alone.

``norms``: sums of g_i * rms_norm(x_i), to which x_{t-1} is added; of the residual, and where there is one sum, it is
h_t * rms_norm of the sum that is added (eq. 10; that q, k and v have no second norm is as in the authors' JAX code).
"""

import math

import torch

DRAWN = {"W1": "normal(0, 1 / sqrt(D))"}


def parameters(depth, width, attention=(), *, block=None, norms=False):
    """``a`` [T, C, n], ``W1`` [T, D, C, n], ``W2`` [T, C, n, C, n]: row t - 2 is that of the reads t = 2..T+1, each of
    which uses as many of the C = 4 ways and n sources as it has. With norms ``g`` [T + 1, D], row i that of x_i, and
    ``h`` [T, D], row t - 2 that of read t.
    """
    most, f64 = len(sources(depth + 1, block)), torch.float64
    a = torch.zeros(depth, 4, most, dtype=f64)
    for t in range(2, depth + 2):
        a[t - 2, :, len(sources(t, block)) - 1] = 0 if norms else 1  # the newest
    W1 = torch.full((depth, width, 4, most), math.nan, dtype=f64)
    found = {"a": a, "W1": W1, "W2": torch.zeros(depth, 4, most, 4, most, dtype=f64)}
    if norms:
        found["g"] = torch.ones(depth + 1, width, dtype=f64)
        found["h"] = torch.full((depth, width), 1e-3, dtype=f64)
    return found


def forward(x, weights, branches, kept, *, block=None, norms=False, norm_eps=1e-6):
    def rms_norm(x):
        return x / torch.sqrt((x**2).mean(-1, keepdim=True) + norm_eps)

    def read(t, ways):
        numbers = sources(t, block)
        if t == 1:
            return [x] * ways
        n, last = len(numbers), states[t - 1]
        normed = last / torch.sqrt((last**2).mean(-1, keepdim=True) + norm_eps)
        W1, W2 = weights["W1"][t - 2, :, :ways, :n], weights["W2"][t - 2, :ways, :n, :ways, :n]
        hidden = torch.nn.functional.gelu(torch.tensordot(normed, W1, 1))  # [N, C, n]
        A = torch.tensordot(hidden, W2, 2) + weights["a"][t - 2, :ways, :n]  # eq. 6
        if norms:  # eq. 10
            known = {i: weights["g"][i] * rms_norm(states[i]) for i in numbers}
            sums = [sum(A[:, way, j, None] * known[i] for j, i in enumerate(numbers)) for way in range(ways)]
            sums[-1] = weights["h"][t - 2] * rms_norm(sums[-1])
            return [last + mixed for mixed in sums]
        return [sum(A[:, way, j, None] * states[i] for j, i in enumerate(numbers)) for way in range(ways)]  # eq. 5

    states = [x]
    for t, branch in enumerate(branches, start=1):
        if branch.attention:
            q, k, v, r = read(t, 4)  # eq. 7 and 8
            f = branch(q, k, v, r)
        else:
            (r,) = read(t, 1)
            f = branch(r)
        states.append(kept(r + f))
    return read(len(branches) + 1, 1)[0]


def sources(t, block):
    """The i of the states that are read."""
    return [i for i in range(t) if i % (block or 1) == 0 or i == t - 1]
