"""IDInit: identity in every weight, almost zero at the end of every branch."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

from rewire.init.functional import EPSILON, LOOSE, idi_, idic_, idiz_, idizc_
from rewire.init.registry import OfMatrices, Rule, register_initializer
from rewire.init.table import LAST, Roles, Weight


@register_initializer("idinit")
@dataclasses.dataclass(frozen=True)
class IDInit(OfMatrices):
    """IDInit: identities padded with identities, and 1e-6 at the end of branches (arXiv 2503.04626).

    IDI (matrices) and IDIC (kernels) everywhere; IDIZ and IDIZC for weights at the end of a branch and for the
    classifier (Section 3); attention by Appendix A.5: q, k, v by IDI, the output by IDIZ. Biases become zero: the
    paper's layers have none, and a bias with another value would be added to the stream by its branch.

    Attributes:
        tau: value on the diagonals; of the first weight sqrt(2) if the model's activation is a ReLU (Appendix B).
        eps: scale of IDIZ.
        loose: variance of tau, the loose condition; 0 turns it off.
    """

    zero: ClassVar[frozenset[str]] = frozenset({"bias"})

    tau: float = 1.0
    eps: float = EPSILON
    loose: float = LOOSE

    def matrix(self, weight: Weight, roles: Roles) -> Rule | None:
        kernel = "C" if len(weight.shape) > 2 and not weight.layout.stacked else ""
        if weight.role in LAST or weight.role == "classifier":
            zero = idizc_ if kernel else idiz_
            return Rule(f"IDIZ{kernel}(eps={self.eps:g})", lambda values, _: zero(values, self.eps))
        tau = self.tau * math.sqrt(2) if weight.role == "first" and roles.relu else self.tau
        identity = idic_ if kernel else idi_
        return Rule(f"IDI{kernel}(tau={tau:.4g})", lambda values, g: identity(values, tau, g, loose=self.loose))
