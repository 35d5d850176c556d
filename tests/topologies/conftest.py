from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _compile_anew(request: pytest.FixtureRequest) -> None:
    """Many topologies are compiled in the same toy nets, and compilations of one function are limited."""
    if "compiles" in request.node.name:
        torch._dynamo.reset()
