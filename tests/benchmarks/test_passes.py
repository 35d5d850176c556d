"""Every topology goes the way of a GPU's tensors, on tensors without storage."""

from __future__ import annotations

import pytest
from every_topology import EVERY, PRESERVING
from scripts import script

from rewire.topologies.registry import make_topology

passes = script("passes")


@pytest.mark.slow
@pytest.mark.parametrize("key", PRESERVING)
def test_deep_trunks(key: str) -> None:
    """More reads of one state than a kernel takes columns, sources or pairs of both."""
    name, options = EVERY[key]
    found = passes.measure(make_topology(name, options), 140)
    by_kernels = found["forward"]["kernel_passes"] + found["backward"]["kernel_passes"]
    assert by_kernels > 0 or key in ("residual", "fixed-scale", "review")  # plain sums, and operations of torch alone
