"""Running a model and recording its operations."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rewire.passes.record import record


class Replaces(nn.Module):
    """Replaces a buffer, as rotary embeddings do that grow: the memory of the old one is used again."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        self.table = torch.zeros(3, 3)
        made = [x + number for number in range(100)]
        return torch.stack(made).sum(0)


def test_a_buffer_that_is_replaced_lends_its_name_to_nothing_else() -> None:
    flow = record(Replaces(), ((torch.randn(3, 3),), {}))
    assert [op.name for op in flow].count("add") == 100
    assert not any(op.parameter or op.matrices for op in flow)
