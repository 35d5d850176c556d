"""Modules with adds that look like residual ones."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from models import WIDTH
from torch import Tensor, nn


class NewGelu(nn.Module):
    """A polynomial of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(0.797 * (x + 0.044715 * torch.pow(x, 3.0))))


class Rotary(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.q = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x)
        angle = torch.arange(x.shape[1], dtype=x.dtype)[:, None]
        first, second = q.chunk(2, dim=-1)
        return q * angle.cos() + torch.cat((-second, first), dim=-1) * angle.sin()


class PositionalEmbedding(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(1, 9, width))
        self.pos_embed = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.table
        return x + self.pos_embed(x)


class MaskedAttention(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).transpose(1, 2)
        mask = torch.full((x.shape[1], x.shape[1]), -1e9).triu(1)
        return (scores + mask).softmax(-1) @ self.v(x)


class SqueezeExcite(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, 4), nn.Linear(4, width)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.fc2(F.relu(self.fc1(x.mean(1, keepdim=True)))))


class PoolingHead(nn.Module):
    """Two poolings of one input."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, 4), nn.Linear(4, width)

    def forward(self, x: Tensor) -> Tensor:
        def mlp(pooled: Tensor) -> Tensor:
            return self.fc2(F.relu(self.fc1(pooled)))

        return torch.sigmoid(mlp(x.mean(1, keepdim=True)) + mlp(x.amax(1, keepdim=True))) * x


class Symmetrised(nn.Module):
    """A function of the input plus the same of its mirror image."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.f = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.f(x)
        return 0.5 * (y + y.flip(1))


class Gated(nn.Module):
    """An LSTM-like mix of two candidates."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.f, self.g = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.f(x) + self.g(x)


FALSE_FRIENDS: dict[str, Callable[[], nn.Module]] = {
    cls.__name__: cls
    for cls in (
        NewGelu, Rotary, PositionalEmbedding, MaskedAttention, SqueezeExcite, PoolingHead, Symmetrised, Gated,
    )
}  # fmt: skip
