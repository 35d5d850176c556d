"""Present weights times factors by role, such as a study finds for a plain model."""

from __future__ import annotations

import dataclasses

from rewire.errors import check_positive
from rewire.init import rules
from rewire.init.registry import Initializer, Rule, register_initializer
from rewire.init.table import LAST, Roles, Weight

#: Factor -> the roles whose weights it multiplies.
SCALED_ROLES = {"embedding": frozenset({"embedding", "first"}), "branch": LAST}


@register_initializer("scaled")
@dataclasses.dataclass(frozen=True)
class Scaled(Initializer):
    """The present weights times a factor for embeddings and one for the ends of branches.

    These two scales affect the training of a small model more than most topologies do. `rewire.study` searches both for
    the plain model: ``found.scales`` is this initialiser with the result.

    Attributes:
        embedding: factor on the weights that make the trunk's input: tables of embeddings, and first layers.
        branch: factor on the weights at the end of branches.

    Raises:
        ValueError: a factor is not positive.

    Example:
        >>> report = rewire.initialize(copy.deepcopy(model), "scaled", branch=4.0)
        >>> {rule for _, rule in report.applied}
        {'times 4'}
    """

    embedding: float = 1.0
    branch: float = 1.0

    def __post_init__(self) -> None:
        for name in SCALED_ROLES:
            check_positive(name, getattr(self, name), 4.0)

    def rule(self, weight: Weight, roles: Roles) -> Rule | None:
        factors = (getattr(self, name) for name, scaled in SCALED_ROLES.items() if weight.role in scaled)
        factor = next(factors, 1.0)
        return None if factor == 1 else rules.times(factor)
