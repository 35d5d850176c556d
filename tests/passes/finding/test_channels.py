"""Which dimension is that of the channels, whatever their norms are called and however they turn what they get."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rewire

C = 16


class ConvLayerNorm(nn.LayerNorm):
    """EnCodec's, AudioCraft's."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, -1)).transpose(1, -1)


class GammaBeta(nn.Module):
    """VITS's, by names of its own."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.transpose(1, -1), (C,), self.gamma, self.beta).transpose(1, -1)


class ChanLayerNorm(nn.Module):
    """Its gains lie along the channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.ones(1, channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=1) * self.g * x.shape[1] ** 0.5


class Einsum(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bij->bji", super().forward(torch.einsum("bij->bji", x)))


class Flattened(nn.LayerNorm):
    """As rows, which are brought back."""

    def forward(self, x: Tensor) -> Tensor:
        rows = super().forward(x.transpose(1, 2).reshape(-1, C))
        return rows.reshape(x.shape[0], -1, C).mT


class ChannelNorm(nn.LayerNorm):
    """timm's LayerNorm2d by another name."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class SamNorm(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(1, keepdim=True)
        x = x / torch.sqrt(x.pow(2).mean(1, keepdim=True) + 1e-6)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class Block(nn.Module):
    def __init__(self, norm: Any, conv: Any) -> None:
        super().__init__()
        self.norm, self.a, self.b = norm(C), conv(C, C, 3, padding=1), conv(C, C, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(F.gelu(self.a(self.norm(x))))


def trunk(net: nn.Module, x: Tensor) -> Any:
    (found,) = rewire.inspect(net, (x,)).trunks
    return found


@pytest.mark.each_once
@pytest.mark.parametrize("size", [5, C])  # as many positions as channels: their number does not tell
@pytest.mark.parametrize(
    "norm",
    [
        *(nn.BatchNorm1d, nn.InstanceNorm1d, nn.Identity, ConvLayerNorm, GammaBeta, ChanLayerNorm, Einsum, Flattened),
        *(lambda c: nn.InstanceNorm1d(c, affine=True), lambda c: nn.GroupNorm(4, c)),
    ],
)
def test_sequences_with_channels_in_front(norm: Any, size: int) -> None:
    net = nn.Sequential(nn.Conv1d(C, C, 1), *(Block(norm, nn.Conv1d) for _ in range(3)))
    found = trunk(net, torch.randn(2, C, size))
    assert (found.width, found.channel_dim) == (C, -2)


@pytest.mark.each_once
@pytest.mark.parametrize("size", [5, C])
@pytest.mark.parametrize("norm", [nn.BatchNorm2d, ChannelNorm, SamNorm, nn.Identity])
def test_pictures(norm: Any, size: int) -> None:
    net = nn.Sequential(nn.Conv2d(C, C, 1), *(Block(norm, nn.Conv2d) for _ in range(3)))
    found = trunk(net, torch.randn(2, C, 6, size))
    assert (found.width, found.channel_dim) == (C, -3)


class Turned(nn.Module):
    """A stream of channels first, or last, whose blocks turn it for a norm, or for a convolution."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.norm, self.map, self.conv, self.first = nn.LayerNorm(C), nn.Linear(C, C), nn.Conv1d(C, C, 1), first

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            return x + self.map(self.norm(x.transpose(1, 2))).transpose(1, 2)
        return x + self.conv(self.norm(torch.roll(x, 1, 1)).transpose(1, 2)).transpose(1, 2)


@pytest.mark.parametrize("size", [5, C])
@pytest.mark.parametrize("first", [True, False])
def test_blocks_that_turn_what_they_read(first: bool, size: int) -> None:
    stem = nn.Conv1d(C, C, 1) if first else nn.Linear(C, C)
    found = trunk(
        nn.Sequential(stem, *(Turned(first) for _ in range(3))), torch.randn(2, *((C, size) if first else (size, C)))
    )
    assert (found.width, found.channel_dim) == (C, -2 if first else -1)


class Masked(nn.Module):
    """A buffer that has as many values as there are positions says nothing of channels."""

    def __init__(self) -> None:
        super().__init__()
        self.map, self.scale = nn.Linear(C, C), nn.Parameter(torch.ones(C))
        self.register_buffer("mask", torch.ones(1, 5, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.map(x * self.mask * self.scale)


def test_a_mask_is_no_gain() -> None:
    found = trunk(nn.Sequential(nn.Linear(C, C), *(Masked() for _ in range(3))), torch.randn(2, 5, C))
    assert (found.width, found.channel_dim) == (C, -1)


def test_a_topology_with_weights_per_channel_mixes_no_positions() -> None:
    net = nn.Sequential(
        nn.Conv1d(C, C, 1),
        *(Block(lambda c: nn.Identity(), lambda i, o, *a, **k: nn.Conv1d(i, o, 1)) for _ in range(3)),
    )
    rewired = rewire.compile(net, "hc-dynamic", example_inputs=(torch.randn(2, C, 5),))
    for name, weight in rewired.named_parameters():
        if "depth_connections" in name:
            nn.init.normal_(weight)
    x = torch.randn(2, C, 7)  # another length, too
    changed = x.clone()
    changed[:, :, -1] += 1
    torch.testing.assert_close(rewired(x)[:, :, :-1], rewired(changed)[:, :, :-1])


class Kernel(torch.autograd.Function):
    """A norm that shows no operations."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        made = torch.empty_like(x)
        made.numpy()[...] = x.numpy() * weight.numpy()[:, None]
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class LeafGroupNorm(nn.GroupNorm):
    def forward(self, x: Tensor) -> Tensor:
        return Kernel.apply(x, self.weight)


def test_a_norm_that_shows_no_operations() -> None:
    norm = lambda c: LeafGroupNorm(4, c)  # noqa: E731
    found = trunk(nn.Sequential(nn.Conv1d(C, C, 1), *(Block(norm, nn.Conv1d) for _ in range(3))), torch.randn(2, C, 5))
    assert (found.width, found.channel_dim) == (C, -2)


def test_long_ways_without_weights_are_followed_once() -> None:
    class Long(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = nn.Linear(C, C)

        def forward(self, x: Tensor) -> Tensor:
            h = x
            for _ in range(60):
                h = h * torch.tanh(h)
            return x + self.f(h)

    found = trunk(nn.Sequential(nn.Linear(C, C), *(Long() for _ in range(2))), torch.randn(2, 5, C))
    assert (found.width, found.channel_dim) == (C, -1)


class Edges(nn.Module):
    """EGNN's: nothing reads the state alone, only beside other nodes' or messages."""

    def __init__(self, join: str) -> None:
        super().__init__()
        self.edge, self.node, self.join = nn.Linear(2 * C, 5), nn.Linear(C + 5, C), join

    def forward(self, x: Tensor) -> Tensor:
        join = getattr(torch, self.join)
        messages = torch.tanh(self.edge(join((x[[1, 2, 0]], x), 1)))
        return x + self.node(join((x, messages), dim=-1))


@pytest.mark.parametrize("join", ["cat", "concat", "concatenate"])
def test_channels_beside_others(join: str) -> None:
    found = trunk(nn.Sequential(nn.Linear(C, C), *(Edges(join) for _ in range(3))), torch.randn(3, C))
    assert (found.width, found.channel_dim) == (C, -1)


class Shifted(nn.Module):
    """Half of the channels come from the token before, as in MEGABYTE."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self.map, self.part = nn.Linear(C, C), part

    def forward(self, x: Tensor) -> Tensor:
        halves = {
            "chunk": lambda: x.chunk(2, -1),
            "split": lambda: x.split(C // 2, dim=-1),
            "narrow": lambda: (x.narrow(-1, 0, C // 2), x.narrow(-1, C // 2, C // 2)),
        }[self.part]()
        return x + self.map(torch.tanh(torch.cat((halves[0], F.pad(halves[1], (0, 0, 1, -1))), -1)))


@pytest.mark.parametrize("part", ["chunk", "split", "narrow"])
def test_channels_of_shifted_tokens(part: str) -> None:
    found = trunk(nn.Sequential(nn.Linear(C, C), *(Shifted(part) for _ in range(3))), torch.randn(3, 5, C))
    assert (found.width, found.channel_dim) == (C, -1)
