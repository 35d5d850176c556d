from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from rewire.runtime.connection import Connection


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connection weights may be float64."""
    cast, softmax = Tensor.float, torch.softmax
    monkeypatch.setattr(Tensor, "float", lambda x: x if x.dtype == torch.float64 else cast(x))
    monkeypatch.setattr(torch, "softmax", lambda x, dim, dtype=None: softmax(x, dim))


@pytest.fixture
def double_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connection weights may be float64; as modules they are float32 only."""

    def effective(self: Connection, learned: Mapping[str, Tensor]) -> Any:
        return self.layout.topology.weights(self._values({**learned, **dict(self.named_buffers())}), self.layout.dims)

    monkeypatch.setattr(Connection, "_effective", effective)
