"""Rules that several initialisers share."""

from __future__ import annotations

from torch import nn

from rewire.init.registry import Rule


def zeros() -> Rule:
    return Rule("zeros", lambda values, _: values.zero_())


def normal(std: float, why: str = "") -> Rule:
    """N(0, std^2)."""
    return Rule(f"normal(std={std:.3g}{why})", lambda values, generator: values.normal_(0.0, std, generator=generator))


def kaiming() -> Rule:
    """He's: N(0, 2 / fan_in), for ReLU (arXiv 1502.01852, Equation 10)."""
    return Rule("kaiming_normal", lambda v, g: nn.init.kaiming_normal_(v, nonlinearity="relu", generator=g))


def xavier(gain: float = 1.0, why: str = "") -> Rule:
    """Glorot and Bengio's uniform distribution (AISTATS 2010, Equation 16), times the gain."""
    return Rule(
        "xavier_uniform" if gain == 1 else f"xavier_uniform(gain={gain:.3g}{why})",
        lambda values, generator: nn.init.xavier_uniform_(values, gain=gain, generator=generator),
    )


def xavier_normal(gain: float) -> Rule:
    """The normal distribution of the same variance, times gain^2."""
    return Rule(
        f"xavier_normal(gain={gain:.3g})",
        lambda values, generator: nn.init.xavier_normal_(values, gain=gain, generator=generator),
    )


def orthogonal() -> Rule:
    """Orthonormal rows or columns (arXiv 1312.6120)."""
    return Rule("orthogonal", lambda values, generator: nn.init.orthogonal_(values, generator=generator))


def constant(value: float) -> Rule:
    return Rule(f"constant({value:g})", lambda values, _: values.fill_(value))


def times(factor: float) -> Rule:
    return Rule(f"times {factor:g}", lambda values, _: values.mul_(factor))
