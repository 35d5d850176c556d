"""Two lanes (modded-nanogpt, pull request 230: "parallel residuals").

    l_0 = l_1 = x_0
    f_t = f_t(l_k)                                                      k = 0 for attentions, 1 for MLPs
    l_j = d_t l_j + w_tj f_t                                            for both j
    output: (l_0 + l_1) / 2

In the last ``last`` units w_t0 and w_t1 are two numbers, in those before w_t0 is that of both. ``second``: the units
that read lane 1; every second one if it is not given.
"""

import torch


def parameters(depth, width, attention=(), **options):
    """``d`` [T], ``w`` [T, 2]."""
    return {
        "d": torch.full((depth,), 1.1**0.5, dtype=torch.float64),
        "w": torch.ones(depth, 2, dtype=torch.float64),
    }


def forward(x, weights, branches, kept, *, last=8, second=None):
    lanes, depth = [x, x], len(branches)
    for t, branch in enumerate(branches, start=1):
        reads = t % 2 == 0 if second is None else t in second
        f = branch(lanes[1 if reads else 0])
        d, w = weights["d"][t - 1], weights["w"][t - 1]
        two = t > depth - last
        lanes = [kept(d * lanes[0] + w[0] * f), kept(d * lanes[1] + w[1 if two else 0] * f)]
    return (lanes[0] + lanes[1]) / 2
