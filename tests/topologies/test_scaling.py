from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import toy_nets
from formulas import by_reference
from torch import Tensor, nn
from toy_nets import plain

from rewire.topologies import Topology, list_topologies, make_topology
from rewire.topologies.base import Dims, States
from rewire.topologies.registry import name_and_options
from rewire.topologies.scaling import BranchScale, LayerScale

WIDTH = 6
net = functools.partial(toy_nets.net, width=WIDTH)
NAMES = ["rezero", "skipinit", "layerscale"]


def run(topology: Topology, weights: object, x: Tensor, blocks: list[nn.Module]) -> Tensor:
    def check(t: int, read: Any, opened: States, written: States) -> None:
        assert read is opened[0] and len(opened) == 1

    return toy_nets.run(topology, weights, x, blocks, check=check)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_formulas(name: str, depth: int) -> None:
    topology, blocks = make_topology(name, {}), net(depth, torch.float64)
    x = torch.randn(2, 3, WIDTH, dtype=torch.float64, requires_grad=True)
    scales = torch.randn_like(topology.parameters(Dims(depth, WIDTH), "paper")["scales"]).requires_grad_()
    weights = topology.weights({"scales": scales}, Dims(depth, WIDTH))
    upstream = torch.randn_like(x)
    inputs = (x, scales, *nn.ModuleList(blocks).parameters())
    got, want = run(topology, weights, x, blocks), by_reference(topology, {"scales": scales}, x, blocks)[0]
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.autograd.grad(got, inputs, upstream), torch.autograd.grad(want, inputs, upstream))


def test_paper_starts() -> None:
    for name in ("rezero", "skipinit"):
        scales = make_topology(name, {}).parameters(Dims(3, WIDTH), "paper")["scales"]
        assert scales.dtype == torch.float32
        assert scales.tolist() == [0.0] * 3
    for units, eps in [(2, 0.1), (36, 0.1), (37, 1e-5), (48, 1e-5), (49, 1e-6), (96, 1e-6)]:
        scales = LayerScale().parameters(Dims(units, WIDTH), "paper")["scales"]
        assert torch.equal(scales, torch.full((units, WIDTH), eps))
    assert (LayerScale(eps=0.25).parameters(Dims(3, WIDTH), "paper")["scales"] == 0.25).all()
    x = torch.randn(4, WIDTH)
    weights = BranchScale().weights(BranchScale().parameters(Dims(3, WIDTH), "paper"), Dims(3, WIDTH))
    assert torch.equal(run(BranchScale(), weights, x, net(3)), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("topology", [BranchScale(), LayerScale(), LayerScale(eps=0.5)])
def test_preserving_start_is_the_plain_network_bitwise(topology: Topology, dtype: torch.dtype) -> None:
    blocks, x = net(4, dtype), torch.randn(3, WIDTH).to(dtype)
    weights = topology.weights(topology.parameters(Dims(4, WIDTH), "preserve"), Dims(4, WIDTH))
    out = run(topology, weights, x, blocks)
    assert out.dtype == dtype
    assert torch.equal(out, plain(x, blocks))
    f, g = torch.randn(2, 64, WIDTH).to(dtype)
    x = torch.randn(64, WIDTH).to(dtype)
    assert torch.equal(topology.merge((x,), weights, 1, f, g), x + f + g)  # branches in parallel


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_every_scale_learns_in_two_steps(name: str, zero: bool, optimizer: type[torch.optim.Optimizer]) -> None:
    topology, blocks = make_topology(name, {}), net(4, zero=zero)
    before = topology.parameters(Dims(4, WIDTH), "preserve")["scales"]
    scales = nn.Parameter(before.clone())
    stepper = optimizer([scales, *nn.ModuleList(blocks).parameters()], lr=0.05, weight_decay=0)  # type: ignore[call-arg]
    x, target = torch.randn(2, 16, WIDTH)
    for _ in range(2):
        stepper.zero_grad()
        out = run(topology, topology.weights({"scales": scales}, Dims(4, WIDTH)), x, blocks)
        nn.functional.mse_loss(out, target).backward()
        stepper.step()
    assert (scales != before).all()


def test_paper_start_at_zero_trains_the_scales_first() -> None:
    blocks, scales = net(3), nn.Parameter(BranchScale().parameters(Dims(3, WIDTH), "paper")["scales"])
    out = run(BranchScale(), BranchScale().weights({"scales": scales}, Dims(3, WIDTH)), torch.randn(4, WIDTH), blocks)
    out.square().sum().backward()
    assert scales.grad is not None
    assert (scales.grad != 0).all()
    assert all((p.grad == 0).all() for p in nn.ModuleList(blocks).parameters())


def test_post_norm_scales_inside_the_norm() -> None:
    x, f, normed = torch.randn(3, 4, WIDTH)
    weights = torch.randn(2, WIDTH)
    topology = LayerScale()
    torch.testing.assert_close(topology.merge((x,), weights, 2, f), x + weights[1] * f)
    assert topology.push((x,), weights, 2, normed) == (normed,)


def test_matrix() -> None:
    scales = torch.tensor([[0.5, 1.5], [2.0, 4.0]])
    want = [[1.0, 0.0, 0.0], [1.0, 1.0, 0.0], [1.0, 1.0, 3.0]]
    assert LayerScale().matrix(scales, Dims(2, 2)).tolist() == want
    assert BranchScale().matrix(scales.mean(1), Dims(2)).tolist() == want


def test_autocast_keeps_the_stream_in_float32() -> None:
    topology, x = LayerScale(), torch.randn(4, WIDTH)
    weights = topology.weights(topology.parameters(Dims(3, WIDTH), "preserve"), Dims(3, WIDTH))
    with torch.autocast("cpu", torch.bfloat16):
        assert run(topology, weights, x, net(3)).dtype == torch.float32


@pytest.mark.slow
def test_compiles_in_one_graph() -> None:
    topology, blocks, x = LayerScale(), net(3), torch.randn(4, WIDTH)

    def forward(scales: Tensor, x: Tensor) -> Tensor:
        return run(topology, topology.weights({"scales": scales}, Dims(3, WIDTH)), x, blocks)

    scales = torch.randn(3, WIDTH)
    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(scales, x), forward(scales, x))


@pytest.mark.parametrize("eps", [0.0, -1e-5, float("inf"), float("nan")])
def test_wrong_options(eps: float) -> None:
    with pytest.raises(ValueError, match=f"eps={eps}.*positive"):
        make_topology("layerscale", {"eps": eps})


def test_names() -> None:
    assert make_topology("rezero", {}) == make_topology("skipinit", {}) == BranchScale()
    assert make_topology("layerscale", {"eps": 1e-4}) == LayerScale(1e-4)
    assert all(list_topologies()[name] for name in NAMES)
    assert LayerScale.needs_width and not BranchScale.needs_width
    assert name_and_options(BranchScale()) == ("rezero", {})
    assert name_and_options(make_topology("skipinit", {}, "preserve")) == ("skipinit", {})
    with pytest.raises(TypeError, match="no option 'eps'"):
        make_topology("rezero", {"eps": 0.1})
