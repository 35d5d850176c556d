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


def joint(x: Tensor, layer: Streaming) -> Tensor:
    return x + layer.f(layer.norm(x))


def scaled(x: Tensor, f: Tensor) -> Tensor:
    return x + 1.0 * f


class Staged(Streaming):
    def forward(self, x: Tensor) -> Tensor:
        return scaled(x, self.f(self.norm(x)))


class Pi0(nn.Module):
    """A function makes the adds of its layers; in another call, their own forwards do."""

    def __init__(self, layer: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(3))

    def forward(self, x: Tensor, staged: bool = False) -> Tensor:
        for layer in self.layers:
            x = layer(x) if staged else joint(x, layer)  # type: ignore[arg-type]
        return x


@pytest.mark.parametrize("layer", [Streaming, Staged])
def test_forwards_of_layers_whose_branches_a_function_adds(
    layer: type[nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    told = warnings(Pi0(layer), caplog)
    assert f"'{layer.__name__}.forward'" in told[0] and "adds of 'layers.0' in another way" in told[0]
    assert all("forward_chunk" in each for each in told[1:]) and len(told) == 2


def test_sums_with_a_number_are_none(caplog: pytest.LogCaptureFixture) -> None:
    assert not warnings(Initialised(), caplog)
