"""Muse Spark's gate between shortcut and branch (transformers' MuseSparkResidualGate).

    b_t = sigmoid(w_t / tau),  a_t = sqrt(max(1 - b_t^2, 1e-3))         per channel
    x_t = a_t * x_{t-1} + b_t * f_t(x_{t-1})                            output: x_T

Muse Spark draws w from normal(0, 0.02). Not in that model: ``form="difference"``, a_t and b_t are 1 plus what they
differ from those of w = 0.
"""

import torch


def parameters(depth, width, attention=(), **options):
    return {"w": torch.zeros(depth, width, dtype=torch.float64)}


def forward(x, weights, branches, kept, *, temperature=0.3, form="gate"):
    for t, branch in enumerate(branches):
        a, b = gate(weights["w"][t], temperature)
        if form == "difference":
            a_0, b_0 = gate(torch.zeros_like(weights["w"][t]), temperature)
            a, b = 1 + a - a_0, 1 + b - b_0
        x = kept(a * x + b * branch(x))
    return x


def gate(w, temperature):
    b = torch.sigmoid(w / temperature)
    return torch.sqrt((1 - b**2).clamp(min=1e-3)), b
