from __future__ import annotations

from typing import Any

import pytest
import torch
import toy_nets
from formulas import by_reference, unpacked
from torch import Tensor, nn
from toy_nets import net, opened, plain

from rewire.conformance import reference
from rewire.errors import UnsupportedTopology
from rewire.topologies import DenseFormer, make_topology
from rewire.topologies.base import Dims, States
from rewire.topologies.denseformer import Averages

OPTIONS = [(1, 1), (2, 1), (1, 2), (2, 3), (3, 2), (4, 5), (7, 1)]


def run(topology: DenseFormer, weights: Averages, x: Tensor, blocks: list[nn.Module]) -> Tensor:
    def check(t: int, read: Any, opened: States, written: States) -> None:
        y, past = opened[0], opened[1].states
        assert len(past) == t  # x_0 .. x_{t-1}
        assert torch.compiler.is_compiling() or past[0].data_ptr() == x.data_ptr()
        assert read is y

    return toy_nets.run(topology, weights, x, blocks, check=check)


@pytest.mark.each_once
@pytest.mark.parametrize("depth", [5, 6, 11])
@pytest.mark.parametrize(("dilation", "period"), OPTIONS)
def test_formulas(depth: int, dilation: int, period: int) -> None:
    topology = DenseFormer(dilation, period)
    alpha = torch.randn_like(topology.parameters(Dims(depth), "paper")["alpha"]) * 0.5
    weights = topology.weights({"alpha": alpha}, Dims(depth))
    x, blocks = torch.randn(2, 3, 8, dtype=torch.float64), net(depth, torch.float64)
    want, _ = by_reference(topology, {"alpha": alpha}, x, blocks, Dims(depth))
    options = reference("denseformer").with_options({"dilation": dilation, "period": period})
    a = unpacked("denseformer", {"alpha": alpha}, Dims(depth), options)["alpha"]
    torch.testing.assert_close(run(topology, weights, x, blocks), want, rtol=1e-6, atol=1e-6)
    table = topology.matrix(weights, Dims(depth))
    assert table.dtype == torch.float32
    assert table.shape == (depth, depth + 1)
    for t in range(1, depth + 1):
        row = a[t - 1] if t % period == 0 else torch.eye(depth + 1)[t]
        assert table[t - 1].tolist() == pytest.approx(row.tolist())


@pytest.mark.each_once
@pytest.mark.parametrize("start", ["preserve", "paper"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("dilation", "period"), OPTIONS)
def test_starts_as_the_plain_network_bitwise(dilation: int, period: int, dtype: torch.dtype, start: str) -> None:
    topology, depth = DenseFormer(dilation, period), 6
    alpha = nn.Parameter(topology.parameters(Dims(depth), start)["alpha"])  # type: ignore[arg-type]
    assert alpha.dtype == torch.float32
    assert alpha.dim() == 1
    blocks, x = net(depth, dtype), torch.randn(4, 8).to(dtype)
    weights = topology.weights({"alpha": alpha}, Dims(depth))
    out, want = run(topology, weights, x, blocks), plain(x, blocks)
    assert out.dtype == dtype
    assert torch.equal(out, want)
    assert torch.equal(topology.matrix(weights, Dims(depth)), torch.eye(depth, depth + 1).roll(1, 1))
    out.float().square().mean().backward()
    assert alpha.grad is not None
    assert (alpha.grad != 0).all()


def test_learns_a_shortcut() -> None:
    depth, topology = 3, DenseFormer()
    blocks = net(depth)
    alpha = nn.Parameter(topology.parameters(Dims(depth), "preserve")["alpha"])
    optimizer = torch.optim.Adam([alpha], lr=2e-2)
    for _ in range(300):
        x = torch.randn(64, 8)
        optimizer.zero_grad()
        out = run(topology, topology.weights({"alpha": alpha}, Dims(depth)), x, blocks)
        nn.functional.mse_loss(out, 3 * x).backward()
        optimizer.step()
    table = topology.matrix(topology.weights({"alpha": alpha}, Dims(depth)), Dims(depth))
    assert table[depth - 1, 0] > 0.5
    assert table[depth - 1, depth] < 0.9


def test_autocast_leaves_the_average_in_float32() -> None:
    topology, blocks, x = DenseFormer(), net(3), torch.randn(4, 8)
    weights = topology.weights(topology.parameters(Dims(3), "paper"), Dims(3))
    with torch.autocast("cpu", torch.bfloat16):
        assert run(topology, weights, x, blocks).dtype == torch.float32


def test_merge_leaves_room_for_a_norm() -> None:
    topology = DenseFormer()
    weights = topology.weights({"alpha": torch.tensor([0.25, 0.5])}, Dims(1))
    x, f, normed = torch.randn(3, 2, 8)
    assert torch.equal(topology.merge(opened(topology, x, weights), weights, 1, f), x + f)
    newest, history = topology.push(opened(topology, x, weights), weights, 1, normed)
    assert newest is normed
    assert torch.equal(history.states[0], x)
    torch.testing.assert_close(topology.finish((newest, history), weights, Dims(1)), 0.25 * x + 0.5 * normed)


@pytest.mark.slow
@pytest.mark.parametrize("dilation", [1, 2])
def test_compiles_in_one_graph(dilation: int) -> None:
    topology, blocks, x = DenseFormer(dilation), net(4), torch.randn(4, 8)

    def forward(alpha: Tensor, x: Tensor) -> Tensor:
        return run(topology, topology.weights({"alpha": alpha}, Dims(4)), x, blocks)

    alpha = torch.randn_like(topology.parameters(Dims(4), "paper")["alpha"])
    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(alpha, x), forward(alpha, x))


@pytest.mark.parametrize("option", ["dilation", "period"])
@pytest.mark.parametrize("value", [0, -1, 1.5])
def test_wrong_options(option: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{option}={value}.*whole number"):
        make_topology("denseformer", {option: value})


def test_a_period_beyond_the_trunk() -> None:
    with pytest.raises(UnsupportedTopology, match=r"period=4.*3 units"):
        DenseFormer(period=4).parameters(Dims(3), "preserve")
