"""Every topology goes the way of a GPU's tensors, on tensors without storage."""

from __future__ import annotations

import pytest
from scripts import script

from rewire.topologies.registry import make_topology

passes = script("passes")


#: Those that read many states, and some with few.
DENSE = ["ancre-ingoing", "ancre-outgoing", "denseformer", "grn-v1", "grn-v2", "grn-v3", "dca", "muddformer", "attnres"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*DENSE, "hc-gated", "laurel-pa", "unet", "x0-lambdas", "hc-dynamic", "mhc"])
def test_deep_trunks(name: str) -> None:
    """More reads of one state than a kernel takes columns, sources or pairs of both."""
    found = passes.measure(make_topology(name, {}), 140)
    assert found["forward"]["kernel_passes"] > 0 and found["backward"]["kernel_passes"] > 0
