"""Linear networks of the case studies: fixed shortcuts, and the same network rewired with ANCRe."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

import rewire

Shortcut = tuple[int, int]  # i:j, from the output of layer i to that of layer j; 0 is the input


class LinearNet(nn.Module):
    """``x_j = W_j x_{j-1} + sum of x_i over the shortcuts i:j`` (ANCRe, arXiv 2602.09009, Section 3.1).

    Args:
        weights: W_1 .. W_K, each [d, d].
        shortcuts: pairs (i, j), 0 <= i < j <= K.
    """

    def __init__(self, weights: Sequence[Tensor], shortcuts: Collection[Shortcut] = ()) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(weight.clone()) for weight in weights])
        self.shortcuts = tuple(shortcuts)

    def forward(self, x: Tensor) -> Tensor:
        states = [x]  # rows
        for layer, weight in enumerate(self.weights, 1):
            jumps = [states[source] for source, destination in self.shortcuts if destination == layer]
            states.append(sum(jumps, states[-1] @ weight.T))
        return states[-1]


class LinearBlock(nn.Module):
    """A linear map with the shortcut around it."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(*weight.shape, bias=False, dtype=weight.dtype)
        self.linear.weight = nn.Parameter(weight.clone())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x)


def ancre_net(weights: Sequence[Tensor], temperature: float) -> nn.Module:
    """The cascaded network with its shortcuts replaced by ANCRe's, starting from uniform weights."""
    cascaded = nn.Sequential(*map(LinearBlock, weights))
    example = torch.ones(1, weights[0].shape[1], dtype=weights[0].dtype)
    return rewire.compile(cascaded, "ancre-ingoing", start="paper", temperature=temperature, example_inputs=(example,))


def small_weights(depth: int, width: int, std: float, seed: int) -> list[Tensor]:
    """Weights of N(0, std^2), float64 [width, width] each."""
    generator = torch.Generator().manual_seed(seed)
    return [std * torch.randn(width, width, generator=generator, dtype=torch.float64) for _ in range(depth)]


def low_rank_target(width: int, rank: int, seed: int) -> Tensor:
    """A random matrix, float64 [width, width], with singular values from 1 down to 0.2, and zeros after ``rank``."""
    generator = torch.Generator().manual_seed(1000 + seed)
    normal = torch.randn(2, width, width, generator=generator, dtype=torch.float64)
    left, right = torch.linalg.qr(normal).Q
    values = torch.zeros(width, dtype=torch.float64)
    values[:rank] = torch.linspace(1.0, 0.2, rank, dtype=torch.float64)
    return left @ torch.diag(values) @ right.T
