"""Generalised residual networks and DeepCrossAttention (arXiv 2502.06785, Sections 3.1 and 3.2).

The stack of unit t is G_t = [f_0, f_1, .., f_{t-1}], f_0 being the trunk's input x_0.

    GRN-v1:  r_t = sum_{i<t} b_ti f_i                                   b_ti a number
    GRN-v2:  r_t = sum_{i<t} b_ti * f_i                                 b_ti in R^D
    GRN-v3:  r_t = sum_{i<t} (b_ti + relu(w_t . f_i)) * f_i             w_t in R^D, per token
    DCA:     three GRN-v3 reads where an attention begins: its queries, keys and values; elsewhere one
    unit t appends f_t(r_t); the output is one more read, r_{T+1}

``last=k`` (k-DCA): the stack is f_0, the sum of the middle, and the last k. Not in the paper: ``block=S``, increments
are summed over groups of S units. What else an attention block reads (its own shortcut) is the read for the queries.
"""

import torch


def parameters(depth, width, attention=(), *, channels=True, dependent=True, qkv=False, last=None, block=None):
    """``b`` [T + 1, N] or [T + 1, N, D], ``w`` [T + 1, D]; with ``qkv`` there are three of each row, [T + 1, 3, ..]."""
    most = len(stack([torch.zeros(1)] * (depth + 1), last, block))
    ways = (3,) if qkv else ()
    b = torch.ones(depth + 1, *ways, most, *((width,) if channels else ()), dtype=torch.float64)
    return {"b": b} | ({"w": torch.zeros(depth + 1, *ways, width, dtype=torch.float64)} if dependent else {})


def forward(x, weights, branches, kept, *, channels=True, dependent=True, qkv=False, last=None, block=None):
    def read(t, way=None):
        """What unit t reads, or one of the three mixes that it reads."""
        row = (t - 1,) if way is None else (t - 1, way)
        total = torch.zeros_like(x)
        for number, f in enumerate(stack(increments, last, block)):
            weight = weights["b"][row][number]
            if dependent:
                score = (f * weights["w"][row]).sum(-1, keepdim=True)
                weight = weight + torch.relu(score)
            total = total + weight * f
        return total

    increments = [x]
    for t, branch in enumerate(branches, start=1):
        if qkv and branch.attention:
            q, k, v = (read(t, way) for way in range(3))
            f = branch(q, k, v, q)
        else:
            f = branch(read(t, 0 if qkv else None))
        increments.append(f)
    return read(len(branches) + 1, 0 if qkv else None)


def stack(increments, last, block):
    first, rest = increments[0], increments[1:]
    if last is not None and len(rest) > last:
        return [first, sum(rest[:-last]), *rest[-last:]]
    return [first, *(sum(rest[i : i + (block or 1)]) for i in range(0, len(rest), block or 1))]
