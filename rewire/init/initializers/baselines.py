"""torch's own initialisers, on every weight of the graph: each part of a fused one, each expert by itself."""

from __future__ import annotations

import dataclasses

from rewire.init import rules
from rewire.init.registry import Initializer, Rule, register_initializer
from rewire.init.table import MATRICES, Roles, Weight


@register_initializer("kaiming")
@dataclasses.dataclass(frozen=True)
class Kaiming(Initializer):
    """He's normal distribution for ReLU, variance 2 / fan_in (arXiv 1502.01852)."""

    def rule(self, weight: Weight, roles: Roles) -> Rule | None:
        return rules.kaiming() if weight.role in MATRICES else None


@register_initializer("xavier")
@dataclasses.dataclass(frozen=True)
class Xavier(Initializer):
    """Glorot's uniform distribution, variance 2 / (fan_in + fan_out) (AISTATS 2010)."""

    def rule(self, weight: Weight, roles: Roles) -> Rule | None:
        return rules.xavier() if weight.role in MATRICES else None


@register_initializer("orthogonal")
@dataclasses.dataclass(frozen=True)
class Orthogonal(Initializer):
    """Random matrices with orthonormal rows or columns (arXiv 1312.6120)."""

    def rule(self, weight: Weight, roles: Roles) -> Rule | None:
        return rules.orthogonal() if weight.role in MATRICES else None
