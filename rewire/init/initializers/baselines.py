"""torch's own initialisers on every weight of the graph: each part of a fused one, and each expert, by itself."""

from __future__ import annotations

import dataclasses

from rewire.init import rules
from rewire.init.registry import OfMatrices, Rule, register_initializer
from rewire.init.table import Roles, Weight


@register_initializer("kaiming")
@dataclasses.dataclass(frozen=True)
class Kaiming(OfMatrices):
    """He's normal distribution for ReLU, variance 2 / fan_in (arXiv 1502.01852)."""

    def matrix(self, weight: Weight, roles: Roles) -> Rule:
        return rules.kaiming()


@register_initializer("xavier")
@dataclasses.dataclass(frozen=True)
class Xavier(OfMatrices):
    """Glorot's uniform distribution, variance 2 / (fan_in + fan_out) (AISTATS 2010)."""

    def matrix(self, weight: Weight, roles: Roles) -> Rule:
        return rules.xavier()


@register_initializer("orthogonal")
@dataclasses.dataclass(frozen=True)
class Orthogonal(OfMatrices):
    """Random matrices with orthonormal rows or columns (arXiv 1312.6120)."""

    def matrix(self, weight: Weight, roles: Roles) -> Rule:
        return rules.orthogonal()
