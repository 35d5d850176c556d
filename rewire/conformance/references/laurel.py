"""LAuReL: learned augmented residual layers (arXiv 2411.07501, Section 2).

    RW:        x_t = a_t f_t + b_t x_{t-1}                              (a_t, b_t) = total softmax(c_t)
    LR:        x_t = f_t + x_{t-1} + B_t A_t x_{t-1}                    (eq. 3)
    PA:        x_t = f_t + x_{t-1} + sum_j g_tj B_t A_t x_j             over the last k states (eq. 4)
    RW+LR:     x_t = a_t f_t + b_t (x_{t-1} + B_t A_t x_{t-1})          (eq. 5)
    RW+LR+PA:  x_t = a_t f_t + b_t (x_{t-1} + sum_j g_tj B_t A_t x_j)   (eq. 6; there each j has a map of its own)

f_t = f_t(x_{t-1}), the output is x_T. The paper bounds a and b "by softmax or sigmoid"; ``total`` is what they add up
to. Not in the paper: ``form="difference"``, (a_t, b_t) = 1 + total (softmax(c_t) - 1/2).
"""

import torch


def parameters(depth, width, attention=(), *, low_rank=False, previous=False, rank=16, last=3, total=None, **options):
    """``c`` [T, 2], the branch's first; ``A`` [T, r, D], ``B`` [T, D, r]; ``g`` [T, k], the newest state's last."""
    found, f64 = {}, torch.float64
    if total is not None:
        found["c"] = torch.zeros(depth, 2, dtype=f64)
    if low_rank:
        r = min(rank, width)
        A = torch.zeros(r, width, dtype=f64)
        for i in range(width):
            A[i % r, i] = (r * width) ** -0.5  # Section 3.3
        found |= {"A": A.repeat(depth, 1, 1), "B": torch.zeros(depth, width, r, dtype=f64)}
    if previous:
        found["g"] = torch.ones(depth, last, dtype=f64)
    return found


def forward(x, weights, branches, kept, *, low_rank=False, previous=False, rank=16, last=3, total=None, form="softmax"):
    states = [x]
    for t, branch in enumerate(branches):
        x, f = states[-1], branch(states[-1])
        a = b = 1
        if total is not None:
            shares = torch.softmax(weights["c"][t], 0)
            a, b = total * shares if form == "softmax" else 1 + total * (shares - 0.5)
        shortcut = x
        if low_rank:
            mapped = states[-last:] if previous else [x]
            gains = weights["g"][t, -len(mapped) :] if previous else [1]
            for gain, state in zip(gains, mapped, strict=True):
                shortcut = shortcut + gain * (state @ weights["A"][t].T @ weights["B"][t].T)
        states.append(kept(a * f + b * shortcut))
    return states[-1]
