"""Learned scales and biases of shortcuts and branches (transformers' DogeDecoderLayer and ZayaResidualScaling).

    x_t = a_t * (x_{t-1} + u_t) + b_t * (f_t(x_{t-1}) + v_t)            all in R^D; output: x_T

Doge has a alone (b = 1, u = v = 0); ZAYA1 all four (``branch`` and ``bias``).
"""

import torch


def parameters(depth, width, attention=(), *, branch=False, bias=False):
    names = {"a": 1.0} | ({"b": 1.0} if branch else {})
    names |= {"u": 0.0} | ({"v": 0.0} if branch else {}) if bias else {}
    return {name: torch.full((depth, width), value, dtype=torch.float64) for name, value in names.items()}


def forward(x, weights, branches, kept, *, branch=False, bias=False):
    for t, compute in enumerate(branches):
        w = {name: value[t] for name, value in weights.items()}
        x = kept(w["a"] * (x + w.get("u", 0)) + w.get("b", 1) * (compute(x) + w.get("v", 0)))
    return x
