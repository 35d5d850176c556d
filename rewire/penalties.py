"""Regularisers of connection weights, to be added to the loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rewire.connection import connections
from rewire.errors import RewireError, UnsupportedTopology


def sparsity_penalty(model: nn.Module, q: float = 2.0) -> Tensor:
    """Mean Tsallis entropy of the normalised connection weights of ``model``; 0 where each is one-hot.

    ``S_q(p) = (1 - sum_i p_i^q) / (q - 1)`` of each softmax p, in the limit q = 1 Shannon's entropy, averaged over all
    softmaxes of at least two entries, so that its strength does not depend on the depth. The first version of ANCRe
    (arXiv 2602.09009v1, Section 4.1) suggests it to make connections sparse:
    ``loss = loss + 0.01 * rewire.sparsity_penalty(model)``. Uniform weights, the paper start, are its maximum: there
    its own gradient is zero, and the loss has to make the first step.

    Args:
        model: rewired with a topology whose weights are normalised (``ancre-ingoing``, ``ancre-outgoing``).
        q: entropic index, above 0; the larger, the less small weights count.

    Returns:
        Scalar, float32, with gradients to the connection weights.

    Raises:
        RewireError: the model was not rewired.
        UnsupportedTopology: no trunk has normalised weights of at least two entries.
        ValueError: q is not above 0.
    """
    if not q > 0:
        raise ValueError(f"q={q!r}: the entropic index has to be above 0.")
    found = connections(model)
    if not found:
        raise RewireError(f"{type(model).__name__} was not rewired: it has no connection weights.")
    entropies = []
    for connection in found.values():
        layout = connection.layout
        for p in layout.topology.distributions(connection.effective(), layout.dims):
            if p.numel() > 1:
                entropies.append(_tsallis(p, q))
    if not entropies:
        raise UnsupportedTopology(
            "sparsity_penalty needs connection weights that are normalised by a softmax: none of the trunks "
            + ", ".join(f"'{name}' ({type(c.layout.topology).__name__})" for name, c in found.items())
            + " has such weights. Use ancre-ingoing or ancre-outgoing."
        )
    device = entropies[0].device
    return torch.stack([entropy.to(device) for entropy in entropies]).mean()


def _tsallis(p: Tensor, q: float) -> Tensor:
    p = p.clamp_min(torch.finfo(p.dtype).tiny)  # an entry that underflowed has an infinite slope for q <= 1
    if q == 1:
        return torch.special.entr(p).sum()
    return (1 - p.pow(q).sum()) / (q - 1)
