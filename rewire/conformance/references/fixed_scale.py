"""Constant scales of shortcuts and branches (DeepNorm, arXiv 2203.00555; CompleteP, arXiv 2505.01618).

    x_t = a x_{t-1} + b f_t(x_{t-1})                                    output: x_T
    a = shortcut T^shortcut_power,  b = branch T^branch_power

T is the number of residual adds, 2 L of a transformer with L layers: DeepNorm has a = (2 L)^(1/4), CompleteP b = L_0/L.
"""


def parameters(depth, width, attention=(), **options):
    return {}


def forward(x, weights, branches, kept, *, shortcut=1.0, branch=1.0, shortcut_power=0.0, branch_power=0.0):
    T = len(branches)
    for compute in branches:
        x = kept(shortcut * T**shortcut_power * x + branch * T**branch_power * compute(x))
    return x
