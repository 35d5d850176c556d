"""The specification of the generated kernels: what they compute, in float64 and plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rewire.kernels.sums.spec import MixSpec


def mixes(
    spec: MixSpec,
    sources: Sequence[Tensor],
    weights: Tensor | None = None,
    scores: Sequence[Tensor] = (),
    added: Sequence[Tensor] = (),
    accumulators: Sequence[Tensor] = (),
) -> list[Tensor]:
    """``accumulator_o + sum_k (w_ok + s_ok) x_k + sum_j f_oj`` for each output o, float64 [..., D].

    Args:
        spec: counts and kinds.
        sources, accumulators: [..., D].
        added: [..., D], outputs times ``spec.added``, ordered by output.
        weights: [outputs, N] or [outputs, N, D]; the first dimension may be missing for one output.
        scores: outputs times N of [..., 1], ordered by output.
    """
    count = spec.sources
    results = []
    for o in range(spec.outputs):
        total = accumulators[o].double() if accumulators else torch.zeros((), dtype=torch.float64)
        for k, x in enumerate(sources):
            factor = 0.0 if weights is None else weights.reshape(spec.outputs, count, -1)[o, k].double()
            factor = factor + (scores[o * count + k].double() if scores else 0.0)
            total = total + (x.double() if weights is None and not scores else factor * x.double())
        results.append(total + sum(f.double() for f in added[o * spec.added : (o + 1) * spec.added]))
    return results


def normed(spec: MixSpec, mix: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """RMSNorm or LayerNorm of a mix over its last dimension, float64 [..., D]."""
    if spec.norm == "layer":
        mix = mix - mix.mean(-1, keepdim=True)
    y = mix * (mix.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()
    return y if bias is None else y + bias.double()


def dots(
    spec: MixSpec,
    sources: Sequence[Tensor],
    probes: Sequence[Tensor],
    scores: Sequence[Tensor] = (),
    means: Tensor | None = None,
) -> tuple[Tensor | None, list[Tensor]]:
    """<x_k, p_o> as gradients of weights [outputs, N] or [outputs, N, D], and of scores, outputs times N of [..., 1].

    If scores are a softmax, they are gradients of logits: ``s_ok (<x_k, p_o> - e_k)``. All are float64.

    Args:
        spec, sources, scores: as in `mixes`.
        probes: [..., D], one for each output.
        means: e, [N, ...].
    """
    products = [x.double() * p.double() for p in probes for x in sources]
    rows = tuple(range(probes[0].dim() - 1))
    per_pair = {
        "none": None,
        "scalar": torch.stack([p.sum() for p in products]),
        "channel": torch.stack([p.sum(rows) if rows else p for p in products]),
    }[spec.weights]
    per_weight = None if per_pair is None else per_pair.unflatten(0, (spec.outputs, spec.sources))
    per_score = [p.sum(-1, keepdim=True) for p in products] if spec.scores else []
    if means is not None:
        away = [*means.double().unsqueeze(-1)] * spec.outputs
        per_score = [s.double() * (dot - e) for s, dot, e in zip(scores, per_score, away, strict=True)]
    return per_weight, per_score
