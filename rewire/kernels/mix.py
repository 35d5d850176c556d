"""The weighted sum of states that dense topologies are made of, in plain torch."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor


def mix(
    sources: Sequence[Tensor],
    weights: Sequence[Tensor | float] | Tensor | None,
    added: Sequence[Tensor] = (),
    scores: Sequence[Tensor] | None = None,
) -> Tensor:
    """``sum_i (w_i + s_i) x_i + sum_k f_k``, accumulated in float32 (float64 for float64) and rounded once.

    The forward holds one accumulator and no weighted copy of a source; backward needs only the sources
    themselves, which the topology keeps anyway.

    Args:
        sources: tensors x_i of one shape [..., D], any floating dtype; at least one.
        weights: one float32 tensor per source, a scalar [] or one per channel [D], or a number (a constant, for
            which backward needs no source); or all in one tensor [N] or [N, D]. None: zero, the scores are all there
            is.
        added: tensors f_k that broadcast to the sources' shape, added with weight one (branch outputs).
        scores: weights per token, one float32 tensor [..., 1] per source.

    Returns:
        [..., D] in the dtype that plain adds of sources and added would have.

    Raises:
        ValueError: the numbers of sources and weights differ, or there are none.
    """
    factors = [] if weights is None else list(weights.unbind() if isinstance(weights, Tensor) else weights)
    terms = list(zip(sources, factors, strict=False)) + list(zip(sources, scores or (), strict=False))
    if not terms or any(len(given) not in (0, len(sources)) for given in (factors, scores or ())):
        raise ValueError(
            f"mix needs one weight per source, got {len(sources)} sources, {len(factors)} weights and "
            f"{len(scores or ())} scores."
        )
    dtype = functools.reduce(torch.promote_types, [x.dtype for x in (*sources, *added)])
    # Of shape [1] a weight takes part in type promotion (of shape [] it would not): a bfloat16 source times
    # it is float32, with no float32 copy of the source kept for backward.
    precision = torch.promote_types(dtype, torch.float32)
    result = _scaled(*terms[0], precision)
    for source, weight in terms[1:]:
        if isinstance(weight, Tensor):
            result.addcmul_(source, _dimensional(weight))
        else:
            result.add_(source, alpha=weight)
    for branch in added:
        result.add_(branch)
    return result.to(dtype)


def _scaled(source: Tensor, weight: Tensor | float, precision: torch.dtype) -> Tensor:
    if isinstance(weight, Tensor):
        return source * _dimensional(weight.to(precision))
    return source.to(precision) * weight


def _dimensional(weight: Tensor) -> Tensor:
    return weight.reshape(1) if weight.dim() == 0 else weight
