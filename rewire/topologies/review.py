"""Review residuals: a gate computed from state and branch scales the branch (arXiv 2606.31859)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from rewire.mixes.again import made_again, merged_again, sparing
from rewire.mixes.tokens import rms_norm
from rewire.topologies.base import Dims, FirstOrder, Granularity, Named, Start, States, TwoForms, total
from rewire.topologies.registry import register_topology

Form = Literal["sigmoid", "difference"]
_EPS = 1e-5  # of both norms, as in the author's code


@register_topology("review")
@dataclasses.dataclass(frozen=True)
class Review(TwoForms[Named], FirstOrder[Named]):
    """Review residuals: each branch is scaled by a gate that depends on the state and on itself (arXiv 2606.31859).

    ``x_t = x_{t-1} + g_t * f_t`` with ``g_t = sigmoid(W_t [rmsnorm(x_{t-1}), rmsnorm(f_t)] + b_t)``, a number for each
    token and channel. Unit t reads ``x_{t-1}``, the only state; the trunk's output is ``x_T``. Post-norm blocks norm
    the sum. (b is in the author's code, not in the paper's formula.) W_t is D x 2D: this is the only topology with
    weights as large as the model's own. Their products are in float32, or in autocast's dtype.

    **Paper start.** ``W = b = 0``, so ``g = 1/2``.

    **Preserving start.** A sigmoid is never 1. So ``start="preserve"`` takes ``form="difference"``, which is ours:
    ``1 + g - 1/2``. At ``W = b = 0`` this is the original network, bitwise in float32 and float64, and W and b have the
    same gradients as in the other form. If the branches start at zero output, these come one step later.

    Args:
        form: "sigmoid", the paper's, or "difference".
    """

    granularity: ClassVar[Granularity] = "sublayer"  # attention and MLP each have their own
    needs_width: ClassVar[bool] = True
    matrices: ClassVar[frozenset[str]] = frozenset({"state", "update"})
    of_states: ClassVar[frozenset[str]] = frozenset({"bias"})
    of_vectors: ClassVar[frozenset[str]] = matrices
    forms: ClassVar[tuple[str, ...]] = get_args(Form)
    hindrance: ClassVar[str] = "a sigmoid is never 1"

    form: Form = "sigmoid"

    def parameters(self, dims: Dims, start: Start) -> dict[str, Tensor]:
        """``state`` and ``update``, the transposed halves of W, float32 [T, D, D]; ``bias``, b, float32 [T, D]."""
        self.check_start(start)
        square = dims.depth, dims.width, dims.width
        return {"state": torch.zeros(square), "update": torch.zeros(square), "bias": torch.zeros(square[:2])}

    def merge(self, states: States, weights: Named, t: int, *branches: Tensor) -> Tensor:
        (x,), f, unit = states, total(branches), t - 1
        logits = _mapped(x, weights["state"][unit]) + _mapped(f, weights["update"][unit])
        gate = torch.sigmoid(logits + weights["bias"][unit])
        return merged_again(self._added, x, (gate, *branches))

    def _added(self, x: Tensor, gate: Tensor, *branches: Tensor) -> Tensor:
        f = total(branches)
        if self.form == "difference":
            return total((x, *branches)) + ((gate - 0.5) * f).to(x.dtype)
        return x + (gate * f).to(x.dtype)


def _mapped(x: Tensor, weight: Tensor) -> Tensor:
    with sparing(x):
        normed = made_again(lambda x: rms_norm(x, _EPS), x)
        return normed @ weight.to(normed.dtype)
