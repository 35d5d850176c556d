"""Mistakes that people make, each as a change to the text of a reference: what they compute is tried against results."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from rewire.conformance.schemes import Reference


@dataclasses.dataclass(frozen=True)
class Mistake:
    """A known mistake.

    Attributes:
        says: what is wrong, in words.
        changes: what stands in the reference, and what stands there with the mistake, in turn.
    """

    says: str
    changes: tuple[tuple[str, str], ...]


def _m(says: str, *changes: str) -> Mistake:
    return Mistake(says, tuple(zip(changes[::2], changes[1::2], strict=True)))


def mistakes_of(file: str) -> tuple[Mistake, ...]:
    """Those known of a reference."""
    return KNOWN.get(file, ())


def mistaken(known: Reference, chosen: Sequence[Mistake]) -> Reference | None:
    """The reference with these mistakes; None if they change the same words."""
    text = known.text
    for old, new in (change for mistake in chosen for change in mistake.changes):
        if old not in text:
            return None
        text = text.replace(old, new)
    return dataclasses.replace(known, text=text)


_NORM_ALL = "(x**2).mean(-1, keepdim=True)"
_PASSES = "({0} * {1}.detach() + ({1} - {1}.detach()))"  # {0} * {1}, whose backward hands {1} the gradient unscaled

KNOWN: Mapping[str, tuple[Mistake, ...]] = {
    "mhc": (
        _m("H_res is applied transposed", "H_res[token][o, i] * H[token, i]", "H_res[token][i, o] * H[token, i]"),
        _m(
            "Sinkhorn normalises rows before columns",
            "M = M / M.sum(0, keepdim=True) + eps",
            "M = M / M.sum(1, keepdim=True) + eps",
            "M = M / (M.sum(0, keepdim=True) + eps)",
            "M = M / (M.sum(9, keepdim=True) + eps)",
            "M = M / (M.sum(1, keepdim=True) + eps)",
            "M = M / (M.sum(0, keepdim=True) + eps)",
            "M = M / (M.sum(9, keepdim=True) + eps)",
            "M = M / (M.sum(1, keepdim=True) + eps)",
        ),
        _m("Sinkhorn runs one iteration less", "range(iterations)", "range(iterations - 1)"),
        _m("Sinkhorn runs one iteration more", "range(iterations)", "range(iterations + 1)"),
        _m("Sinkhorn starts from softmax over rows", "torch.exp(z - z.max())", "torch.softmax(z, 1)"),
        _m("H_post lacks its factor of 2", "magnitude * torch.sigmoid(z_post)", "torch.sigmoid(z_post)"),
        _m("H_pre has the factor of 2 that is H_post's", "torch.sigmoid(z_pre) + eps", "2 * torch.sigmoid(z_pre) + eps"),
        _m("H_pre is a tanh, not a sigmoid", "torch.sigmoid(z_pre)", "torch.tanh(z_pre)"),
        _m("H_pre is a softmax over streams, not a sigmoid", "torch.sigmoid(z_pre)", "torch.softmax(z_pre, 0)"),
        _m("H_post is a tanh, not a sigmoid", "torch.sigmoid(z_post)", "torch.tanh(z_post)"),
        _m("H_post is a softmax over streams, not a sigmoid", "torch.sigmoid(z_post)", "torch.softmax(z_post, 0)"),
        _m("the norm's eps is outside the root", "torch.sqrt((x**2).mean() + eps)", "(torch.sqrt((x**2).mean()) + eps)"),
        _m("the norm's eps is 1e-5", "(x**2).mean() + eps", "(x**2).mean() + 1e-5"),
        _m("the norm's eps is 1e-8", "(x**2).mean() + eps", "(x**2).mean() + 1e-8"),
        _m("the norm has no eps", "(x**2).mean() + eps", "(x**2).mean()"),
        _m(
            "the norm is over each stream, not over all of them",
            "normed = rms_norm(H[token].flatten(), norm_eps)  # eq. 7",
            "normed = torch.stack([rms_norm(h, norm_eps) for h in H[token]]).flatten()",
        ),
        _m("there is no norm before the gates", "return x / torch.sqrt((x**2).mean() + eps)", "return x"),
        _m(
            "the norm subtracts the mean (LayerNorm)",
            "return x / torch.sqrt((x**2).mean() + eps)",
            "x = x - x.mean(); return x / torch.sqrt((x**2).mean() + eps)",
        ),
        _m("the streams are flattened channel by channel", "rms_norm(H[token].flatten()", "rms_norm(H[token].T.flatten()"),
        _m("the logits of H_res are laid out transposed", 'w["phi_res"], 1) + w["b_res"]', 'w["phi_res"], 1).T + w["b_res"].T'),
        _m("the output is the mean of the streams, not their sum", "H.sum(1) if output", "H.mean(1) if output"),
        _m("the output is the first stream", "H.sum(1) if output", "H[:, 0] if output"),
        _m("what the unit reads is added once more (a residual inside the branch)", "f = branch(read)", "f = branch(read) + read"),
        _m("H_res is the identity", "H_res.append(sinkhorn(z_res, iterations, eps))", "H_res.append(torch.eye(n, dtype=x.dtype))"),
        _m("H_res is applied to streams that hold the branch's output already", "mixed[o] + H_post[token][o] * f[token] for o", "sum(H_res[token][o, i] * (H[token, i] + H_post[token][i] * f[token]) for i in range(n)) for o"),
        _m("the streams start as x_0 and zeros", "H = torch.stack([x] * n, 1)", "H = torch.stack([x] + [0 * x] * (n - 1), 1)"),
        _m("the streams are collapsed and expanded again in every unit", "H = kept(torch.stack(new))", "H = kept(torch.stack(new)); H = H.mean(1, keepdim=True).expand(-1, n, -1)"),
        _m("Sinkhorn works in bfloat16", "torch.exp(z - z.max())", "torch.exp((z - z.max()).bfloat16())", "    return M\n", "    return M.to(z.dtype)\n"),
        _m("logits of Sinkhorn are rounded to bfloat16", "torch.exp(z - z.max())", "torch.exp((z - z.max()).bfloat16().to(z.dtype))"),
        _m("the gates are rounded to bfloat16", "normed = rms_norm(H[token].flatten(), norm_eps)  # eq. 7", "normed = rms_norm(H[token].flatten(), norm_eps).bfloat16().to(x.dtype)"),
        _m("b_res is not added", ' + w["b_res"]', ""),
        _m("alpha_res is missing", 'w["alpha_res"] * torch.tensordot', "torch.tensordot"),
        _m("alpha_pre is missing", 'w["alpha_pre"] * (', "("),
        _m("alpha_post is missing", 'w["alpha_post"] * (', "("),
        _m("alpha multiplies b, too", '(normed @ w["phi_pre"]) + w["b_pre"]', '(normed @ w["phi_pre"] + w["b_pre"])', '(normed @ w["phi_post"]) + w["b_post"]', '(normed @ w["phi_post"] + w["b_post"])', 'torch.tensordot(normed, w["phi_res"], 1) + w["b_res"]', '(torch.tensordot(normed, w["phi_res"], 1) + w["b_res"])'),
        _m("no gradient passes through the gates to the streams", "rms_norm(H[token].flatten(), norm_eps)  # eq. 7", "rms_norm(H[token].flatten(), norm_eps).detach()"),
        _m("no gradient passes through Sinkhorn", "sinkhorn(z_res, iterations, eps))", "sinkhorn(z_res, iterations, eps).detach())"),
        _m("the backward of Sinkhorn is that of its last iteration", "        M = M / (M.sum(1, keepdim=True) + eps)\n", "        M = M / (M.sum(1, keepdim=True) + eps)\n        M = torch.exp(z - z.max() + (torch.log(M) - z + z.max()).detach()) if iteration == iterations - 2 else M\n"),
        _m("the backward lacks alpha_res", 'w["alpha_res"] * torch.tensordot(normed, w["phi_res"], 1)', '(w["alpha_res"] * (P := torch.tensordot(normed, w["phi_res"], 1)).detach() + P - P.detach())'),
        _m("the backward lacks H_post's factor of 2", "magnitude * torch.sigmoid(z_post)", "((magnitude - 1) * torch.sigmoid(z_post).detach() + torch.sigmoid(z_post))"),
    ),
}
