"""Every topology goes the way of a GPU's tensors, on tensors without storage."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from every_topology import EVERY, PRESERVING

from rewire.topologies.registry import make_topology

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "passes.py"
spec = importlib.util.spec_from_file_location("benchmarks_passes", SCRIPT)
assert spec is not None
assert spec.loader is not None
passes = importlib.util.module_from_spec(spec)
spec.loader.exec_module(passes)


@pytest.mark.slow
@pytest.mark.parametrize("key", PRESERVING)
def test_deep_trunks(key: str) -> None:
    """More reads of one state than a kernel takes columns, sources or pairs of both."""
    name, options = EVERY[key]
    found = passes.measure(make_topology(name, options), 140)
    assert found["forward"]["kernel_passes"] + found["backward"]["kernel_passes"] > 0 or key == "residual"
