"""Initialisers whose branches get smaller in deeper networks."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, Literal

from rewire.errors import RewireError, check_choice, check_positive
from rewire.init import rules
from rewire.init.registry import Initializer, OfMatrices, Rule, register_initializer
from rewire.init.table import LAST, MATRICES, Roles, Weight, row_of


@register_initializer("depth-scaled")
@dataclasses.dataclass(frozen=True)
class DepthScaled(OfMatrices):
    """GPT-2's: one standard deviation for all, divided by the root of the number of residual adds at ends of branches.

    Weights are N(0, std^2), those at the end of a branch N(0, std^2 / n), and biases zero. ``by="model"``: n is the
    number of residual adds of the model, 2 L in a transformer with L layers (GPT-2, Section 2.3 of its report).
    ``by="block"``: their number up to the end of the weight's own block, in its own row of blocks, 2 l in the l-th one
    (torchtitan's ``depth_init``, which also scales the up projection of gated MLPs, and draws from truncated normals).

    Embeddings keep their values, as with all initialisers; GPT-2's have the same standard deviation.

    Args:
        std: a positive number.
        by: "model" or "block".
    """

    zero: ClassVar[frozenset[str]] = frozenset({"bias"})

    std: float = 0.02
    by: Literal["model", "block"] = "model"

    def __post_init__(self) -> None:
        check_positive("std", self.std, 0.02)
        check_choice("by", self.by, ("model", "block"))

    def matrix(self, weight: Weight, roles: Roles) -> Rule | None:
        if weight.role not in LAST:
            return rules.normal(self.std)
        n = roles.branches if self.by == "model" else roles.branches_until(weight.block)
        return rules.normal(self.std / math.sqrt(n), f", n={n}")


@register_initializer("deepnorm")
@dataclasses.dataclass(frozen=True)
class DeepNorm(OfMatrices):
    """DeepNorm's: Xavier's normal distribution, in branches times beta but for queries and keys (arXiv 2203.00555).

    ``beta = (8 L)^(-1/4)`` for L layers, which is ``(4 n)^(-1/4)`` for n residual adds, for an encoder or a decoder
    alone (Figure 2). For both together the paper has other numbers for each, and beta has to be given. Weights outside
    of branches keep their values, and so do biases. The matching scale of shortcuts is the topology ``fixed-scale``
    with ``shortcut_power=0.25``.

    Args:
        beta: a positive number; None: as above.
    """

    beta: float | None = None

    def __post_init__(self) -> None:
        check_positive("beta", self.beta, 0.2, optional=True)

    def matrix(self, weight: Weight, roles: Roles) -> Rule | None:
        if weight.role in ("q", "k"):
            return rules.xavier_normal(1.0)
        if not _inside(weight) or weight.role == "router":
            return None
        return rules.xavier_normal((4 * roles.branches) ** -0.25 if self.beta is None else self.beta)

    def check(self, roles: Roles) -> None:
        rows = sorted({row_of(weight.block) for weight in roles if weight.branch})
        if self.beta is None and len(rows) > 1:
            raise RewireError(
                f"deepnorm's beta is that of one row of layers, and this model has several: {', '.join(rows)}. Give "
                "the number: rewire.initialize(model, 'deepnorm', beta=0.2)."
            )


@register_initializer("ds-init")
@dataclasses.dataclass(frozen=True)
class DSInit(OfMatrices):
    """DS-Init: Xavier's distribution, in the l-th layer times 1 / sqrt(l) (Zhang, Titov and Sennrich, EMNLP 2019).

    Weights in branches are from ``U(-b, b)`` with ``b = alpha / sqrt(l) * sqrt(6 / (fan_in + fan_out))``, l counted
    from 1 in each row of layers; matrices outside have l = 1. Biases keep their values. (The authors' code divides the
    variance by sqrt(l), not by l.)

    Args:
        alpha: a positive number, 1 at most in the paper.
    """

    alpha: float = 1.0

    def __post_init__(self) -> None:
        check_positive("alpha", self.alpha, 1.0)

    def matrix(self, weight: Weight, roles: Roles) -> Rule | None:
        layer = roles.layer(weight.block or weight.name)[0] if _inside(weight) else 1
        return rules.xavier(self.alpha / math.sqrt(layer), f", l={layer}")


@register_initializer("t-fixup")
@dataclasses.dataclass(frozen=True)
class TFixup(Initializer):
    """T-Fixup: Xavier's distribution, values, outputs and feed-forwards scaled by depth (Huang et al., ICML 2020).

    In encoders of N layers these weights are multiplied by ``0.67 N^(-1/4)``, in decoders, whose layers have a second
    attention, by ``(9 N)^(-1/4)``. Embeddings are N(0, 1/D) times ``(9 N)^(-1/4)``, with N of the longest row. Queries,
    keys and weights outside of branches get Xavier's; biases keep their values. The paper has no decoder without a
    second attention: such layers are treated as an encoder's. Its Transformers have no norms; those of a model are
    kept.
    """

    def rule(self, weight: Weight, roles: Roles) -> Rule | None:
        if weight.role == "embedding" and weight.shape[-1] == roles.width:
            return rules.normal(roles.width**-0.5 * (9 * roles.layers) ** -0.25)
        if weight.role not in MATRICES:
            return None
        if not _inside(weight) or weight.role in ("q", "k", "router"):
            return rules.xavier()
        place = weight.block or weight.name
        layers = roles.layer(place)[1]
        attentions = {w.branch for w in roles if w.role == "attention output" and row_of(w.block) == row_of(place)}
        gain = (9 * layers) ** -0.25 if len(attentions) >= 2 * layers else 0.67 * layers**-0.25
        return rules.xavier(gain, f", N={layers}")


def _inside(weight: Weight) -> bool:
    """Whether a weight is in a branch, or makes keys and values of another row's output for its cross-attention."""
    return bool(weight.branch) or weight.role in ("k", "v")
