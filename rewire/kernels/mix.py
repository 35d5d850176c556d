"""The weighted sum of states that dense topologies are made of, in plain torch."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor


def mix(sources: Sequence[Tensor], weights: Sequence[Tensor] | Tensor, added: Sequence[Tensor] = ()) -> Tensor:
    """``sum_i w_i x_i + sum_k f_k``, accumulated in float32 (float64 for float64) and rounded once.

    The forward holds one accumulator and no weighted copy of a source; backward needs only the sources
    themselves, which the topology keeps anyway.

    Args:
        sources: tensors x_i of one shape [..., D], any floating dtype; at least one.
        weights: one float32 tensor [] per source, or one float32 tensor [N].
        added: tensors f_k that broadcast to the sources' shape, added with weight one (branch outputs).

    Returns:
        [..., D] in the dtype that plain adds of sources and added would have.

    Raises:
        ValueError: the numbers of sources and weights differ, or there are none.
    """
    scalars = weights.unbind() if isinstance(weights, Tensor) else weights
    if not sources or len(sources) != len(scalars):
        counts = f"{len(sources)} sources and {len(scalars)} weights"
        raise ValueError(f"mix needs one weight per source, got {counts}.")
    dtype = functools.reduce(torch.promote_types, [x.dtype for x in (*sources, *added)])
    # Of shape [1] a weight takes part in type promotion (of shape [] it would not): a bfloat16 source times
    # it is float32, with no float32 copy of the source kept for backward.
    total = sources[0] * scalars[0].to(torch.promote_types(dtype, torch.float32)).reshape(1)
    for source, weight in zip(sources[1:], scalars[1:], strict=True):
        total.addcmul_(source, weight)
    for branch in added:
        total.add_(branch)
    return total.to(dtype)
