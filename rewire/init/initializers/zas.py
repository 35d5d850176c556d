"""Zero-asymmetric initialisation, its form for nonlinear networks, and its baseline."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

from rewire.init import rules
from rewire.init.functional import identity_, near_identity_
from rewire.init.registry import OfMatrices, Rule, register_initializer
from rewire.init.table import LAST, MATRICES, ZERO, Roles, Weight


@register_initializer("zas")
@dataclasses.dataclass(frozen=True)
class ZAS(OfMatrices):
    """ZAS: each layer the identity, the output layer zero (arXiv 1911.00645, Equation 3.1).

    In a residual network the shortcut is the identity and the branch is zero (Section 3): weights at the end of a
    branch are zero, all others the identity, padded with zeros. Biases become zero.
    """

    zero: ClassVar[frozenset[str]] = ZERO

    def matrix(self, weight: Weight, roles: Roles) -> Rule | None:
        return Rule("identity", lambda values, _: identity_(values, weight.groups))


@register_initializer("mzas")
@dataclasses.dataclass(frozen=True)
class ModifiedZAS(OfMatrices):
    """mZAS: the end of each branch and the output layer zero, others N(0, 1/D) (arXiv 1911.00645, Equation 6.2).

    D is the width of the stream, times the taps of a kernel, which the paper does not treat; if it is unknown, the
    weight's number of inputs. Biases become zero: the paper's layers have none.
    """

    zero: ClassVar[frozenset[str]] = ZERO

    def matrix(self, weight: Weight, roles: Roles) -> Rule | None:
        taps = 1 if weight.layout.stacked else math.prod(weight.shape[2:])
        width = weight.width or roles.width
        return rules.normal((width * taps if width else weight.fan_in) ** -0.5)


@register_initializer("near-identity")
@dataclasses.dataclass(frozen=True)
class NearIdentity(OfMatrices):
    """Each layer the identity plus N(0, 1/(d L)) (arXiv 1911.00645, Equation 5.1).

    d is the number of inputs of the weight and L the number of weights of the model. At the end of a branch, the
    shortcut is the identity, and weights are N(0, 1/(d L)). Biases become zero.
    """

    zero: ClassVar[frozenset[str]] = frozenset({"bias"})

    def matrix(self, weight: Weight, roles: Roles) -> Rule | None:
        std = (weight.fan_in * sum(other.role in MATRICES for other in roles)) ** -0.5
        if weight.role in LAST:
            return rules.normal(std)
        return Rule(
            f"identity + normal(std={std:.3g})", lambda values, g: near_identity_(values, std, g, weight.groups)
        )
