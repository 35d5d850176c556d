"""Every unit reads the trunk's input again (nanochat's resid_lambdas and x0_lambdas; modded-nanogpt's lambdas).

    r_t = l_t x_{t-1} + m_t x_0
    x_t = r_t + f_t(r_t)                                                output: x_T

``shortcut="state"``: x_t = x_{t-1} + f_t(r_t) (transformers' NeoMMEEncoderLayer).
"""

import torch


def parameters(depth, width, attention=(), **options):
    """As in nanochat."""
    found = {"l": torch.linspace(1.15, 1.05, depth), "m": torch.linspace(0.2, 0.05, depth)}
    return {name: value.double() for name, value in found.items()}


def forward(x, weights, branches, kept, *, shortcut="mix"):
    first = x
    for t, branch in enumerate(branches):
        r = weights["l"][t] * x + weights["m"][t] * first
        x = kept((r if shortcut == "mix" else x) + branch(r))
    return x
