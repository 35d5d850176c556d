"""Implementations as people write them, all tokens at once; each with mistakes that can be planted in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = Mapping[str, Tensor]
Branches = Sequence[Any]


class Unscaled(torch.autograd.Function):
    """``scale * x``, whose backward forgets the scale."""

    @staticmethod
    def forward(ctx: Any, scale: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(scale, x)
        return scale * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        _, x = ctx.saved_tensors
        return (grad * x).sum(), grad


def mhc(wrong: str = "") -> Any:
    def sinkhorn(z: Tensor) -> Tensor:
        if wrong == "bf16 before Sinkhorn":
            z = z.bfloat16().to(z.dtype)
        log = z - z.logsumexp((-2, -1), keepdim=True)
        dims = (-1, -2) if wrong == "rows first" else (-2, -1)
        for _ in range(19 if wrong == "19 iterations" else 20):
            for dim in dims:
                log = log - log.logsumexp(dim, keepdim=True)
        return log.exp()

    def normed(H: Tensor) -> Tensor:
        if wrong == "norm over each stream":
            return F.rms_norm(H, H.shape[-1:], eps=1e-6).flatten(-2)
        flat = H.mT.flatten(-2) if wrong == "channels first" else H.flatten(-2)
        if wrong == "eps outside":
            return flat / (flat.square().mean(-1, keepdim=True).sqrt() + 1e-6)
        if wrong == "layer norm":
            return F.layer_norm(flat, flat.shape[-1:], eps=1e-6)
        return F.rms_norm(flat, flat.shape[-1:], eps=1e-5 if wrong == "eps" else 1e-6)

    def run(x: Tensor, weights: Weights, branches: Branches) -> Tensor:
        H = x.unsqueeze(-2).expand(*x.shape[:-1], 4, -1).to(torch.promote_types(x.dtype, torch.float32))
        for t, branch in enumerate(branches):
            w = {name: value[t] for name, value in weights.items()}
            v = normed(H)
            pre = torch.sigmoid(w["alpha_pre"] * (v @ w["phi_pre"]) + w["b_pre"])
            z = w["alpha_post"] * (v @ w["phi_post"]) + w["b_post"]
            post = torch.tanh(z) if wrong == "tanh" else torch.sigmoid(z)
            post = post if wrong == "no factor 2" else 2 * post
            scaled = Unscaled.apply if wrong == "backward without alpha" else torch.mul
            logits = scaled(w["alpha_res"], torch.tensordot(v, w["phi_res"], 1)) + w["b_res"]
            if wrong == "softmax":
                pre = torch.softmax(w["alpha_pre"] * (v @ w["phi_pre"]) + w["b_pre"], -1)
            res = sinkhorn(logits)
            read = torch.einsum("...n,...nd->...d", pre, H).to(x.dtype)
            f = branch(read).to(H.dtype)
            f = f + read if wrong == "residual twice" else f
            H = (res.mT if wrong == "transposed" else res) @ H + post.unsqueeze(-1) * f.unsqueeze(-2)
            H = H.to(x.dtype).to(H.dtype)
            if wrong == "collapsed":
                H = H.mean(-2, keepdim=True).expand(H.shape)
        return (H.mean(-2) if wrong == "mean" else H.sum(-2)).to(x.dtype)

    return run


def hc(wrong: str = "") -> Any:
    def run(x: Tensor, weights: Weights, branches: Branches) -> Tensor:
        H = torch.stack([x] * 4, -2).to(torch.promote_types(x.dtype, torch.float32))
        for t, branch in enumerate(branches):
            w = {name: value[t] for name, value in weights.items()}
            v = F.rms_norm(H, H.shape[-2:] if wrong == "norm over all" else H.shape[-1:], eps=1e-6)
            squash = torch.sigmoid if wrong == "sigmoid" else torch.tanh
            m = w["A_m"] + w["s_a"] * squash(v @ w["W_m"])
            r = w["A_r"] + w["s_a"] * squash(v @ w["W_r"])
            b = w["B"] + w["s_b"] * squash(v @ w["W_b"])
            f = branch(torch.einsum("...n,...nd->...d", m, H).to(x.dtype)).to(H.dtype)
            H = (r if wrong == "transposed" else r.mT) @ H + b.unsqueeze(-1) * f.unsqueeze(-2)
            H = H.to(x.dtype).to(H.dtype)
        return H.sum(-2).to(x.dtype)

    return run


def attnres(wrong: str = "") -> Any:
    def run(x: Tensor, weights: Weights, branches: Branches) -> Tensor:
        def read(t: int) -> Tensor:
            if t == 1:
                return x
            values = torch.stack(sources).to(torch.promote_types(x.dtype, torch.float32))
            keys = values if wrong == "no norm" else F.rms_norm(values, values.shape[-1:], eps=1e-6)
            scores = keys @ weights["w"][max(t - 3, 0) if wrong == "query of another unit" else t - 2]
            scores = scores / x.shape[-1] ** 0.5 if wrong == "scaled scores" else scores
            shares = scores.flatten(1).softmax(1).view_as(scores) if wrong == "wrong axis" else scores.softmax(0)
            return (shares.unsqueeze(-1) * (keys if wrong == "normed values" else values)).sum(0).to(x.dtype)

        sources = [x]
        for t, branch in enumerate(branches, start=1):
            f = branch(read(t))
            sources.append(sources[-1] + f if wrong == "states" else f)
        return read(len(branches) + 1)

    return run


def ancre(wrong: str = "") -> Any:
    def run(x: Tensor, weights: Weights, branches: Branches) -> Tensor:
        depth = len(branches)
        logits = weights["c"] / (1 if wrong == "no temperature" else 0.01)
        logits = logits.masked_fill(torch.ones(depth, depth, dtype=torch.bool).triu(1), -torch.inf)
        p = logits.softmax(0 if wrong == "wrong axis" else 1)
        states = [x]
        for t, branch in enumerate(branches):
            new = branch(states[-1]) + sum(p[t, i].to(x.dtype) * state for i, state in enumerate(states))
            states.append(new + states[-1] if wrong == "keep" else new)
        return states[-1]

    return run


def denseformer(wrong: str = "") -> Any:
    def run(x: Tensor, weights: Weights, branches: Branches) -> Tensor:
        states, y = [x], x
        for t, branch in enumerate(branches, start=1):
            states.append((states[-1] if wrong == "shortcut" else y) + branch(y))
            row = weights["alpha"][t - 1, : t + 1].to(x.dtype)
            y = sum(
                a * state for a, state in zip(row, reversed(states) if wrong == "reversed" else states, strict=True)
            )
        return y

    return run


def dca(wrong: str = "") -> Any:
    def run(x: Tensor, weights: Weights, branches: Branches) -> Tensor:
        def read(t: int, way: int) -> Tensor:
            stack = torch.stack(increments).to(torch.promote_types(x.dtype, torch.float32))
            scores = stack @ weights["w"][t - 1, way]
            scores = scores if wrong == "no relu" else scores.relu()
            b = weights["b"][t - 1, way, : len(stack)]
            shares = b.view(len(stack), *[1] * (x.dim() - 1), -1) + scores.unsqueeze(-1)
            return (shares * stack).sum(0).to(x.dtype)

        increments = [x]
        for t, branch in enumerate(branches, start=1):
            if branch.attention:
                q, k, v = (read(t, way) for way in ((0, 2, 1) if wrong == "k and v" else (0, 1, 2)))
                f = branch(q, k, v, q)
            else:
                f = branch(read(t, 0))
            increments.append(f)
        return read(len(branches) + 1, 0)

    return run


#: Scheme and implementation.
IMPLEMENTATIONS = {
    "mhc": mhc,
    "hc-dynamic": hc,
    "attnres": attnres,
    "ancre-ingoing": ancre,
    "denseformer": denseformer,
    "dca": dca,
}
#: Scheme, mistake, and what has to be named.
PLANTED = [
    ("mhc", "transposed", "H_res is applied transposed"),
    ("mhc", "rows first", "Sinkhorn normalises rows before columns"),
    ("mhc", "19 iterations", "Sinkhorn runs one iteration less"),
    ("mhc", "bf16 before Sinkhorn", "the logits of Sinkhorn are rounded to bfloat16"),
    ("mhc", "eps outside", "eps is outside the root of the norm"),
    ("mhc", "eps", "the norm's eps is 1e-5"),
    ("mhc", "layer norm", "the norm subtracts the mean, as a layer norm does"),
    ("mhc", "norm over each stream", "the norm is over each stream by itself, not over all of them"),
    ("mhc", "channels first", "streams are flattened channel by channel, not stream by stream"),
    ("mhc", "no factor 2", "H_post lacks its factor of 2"),
    ("mhc", "softmax", "H_pre is a softmax over streams, not a sigmoid"),
    ("mhc", "mean", "the output is the mean of the streams, not their sum"),
    ("mhc", "residual twice", "the residual is added twice: the unit's output has what it read in it"),
    ("mhc", "collapsed", "every unit takes the mean of the streams and makes n copies again"),
    ("mhc", "backward without alpha", "the backward lacks the factor alpha_res"),
    ("mhc", "tanh", "H_post is a tanh, not a sigmoid"),
    ("hc-dynamic", "transposed", "A_r is applied transposed"),
    ("hc-dynamic", "sigmoid", "the dynamic part is a sigmoid, not a tanh"),
    ("hc-dynamic", "norm over all", "the norm is over all streams at once, not over each"),
    ("attnres", "no norm", "keys are not normed"),
    ("attnres", "query of another unit", "the query of the unit before is used"),
    ("attnres", "scaled scores", "scores are divided by the root of the width"),
    ("attnres", "wrong axis", "the softmax is over tokens, not over sources"),
    ("attnres", "normed values", "normed keys are summed, not the outputs themselves"),
    ("attnres", "states", "sources are states, x_i = x_0 + f_1 + .. + f_i, not what the units returned"),
    ("ancre-ingoing", "no temperature", "the temperature is missing"),
    ("ancre-ingoing", "wrong axis", "the softmax is over destinations, not over sources"),
    ("ancre-ingoing", "keep", 'the block keeps its own shortcut, beside the mix (cascade="keep")'),
    ("denseformer", "shortcut", "the shortcut is around the newest state, not around the average"),
    ("denseformer", "reversed", "weights are listed newest first"),
    ("dca", "no relu", "the relu is missing"),
    ("dca", "k and v", "the read of the keys is the read of the values, and the other way round"),
]
