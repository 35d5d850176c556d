"""Muse Spark's gate per channel between shortcut and branch."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from rewire.errors import check_positive
from rewire.topologies.base import Dims, Granularity, Start, TwoForms
from rewire.topologies.registry import register_topology
from rewire.topologies.scaled_sum import ScaledSum, Scales

Form = Literal["gate", "difference"]
_SMALLEST = 1e-3  # of 1 - b^2, as in transformers


@register_topology("variance-gate")
@dataclasses.dataclass(frozen=True)
class VarianceGate(TwoForms[Scales], ScaledSum):
    """A learned gate per channel that keeps the variance: Muse Spark's (transformers' ``MuseSparkResidualGate``).

    ``x_t = a_t * x_{t-1} + b_t * f_t`` with ``b_t = sigmoid(w_t / tau)`` and ``a_t = sqrt(1 - b_t^2)``, per channel: if
    shortcut and branch are uncorrelated and have variance 1, so has their sum. (``1 - b^2`` is at least 1e-3.) States:
    see `ScaledSum`.

    **Paper start.** ``w = 0``: ``b = 1/2``, ``a = sqrt(3) / 2``. (Muse Spark draws w from N(0, 0.02^2).)

    **Preserving start.** In the original network, ``a = b = 1``, variances add up, so no such gate equals it. So
    ``start="preserve"`` takes ``form="difference"``, which is ours: ``a_t`` and ``b_t`` are 1 plus their difference
    from the values at ``w = 0``. At ``w = 0`` this is the original network, bitwise in float32 and float64, and w has
    the same gradient as in the other form (if the branches start at zero output, only through the shortcut).

    Args:
        temperature: tau > 0.
        form: "gate", Muse Spark's, or "difference".
    """

    granularity: ClassVar[Granularity] = "sublayer"  # the model has one gate for each residual add
    needs_width: ClassVar[bool] = True
    forms: ClassVar[tuple[str, ...]] = get_args(Form)
    hindrance: ClassVar[str] = "its weights are never both 1"

    temperature: float = 0.3
    form: Form = "gate"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("temperature", self.temperature, 0.3)

    def parameters(self, dims: Dims, start: Start) -> dict[str, Tensor]:
        """``gates``, float32 [T, D]: w_1..w_T."""
        self.check_start(start)
        return {"gates": torch.zeros(dims.depth, dims.width)}

    def natural_scales(self, dims: Dims) -> dict[str, float]:
        return {"gates": self.temperature}

    def weights(self, parameters: dict[str, Tensor], dims: Dims) -> Scales:
        gates = parameters["gates"]
        shortcut, branch = self._gated(gates)
        if self.form == "gate":
            return Scales(shortcut, branch)
        first_shortcut, first_branch = self._gated(torch.zeros_like(gates))
        return Scales(1 + (shortcut - first_shortcut), 1 + (branch - first_branch))

    def _gated(self, gates: Tensor) -> tuple[Tensor, Tensor]:
        """a and b."""
        logits = gates / self.temperature
        b = torch.sigmoid(logits)
        rest = torch.sigmoid(-logits) * (1 + b)  # 1 - b^2, without cancellation near b = 1
        return rest.clamp(min=_SMALLEST).sqrt(), b
