"""Plain residual connections (arXiv 1512.03385).

x_t = x_{t-1} + f_t(x_{t-1})                                        (eq. 1)
output: x_T
"""


def parameters(depth, width, attention=()):
    return {}


def forward(x, weights, branches, kept):
    for branch in branches:
        x = kept(x + branch(x))  # eq. 1
    return x
