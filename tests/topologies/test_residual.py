from __future__ import annotations

import pytest
import torch
from toy_nets import begin

from rewire.errors import UnknownName
from rewire.topologies import Residual, list_topologies, make_topology
from rewire.topologies.base import Dims, materialize


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_is_the_plain_network_bitwise(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    topology = Residual()
    x = torch.randn(2, 3, 8).to(dtype)
    states = begin(topology, x, None)
    for t in range(1, 6):
        f, g = torch.randn(2, 2, 3, 8).to(dtype)
        assert topology.read(states, None, t)[0] is states[0]
        states = topology.write(states, None, t, f, g)
        x = x + f + g
        assert len(states) == 1
        assert torch.equal(topology.finish(states, None, 5), x)


def test_merge_then_push_is_write() -> None:
    x, f = torch.randn(2, 2, 8)
    topology = Residual()
    merged = materialize(topology.merge((x,), None, 1, f))
    assert torch.equal(merged, x + f)
    assert topology.push((x,), None, 1, merged) == (merged,)


@pytest.mark.parametrize("start", ["preserve", "paper"])
def test_has_no_parameters(start: str) -> None:
    assert Residual().parameters(Dims(4), start) == {}  # type: ignore[arg-type]
    assert torch.equal(Residual().matrix(None, Dims(4)), torch.eye(4))


def test_names() -> None:
    assert make_topology("residual", {}) == Residual()
    assert list_topologies()["residual"].startswith("Plain residual connections")
    with pytest.raises(UnknownName, match="'residual'"):
        make_topology("residal", {})
    with pytest.raises(TypeError, match="no option 'depth': it takes none"):
        make_topology("residual", {"depth": 2})
    with pytest.raises(TypeError, match="set them on the object"):
        make_topology(Residual(), {"depth": 2})
