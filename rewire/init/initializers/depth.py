"""Initialisers whose branches are the smaller the deeper the network is."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from rewire.errors import RewireError
from rewire.init import rules
from rewire.init.registry import Initializer, Rule, register_initializer
from rewire.init.table import LAST, MATRICES, Roles, Weight, row_of


@register_initializer("depth-scaled")
@dataclasses.dataclass(frozen=True)
class DepthScaled(Initializer):
    """GPT-2's: one standard deviation for all, divided by the root of the number of residual adds at ends of branches.

    Weights are N(0, std^2), those that a branch ends with N(0, std^2 / n), and biases zero. ``by="model"``: n is the
    number of residual adds of the model, 2 L of a transformer with L layers (GPT-2, Section 2.3 of its report).
    ``by="block"``: their number up to the end of the weight's own block, in its own row of blocks, 2 l in the l-th one
    (torchtitan's ``depth_init``, which scales the up projection of gated MLPs, too, and draws from cut normals).

    Embeddings keep their values, as with all initialisers; GPT-2's have the same standard deviation.

    Args:
        std: a positive number.
        by: "model" or "block".

    Raises:
        ValueError: an option is not one of those values.
    """

    std: float = 0.02
    by: Literal["model", "block"] = "model"

    def __post_init__(self) -> None:
        if not 0 < self.std < math.inf:
            raise ValueError(f"std={self.std!r}: it has to be a positive number, like 0.02.")
        if self.by not in ("model", "block"):
            raise ValueError(f"by={self.by!r}: it has to be one of 'model', 'block'.")

    def rule(self, weight: Weight, roles: Roles) -> Rule | None:
        if weight.role == "bias":
            return rules.zeros()
        if weight.role not in MATRICES:
            return None
        if weight.role not in LAST:
            return rules.normal(self.std)
        n = roles.branches if self.by == "model" else roles.branches_until(weight.block)
        return rules.normal(self.std / math.sqrt(n), f", n={n}")


@register_initializer("deepnorm")
@dataclasses.dataclass(frozen=True)
class DeepNorm(Initializer):
    """DeepNorm's: Xavier's normal distribution, in branches times beta but for queries and keys (arXiv 2203.00555).

    ``beta = (8 L)^(-1/4)`` for L layers, which is ``(4 n)^(-1/4)`` for n residual adds: of an encoder or a decoder by
    itself (Figure 2). Where there are both, the paper has other numbers for each, and beta has to be given. What is
    outside of branches keeps its values, and so do biases. The scale of shortcuts that belongs to it is the topology
    ``fixed-scale`` with ``shortcut_power=0.25``.

    Args:
        beta: a positive number; None: as above.

    Raises:
        ValueError: beta is neither.
    """

    beta: float | None = None

    def __post_init__(self) -> None:
        if self.beta is not None and not 0 < self.beta < math.inf:
            raise ValueError(f"beta={self.beta!r}: it has to be a positive number, or None.")

    def rule(self, weight: Weight, roles: Roles) -> Rule | None:
        if weight.role in ("q", "k"):
            return rules.xavier_normal(1.0)
        if not weight.branch or weight.role not in MATRICES or weight.role == "router":
            return None
        return rules.xavier_normal((4 * roles.branches) ** -0.25 if self.beta is None else self.beta)

    def check(self, roles: Roles) -> None:
        rows = sorted({row_of(weight.block) for weight in roles if weight.branch})
        if self.beta is None and len(rows) > 1:
            raise RewireError(
                f"deepnorm's beta is that of one row of layers, and this model has several: {', '.join(rows)}. Give "
                "the number: rewire.initialize(model, 'deepnorm', beta=0.2)."
            )
