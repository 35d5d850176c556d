"""A task that trains in milliseconds: `task` fits a sine with three residual blocks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import rewire


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(self.inner(x).relu())


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), Block(8), Block(8), Block(8), nn.Linear(8, 1))


def batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield example(generator, 16)


def example(generator: torch.Generator, size: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(size, 4, generator=generator)
    return x, x.sin().sum(1, keepdim=True)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


task = rewire.Task(model, batches, [example(torch.Generator().manual_seed(99), 64)], loss, learning_rate=1e-2)


def make_task() -> rewire.Task:
    return task
