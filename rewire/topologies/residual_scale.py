"""Learned scales and biases on shortcuts, as in Doge, or on shortcuts and branches, as in ZAYA1."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from rewire.topologies.base import Dims, Granularity, Start
from rewire.topologies.registry import register_topology
from rewire.topologies.scaled_sum import ScaledSum, Scales


@register_topology("residual-scale")
@dataclasses.dataclass(frozen=True)
class ResidualScale(ScaledSum):
    """A learned scale per channel on each shortcut, optionally also on each branch, and biases (Doge, ZAYA1).

    ``x_t = a_t * (x_{t-1} + u_t) + b_t * (f_t + v_t)``, all four in R^D. By default ``b = 1`` and ``u = v = 0`` are
    fixed: Doge (transformers' ``DogeDecoderLayer``). With ``branch=True`` b is learned; with ``bias=True`` u is, and so
    is v if b is. All four together are ZAYA1 (``ZayaResidualScaling``). A scale only on the branch is ``layerscale``, a
    number only on the shortcut ``ancre-cascaded``. States: see `ScaledSum`.

    **Both starts** are those of the models: scales 1, biases 0, the original network, bitwise in float32 and float64.
    All have full gradients from the first step on (b from the second, if the branches start at zero output).

    Args:
        branch: whether to learn scales of the branches, too.
        bias: whether to learn biases, too.
    """

    granularity: ClassVar[Granularity] = "sublayer"  # both models have one for each residual add
    needs_width: ClassVar[bool] = True
    of_states: ClassVar[frozenset[str]] = frozenset({"shortcut", "branch"})

    branch: bool = False
    bias: bool = False

    def parameters(self, dims: Dims, start: Start) -> dict[str, Tensor]:
        """``shortcut`` and ``shortcut_bias``, a and u; ``branch`` and ``branch_bias``, b and v: float32 [T, D]."""
        scaled = ("shortcut", "branch") if self.branch else ("shortcut",)
        values = {name: torch.ones(dims.depth, dims.width) for name in scaled}
        if self.bias:
            values |= {f"{name}_bias": torch.zeros(dims.depth, dims.width) for name in scaled}
        return values

    def weights(self, parameters: dict[str, Tensor], dims: Dims) -> Scales:
        shortcut, branch = parameters["shortcut"], parameters.get("branch")
        if not self.bias:
            return Scales(shortcut, branch)
        shift = shortcut * parameters["shortcut_bias"]
        if branch is not None:
            shift = shift + branch * parameters["branch_bias"]
        return Scales(shortcut, branch, shift)
