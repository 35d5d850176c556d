"""Deep Delta Learning: each unit overwrites the state along one direction (arXiv 2601.00417)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from rewire.mixes.mix import Mix, pending_mix
from rewire.mixes.tokens import project, project_normed
from rewire.topologies.base import Dims, FirstOrder, Granularity, Named, Start, States, TwoForms, repeatable, total
from rewire.topologies.registry import register_topology

Form = Literal["delta", "difference"]
_EPS = 1e-6  # lower bound on the branch output's norm in the division, as in the authors' code


@register_topology("ddl")
@dataclasses.dataclass(frozen=True)
class DDL(TwoForms[Named], FirstOrder[Named]):
    """Deep Delta Learning: the branch names a direction, and the state's part along it is replaced (arXiv 2601.00417).

    ``x_t = (I - b_t k_t k_t^T) x_{t-1} + b_t v_t k_t`` per token, with ``k_t = f_t / |f_t|``, a gate
    ``b_t = 2 sigmoid(w_t . rmsnorm(x_{t-1}) + s_t)`` between 0 and 2, and a value ``v_t = u_t . x_{t-1} + c_t``. Unit t
    reads ``x_{t-1}``, the only state; the trunk's output is ``x_T``. Post-norm blocks norm the new state.

    This is the paper's case ``d_v = 1``, in which states are vectors, as in the authors' model/DDL-vdim1.py. Their gate
    is one linear map of the block's normed input; their value is the constant 2, or optionally the map above.

    **Paper start.** ``w = s = 0``, so ``b = 1``: the state's part along k is fully replaced; ``u = 0``, ``c = 2``. A
    branch that starts at zero output has no direction: its gradient is 1e6 times too large.

    **Preserving start.** No constant gate and value give ``x + f``. So ``start="preserve"`` takes
    ``form="difference"``, which is ours: ``x_t = x_{t-1} + f_t + (b_t - 1) (v_t - k_t . x_{t-1}) k_t``. With the same
    start values it is the original network, bitwise in float32 and float64 if there is one branch. w and s have full
    gradients from the first step on, u and c one step later, through the gate.

    Args:
        form: "delta", the paper's, or "difference".
    """

    granularity: ClassVar[Granularity] = "sublayer"  # attention and MLP each have their own
    needs_width: ClassVar[bool] = True
    of_states: ClassVar[frozenset[str]] = frozenset({"gate_bias", "value_bias"})
    of_vectors: ClassVar[frozenset[str]] = frozenset({"gate", "value"})
    forms: ClassVar[tuple[str, ...]] = get_args(Form)
    hindrance: ClassVar[str] = "it replaces a part of the state"

    form: Form = "delta"

    def parameters(self, dims: Dims, start: Start) -> dict[str, Tensor]:
        """``gate``, ``gate_bias``, ``value`` and ``value_bias``, float32: w [T, D], s [T], u [T, D], c [T]."""
        self.check_start(start)
        return {
            "gate": torch.zeros(dims.depth, dims.width),
            "gate_bias": torch.zeros(dims.depth),
            "value": torch.zeros(dims.depth, dims.width),
            "value_bias": torch.full((dims.depth,), 2.0),
        }

    @repeatable
    def merge(self, states: States, weights: Named, t: int, *branches: Tensor) -> Mix:
        (x,), f, unit = states, total(branches), t - 1
        gate = self._gate(project_normed(x, weights["gate"][unit, :, None]) + weights["gate_bias"][unit])
        value = project(x, weights["value"][unit, :, None]) + weights["value_bias"][unit]
        size = torch.linalg.vector_norm(f, dim=-1, keepdim=True, dtype=gate.dtype).clamp(min=_EPS)
        along = (f.to(gate.dtype) * x).sum(-1, keepdim=True) / size  # k . x
        share = gate * (value - along) / size  # of f, per token
        return pending_mix((f,), None, added=(x,), scores=(share if self.form == "delta" else 1 + share,))

    def matrix(self, weights: Named, dims: Dims) -> Tensor:
        """float32 [T, T]: the mean diagonal of the D x D matrix that multiplies each state, with w = 0."""
        return torch.diag(1 - self._gate(weights["gate_bias"]) / dims.width)

    def _gate(self, logits: Tensor) -> Tensor:
        """b, or in difference form ``b - 1``."""
        gate = 2 * torch.sigmoid(logits)
        return gate if self.form == "delta" else gate - 1
