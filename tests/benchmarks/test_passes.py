"""Every topology goes the way of a GPU's tensors, on tensors without storage."""

from __future__ import annotations

import pytest
from every_topology import NOT_PRESERVING
from scripts import script

import rewire
from rewire.topologies.registry import make_topology

passes = script("passes")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in rewire.list_topologies() if name not in NOT_PRESERVING])
def test_deep_trunks(name: str) -> None:
    """More reads of one state than a kernel takes columns, sources or pairs of both."""
    found = passes.measure(make_topology(name, {}), 140)
    by_kernels = found["forward"]["kernel_passes"] + found["backward"]["kernel_passes"]
    assert by_kernels > 0 or name in ("residual", "fixed-scale", "review")  # plain sums, and operations of torch alone
