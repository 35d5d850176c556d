"""Initialisers with zeros at the end of branches: in their last weights, or in their last norms."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from rewire.errors import RewireError
from rewire.init import rules
from rewire.init.functional import zero_hadamard_
from rewire.init.registry import Initializer, OfMatrices, Rule, register_initializer
from rewire.init.table import ZERO, Roles, Weight


@register_initializer("zero")
@dataclasses.dataclass(frozen=True)
class Zero(OfMatrices):
    """ZerO: identities and Hadamard matrices, zero at the end of branches and in the classifier (arXiv 2110.12661).

    Biases become zero, as in the authors' code.
    """

    zero: ClassVar[frozenset[str]] = ZERO

    def matrix(self, weight: Weight, roles: Roles) -> Rule:
        return Rule("ZerO", lambda values, _: zero_hadamard_(values, weight.groups))


@register_initializer("zero-gamma")
@dataclasses.dataclass(frozen=True)
class ZeroGamma(Initializer):
    """Zero gain in the norm at the end of a branch; all else stays as it is (arXiv 1706.02677, Section 5.1)."""

    def rule(self, weight: Weight, roles: Roles) -> Rule | None:
        return rules.constant(-weight.offset) if weight.role == "last norm" else None

    def check(self, roles: Roles) -> None:
        if not any(weight.role == "last norm" for weight in roles):
            raise RewireError(
                "zero-gamma sets the gain of the norm that a branch ends with, and no branch of this model ends with "
                "one: use 'idinit', 'mzas' or 'zero', which act on its last weight."
            )
