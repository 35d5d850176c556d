"""Initialisers of networks whose branches have a learned scale that starts at zero."""

from __future__ import annotations

import dataclasses

from rewire.errors import RewireError
from rewire.init import rules
from rewire.init.registry import OfMatrices, Rule, register_initializer
from rewire.init.table import Roles, Weight


def _is_scale(weight: Weight) -> bool:
    """Whether a weight is a scale: the model's own, or one that rezero, skipinit or layerscale added."""
    return weight.role == "scale" or (weight.role == "connection" and weight.name.endswith(".scales"))


@dataclasses.dataclass(frozen=True)
class _Scaled(OfMatrices):
    def rule(self, weight: Weight, roles: Roles) -> Rule | None:
        return rules.zeros() if _is_scale(weight) else super().rule(weight, roles)

    def check(self, roles: Roles) -> None:
        if not any(map(_is_scale, roles)):
            name = type(self).__name__.lower()
            raise RewireError(
                f"{name} sets a learned scale on each branch to zero, and the branches of this model have none: "
                f"rewire.compile(model, '{name}', init='{name}') adds it."
            )


@register_initializer("skipinit")
class SkipInit(_Scaled):
    """SkipInit: zero scales on the branches, He's distribution for the weights (arXiv 2002.10444)."""

    def matrix(self, weight: Weight, roles: Roles) -> Rule:
        return rules.kaiming()


@register_initializer("rezero")
class ReZero(_Scaled):
    """ReZero: zero scales on the branches, Xavier's distribution for the weights (arXiv 2003.04887)."""

    def matrix(self, weight: Weight, roles: Roles) -> Rule:
        return rules.xavier()
