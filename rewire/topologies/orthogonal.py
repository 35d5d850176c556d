"""Orthogonal residual updates: a branch adds only its part orthogonal to the state (arXiv 2505.11881)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from rewire.mixes.mix import Mix, pending_mix
from rewire.topologies.base import Dims, FirstOrder, Granularity, Start, States, TwoForms, repeatable, total
from rewire.topologies.registry import register_topology

Form = Literal["orthogonal", "gated"]
_EPS = 1e-6  # added to the squared norm in the denominator, as in the authors' code


@register_topology("orthogonal")
@dataclasses.dataclass(frozen=True)
class OrthogonalUpdate(TwoForms[Tensor | None], FirstOrder[Tensor | None]):
    """Orthogonal residual update: the part of a branch along the state is not added (arXiv 2505.11881).

    ``x_t = x_{t-1} + f_t - s_t x_{t-1}`` with ``s_t = <x_{t-1}, f_t> / (|x_{t-1}|^2 + 1e-6)``, per token: a branch adds
    nothing along the state. Nothing is learned. Unit t reads ``x_{t-1}``, the only state; the trunk's output is
    ``x_T``. Post-norm blocks norm the new state. Products are over the channels, in images at each pixel (for images,
    the authors' code has a form over all pixels).

    **Paper start.** The formula has no weights to start.

    **Preserving start.** There is none. So ``start="preserve"`` takes ``form="gated"``, which is ours:
    ``x_t = x_{t-1} + f_t - c_t s_t x_{t-1}`` with a learned scalar c_t that starts at 0: the original network, bitwise
    in float32 and float64 if there is one branch. Its paper start is ``c = 1``, the paper's formula.

    Args:
        form: "orthogonal", the paper's, or "gated".
    """

    granularity: ClassVar[Granularity] = "sublayer"  # attention and MLP each have their own
    needs_width: ClassVar[bool] = True
    of_states: ClassVar[frozenset[str]] = frozenset({"gates"})
    forms: ClassVar[tuple[str, ...]] = get_args(Form)
    hindrance: ClassVar[str] = "it leaves out a part of each branch"

    form: Form = "orthogonal"

    def parameters(self, dims: Dims, start: Start) -> dict[str, Tensor]:
        """``gates``, float32 [T]: c_1..c_T, if they are learned."""
        self.check_start(start)
        return {"gates": torch.full((dims.depth,), float(start == "paper"))} if self.form == "gated" else {}

    def weights(self, parameters: dict[str, Tensor], dims: Dims) -> Tensor | None:
        """c, float32 [T], if they are learned."""
        return parameters["gates"] if self.form == "gated" else None

    @repeatable
    def merge(self, states: States, weights: Tensor | None, t: int, *branches: Tensor) -> Mix:
        (x,), precise = states, torch.promote_types(states[0].dtype, torch.float32)
        wide = x.to(precise)
        along = (wide * total(branches)).sum(-1, keepdim=True)
        share = along / (wide.square().sum(-1, keepdim=True) + _EPS)
        kept = 1 - (share if weights is None else weights[t - 1] * share)
        return pending_mix((x,), None, added=branches, scores=(kept,))
