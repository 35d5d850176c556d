"""Fixup: weights inside branches scaled down by the number of branches."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, Literal

from rewire.errors import check_choice
from rewire.init import rules
from rewire.init.registry import OfMatrices, Rule, register_initializer
from rewire.init.table import ZERO, Roles, Weight


@register_initializer("fixup")
@dataclasses.dataclass(frozen=True)
class Fixup(OfMatrices):
    """Fixup: He's variance scaled down inside branches, zero at their end and in the classifier (arXiv 1901.09321).

    Weights inside a branch get He's standard deviation times ``L^(-1 / (2m - 2))``, with L branches in the model and m
    weights on the longest path through this one (Section 3, rule 2). Biases become zero. Fixup's learned scalars (rule
    3), which replace the norms that it leaves out, are not added: that is a change of architecture.

    He's standard deviation is ``sqrt(2 / fan)``. The paper leaves open which fan; its authors' code takes the number of
    outputs of an input (fan-out) for the convolutions in branches.

    Args:
        fan: "in", or "out".
    """

    zero: ClassVar[frozenset[str]] = ZERO

    fan: Literal["in", "out"] = "in"

    def __post_init__(self) -> None:
        check_choice("fan", self.fan, ("in", "out"))

    def matrix(self, weight: Weight, roles: Roles) -> Rule | None:
        std = math.sqrt(2.0 / (weight.fan_in if self.fan == "in" else weight.fan_out))  # He's
        if not weight.branch:
            return rules.normal(std)
        scale = roles.branches ** (-1 / (2 * max(weight.depth, 2) - 2))
        return rules.normal(std * scale, f", L={roles.branches}, m={weight.depth}")
