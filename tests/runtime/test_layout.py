from __future__ import annotations

from rewire.runtime.layout import Layout
from rewire.topologies import Residual
from rewire.topologies.base import Dims


def test_layout_opens_and_closes_units() -> None:
    layout = Layout("trunk", Residual(), (1, 2, 2, 3))
    assert layout.dims == Dims(3)
    assert [layout.begins_unit(site) for site in range(4)] == [True, True, False, True]
    assert [layout.closes_unit(site) for site in range(4)] == [True, False, True, True]
