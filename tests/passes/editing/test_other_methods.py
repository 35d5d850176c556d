"""Methods that make a block's residual adds in another way are named, and others are not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import rewire


class Streaming(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.f = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(self.norm(x))

    def forward_chunk(self, x: Tensor, cache: Tensor) -> Tensor:
        f = self.f(self.norm(torch.cat([cache, x], 1)))
        return x + f[:, -1:]


class Initialised(nn.Module):
    """A model that adds in its own forward, and whose method that initialises it only counts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def init_weights(self, std: float) -> None:
        for depth, layer in enumerate(self.layers):
            nn.init.normal_(layer.weight, std=std * (2 * (depth + 1)) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x.tanh())
        return x


class Chunked(Initialised):
    def forward_chunk(self, x: Tensor, number: int) -> Tensor:
        return x + self.layers[number](x)


def warnings(model: nn.Module, caplog: pytest.LogCaptureFixture) -> list[str]:
    rewire.compile(model, "denseformer", example_inputs=(torch.randn(2, 3, 8),))
    return [record.getMessage() for record in caplog.records if "in another way" in record.getMessage()]


def test_a_method_of_a_block(caplog: pytest.LogCaptureFixture) -> None:
    (warning,) = warnings(nn.Sequential(*(Streaming() for _ in range(3))), caplog)
    assert "'Streaming.forward_chunk'" in warning and "adds of '0' in another way" in warning


def test_a_method_of_the_model(caplog: pytest.LogCaptureFixture) -> None:
    (warning,) = warnings(Chunked(), caplog)
    assert "'Chunked.forward_chunk'" in warning and "adds of the model in another way" in warning


def test_sums_with_a_number_are_none(caplog: pytest.LogCaptureFixture) -> None:
    assert not warnings(Initialised(), caplog)
