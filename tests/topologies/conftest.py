from __future__ import annotations

from typing import Any

import pytest
import torch

from rewire.connection import Connection


@pytest.fixture
def double_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connection weights may be float64; as modules they are float32 only."""

    def effective(self: Connection, placement: None = None) -> Any:
        return self.layout.topology.weights(dict(self.named_parameters()), self.layout.dims)

    monkeypatch.setattr(Connection, "effective", effective)


@pytest.fixture(autouse=True)
def _compile_anew(request: pytest.FixtureRequest) -> None:
    """Many topologies are compiled in the same toy nets, and compilations of one function are limited."""
    if "compiles" in request.node.name:
        torch._dynamo.reset()
