"""Running a model and recording its operations."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor, nn

from rewire.passes.finding.record import record


class Replaces(nn.Module):
    """Replaces a buffer, as rotary embeddings do that grow."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(3, 3))
        self.lives = False

    def forward(self, x: Tensor) -> Tensor:
        first = weakref.ref(self.table)
        self.table = torch.zeros(3, 3)
        self.lives = first() is not None
        return x + self.table


def test_a_buffer_that_is_replaced_lives_on_so_that_no_other_tensor_gets_its_id() -> None:
    recorded, plain, x = Replaces(), Replaces(), torch.randn(3, 3)
    plain(x)
    record(recorded, ((x,), {}))
    assert recorded.lives and not plain.lives
