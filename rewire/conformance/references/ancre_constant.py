"""ANCRe's ablation with all shortcuts fixed (arXiv 2602.09009, Section 5.4, Table 5).

    x_t = f_t(x_{t-1}) + (x_0 + .. + x_{t-1}) / t                       output: x_T

``cascade="keep"`` adds x_{t-1}. Not in the paper: ``block=S``, the mean over x_0, x_S, x_2S, .. and x_{t-1} alone.
"""


def parameters(depth, width, attention=(), **options):
    return {}


def forward(x, weights, branches, kept, *, cascade="replace", block=None):
    states = [x]
    for t, branch in enumerate(branches, start=1):
        sources = [states[i] for i in range(t) if i % (block or 1) == 0 or i == t - 1]
        new = branch(states[-1]) + sum(sources) / len(sources)
        states.append(kept(new + states[-1] if cascade == "keep" else new))
    return states[-1]
