"""Running a model and recording its operations."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rewire.passes.finding.flow import indexing
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


@pytest.mark.parametrize(
    ("index", "name"),
    [
        (None, "unsqueeze"),
        ((None, slice(None)), "unsqueeze"),
        ((..., None), "unsqueeze"),
        ((slice(None), None, ...), "unsqueeze"),
        (0, "squeeze"),
        ((slice(None), slice(None), 0), "squeeze"),
        ((None, 0, ...), "reshape"),
        (..., "getitem"),
        (slice(None), "getitem"),
        ((slice(None), 0), "getitem"),
        ((slice(None), slice(1, None)), "getitem"),
        ((None, slice(0, 3)), "getitem"),
        (True, "getitem"),
        ([0], "getitem"),
        ((None, torch.tensor([0])), "getitem"),
    ],
)
def test_an_index_that_keeps_all_is_a_view(index: Any, name: str) -> None:
    x = torch.arange(3.0).view(1, 3, 1)
    assert indexing(index, x.shape) == name
    if name != "getitem":
        assert torch.equal(x[index].flatten(), x.flatten())
