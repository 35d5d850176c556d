"""Attention Residuals: every read attends over the outputs of earlier units (arXiv 2603.15031).

    r_t = sum_{i<t} a_ti f_i,   a_ti = softmax_i(w_t . rms_norm(f_i))   f_0 = x_0, per token
    unit t appends f_t(r_t); the output is one more read, r_{T+1}

The scale of the paper's RMS norm is part of w_t, which alone it multiplies. Unit 1 has one source, and no query.
``block=S``: increments are summed over groups of S units, and the sources are x_0 and these sums.

Of others: ``heads=H``, H softmaxes, one for each H-th of the channels (arXiv 2607.27230); ``rank=R``, scores of the
last R channels (arXiv 2607.09694); ``additive``, weights 1 + a_ti, and the output is the plain stream (arXiv
2605.18855); ``qkv`` and ``normed``, three queries where an attention begins, and sums of the normed sources (Inkling
2). Not in a paper: ``scaled``, weights n a_ti, and ``form="difference"``, weights 1 + a_ti - 1/n, for n sources.
"""

import torch


def parameters(depth, width, attention=(), *, qkv=False, rank=None, **options):
    """``w`` [T, D]: row t - 2 is w_t of the reads t = 2..T+1; with ``qkv`` [T, 3, D]; with ``rank`` R for D."""
    return {"w": torch.zeros(depth, *((3,) if qkv else ()), min(rank or width, width), dtype=torch.float64)}


def forward(
    x, weights, branches, kept, *, block=None, scaled=False, form="softmax", additive=False, qkv=False, heads=1,
    normed=False, rank=None, norm_eps=1e-6
):
    def read(t, way=None):
        found = sources(increments, block)
        if t == 1:
            return found[0]
        w = weights["w"][t - 2] if way is None else weights["w"][t - 2, way]
        keys = [rms_norm(f[:, -(rank or 0) :], norm_eps) for f in found]
        values = [rms_norm(f, norm_eps) for f in found] if normed else found
        parts = []
        for head in torch.arange(x.shape[-1]).chunk(heads):  # the channels of each
            own = head[: len(w)]
            scores = torch.stack([(key[:, own] * w[own]).sum(-1) for key in keys])  # [n, N]
            a = torch.softmax(scores, 0)
            a = a * len(found) if scaled else a
            a = a - 1 / len(found) if form == "difference" else a
            a = a + 1 if additive or form == "difference" else a
            parts.append(sum(a[i, :, None] * values[i][:, head] for i in range(len(found))))
        return torch.cat(parts, -1)

    increments = [x]
    for t, branch in enumerate(branches, start=1):
        if qkv and branch.attention:
            q, k, v = (read(t, way) for way in range(3))
            f = branch(q, k, v, q)
        else:
            f = branch(read(t, 0 if qkv else None))
        increments.append(f)
    return sum(increments) if additive else read(len(branches) + 1, 0 if qkv else None)


def sources(increments, block):
    first, rest, size = increments[0], increments[1:], block or 1
    return [first, *(sum(rest[i : i + size]) for i in range(0, len(rest), size))]


def rms_norm(x, eps):
    return x / torch.sqrt((x**2).mean(-1, keepdim=True) + eps)
