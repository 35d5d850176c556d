"""Maximal update parametrisation over width, and CompleteP over depth: starts and matching learning rates."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from rewire.errors import RewireError, check_positive
from rewire.init import rules
from rewire.init.registry import Initializer, Rule, register_initializer
from rewire.init.table import LAST, MATRICES, Roles, Weight


class Factors(NamedTuple):
    """Factors on a weight's learning rate, weight decay and Adam's epsilon."""

    lr: float = 1.0
    weight_decay: float = 1.0
    eps: float = 1.0


@register_initializer("mup")
@dataclasses.dataclass(frozen=True)
class MuP(Initializer):
    """muP: settings tuned on a narrow model hold for wide ones; with base_depth (CompleteP) for deep ones, too.

    With ``m = D / base_width`` (arXiv 2203.03466) matrices in branches are N(0, std^2 / m) and their rate is
    divided by m, the output layer is N(0, (std / m)^2) with a rate divided by m, tables of embeddings and first layers
    are N(0, std^2). Biases become zero.

    With ``k = L / base_depth`` for L layers, branches are multiplied by 1/k (CompleteP, arXiv 2505.01618, alpha = 1).
    Here that factor is in the weights at their end, as Adam cannot tell the difference: start and rate of these are
    divided by k. So this works with every topology. Connection weights of which a read has more in deep models get
    smaller rates there (``Topology.depth_powers``).

    Rates, decays and epsilons are those of CompleteP's authors' code, with the multiplier of the logits in the output
    layer: `rewire.parameter_groups` takes this object. If the number of channels d of a head grows with the width,
    attention has to be scaled by 1 / d (Llama's and GPT-2's is not): let the number of heads grow instead.

    Args:
        base_width: channels of the tuned model.
        base_depth: its layers; None: no scaling over depth.
        std: of that model's weights.

    Raises:
        ValueError: an argument is not positive.

    Example:
        >>> mup = rewire.init.MuP(base_width=8, base_depth=2)
        >>> report = rewire.initialize(model, mup)
        >>> optimizer = torch.optim.AdamW(rewire.parameter_groups(model, lr=1e-3, weight_decay=0.1, mup=mup))
    """

    base_width: int = 256
    base_depth: int | None = None
    std: float = 0.02

    def __post_init__(self) -> None:
        check_positive("base_width", self.base_width, 256)
        check_positive("base_depth", self.base_depth, 2, optional=True)
        check_positive("std", self.std, 0.02)

    def rule(self, weight: Weight, roles: Roles) -> Rule | None:
        m, k = self.multipliers(roles)
        if weight.role == "bias":
            return rules.zeros()
        if weight.role == "first" or (weight.role == "embedding" and weight.shape[-1] == roles.width):
            return rules.normal(self.std)
        if weight.role not in MATRICES:
            return None
        if weight.role == "classifier":
            return rules.normal(self.std / m)
        return rules.normal(self.std * m**-0.5 / (k if weight.role in LAST else 1), f", m={m:.3g}, k={k:.3g}")

    def factors(self, weight: Weight, roles: Roles) -> Factors:
        """The factors for an optimiser like AdamW."""
        m, k = self.multipliers(roles)
        wide = weight.role in MATRICES and weight.role != "first"
        lr, decay, eps = (1 / m, m, 1 / (m * k)) if wide else (1.0, 1.0, 1 / (m * k))
        if weight.role == "classifier":
            return Factors(lr, decay, eps * m)
        if weight.role in LAST or (weight.role == "bias" and self._ends(weight, roles)):
            return Factors(lr / k, decay * k, eps * k)
        return Factors(lr, decay, eps)

    def multipliers(self, roles: Roles) -> tuple[float, float]:
        """The factors m and k."""
        assert roles.width is not None  # see `check`
        return roles.width / self.base_width, roles.layers / self.base_depth if self.base_depth else 1.0

    def check(self, roles: Roles) -> None:
        if roles.width is None:
            raise RewireError(
                "mup: the width of this model is unknown: no module next to its residual adds determines it."
            )
        tied = next((w.name for w in roles if w.role == "embedding" and w.because.startswith("tied")), None)
        if tied:
            raise RewireError(
                f"mup: '{tied}' is a table of embeddings and the output layer, which start at different scales as the "
                "width grows. Untie them, as with tie_word_embeddings=False in a config of transformers."
            )
        normed = next((w.branch for w in roles if w.role == "last norm"), None)
        if normed and self.base_depth:
            raise RewireError(
                f"mup: the branch '{normed}' ends with a norm, which removes the factor that base_depth puts into the "
                "weights before it. Leave out base_depth, and connect with fixed-scale: branch=2 * base_depth, "
                "branch_power=-1."
            )

    @staticmethod
    def _ends(bias: Weight, roles: Roles) -> bool:
        """Whether a bias belongs to a weight at the end of a branch."""
        owner = bias.name.rpartition(".")[0]
        return any(w.role in LAST and w.name.rpartition(".")[0] == owner for w in roles)
