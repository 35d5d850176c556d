"""ANCRe: learned shortcuts between all states (arXiv 2602.09009, Section 4.1).

    x_t = f_t(x_{t-1}) + sum_{i<t} p_it x_i                             output: x_T
    ingoing:   p_it = exp(c_it / tau) / sum_{k<t} exp(c_kt / tau)       so that sum_i p_it = 1 for each t
    outgoing:  p_it = exp(c_it / tau) / sum_{k>i} exp(c_ik / tau)       so that sum_t p_it = 1 for each i
    none:      p_it = c_it                                              (Table 4)

``cascade="keep"`` is the authors' released code, which adds the mix to the shortcut: x_t = x_{t-1} + f_t + sum p_it
x_i. Not in the paper: ``form="difference"``, p + E - softmax(0), which starts as the plain network E; ``block=S``,
shortcuts from x_0, x_S, x_2S, .. and x_{t-1} alone.
"""

import torch


def parameters(depth, width, attention=(), *, normalize="ingoing", block=None, **options):
    """``c`` [T, T]: row t - 1, column i is c_it."""
    c = torch.zeros(depth, depth, dtype=torch.float64)
    if normalize == "none":  # the paper gives no start; this is the function that the others start as
        for t in range(1, depth + 1):
            for i in sources(t, block):
                c[t - 1, i] = 1 / len(sources(t, block))
    return {"c": c}


def forward(
    x, weights, branches, kept, *, normalize="ingoing", temperature=0.01, cascade="replace", form="softmax",
    block=None
):
    depth, c = len(branches), weights["c"]
    pairs = [(i, t) for t in range(1, depth + 1) for i in sources(t, block)]
    p = shortcuts(c, pairs, normalize, temperature)
    if form == "difference" and normalize != "none":
        start = shortcuts(torch.zeros_like(c), pairs, normalize, temperature)
        original = 1 if cascade == "replace" else 0
        p = {(i, t): (original if i == t - 1 else 0) + p[i, t] - start[i, t] for i, t in pairs}
    states = [x]
    for t, branch in enumerate(branches, start=1):
        new = branch(states[t - 1])
        for i in sources(t, block):
            new = new + p[i, t] * states[i]
        if cascade == "keep":
            new = new + states[t - 1]
        states.append(kept(new))
    return states[-1]


def shortcuts(c, pairs, normalize, temperature):
    """p_it for all pairs (i, t)."""
    if normalize == "none":
        return {(i, t): c[t - 1, i] for i, t in pairs}
    p = {}
    for i, t in pairs:
        # What p_it is normalised with: the shortcuts into t, or those out of i.
        among = [(k, j) for k, j in pairs if (j == t if normalize == "ingoing" else k == i)]
        logits = torch.stack([c[j - 1, k] for k, j in among]) / temperature
        p[i, t] = torch.softmax(logits, 0)[among.index((i, t))]
    return p


def sources(t, block):
    """The i of the states that x_t has shortcuts from."""
    return [i for i in range(t) if i % (block or 1) == 0 or i == t - 1]
