from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from formulas import by_reference
from torch import nn
from toy_nets import WIDTH, begin, net, plain, run_learned

from rewire.errors import UnsupportedTopology
from rewire.topologies import list_topologies, make_topology
from rewire.topologies.base import Dims
from rewire.topologies.gated import GatedHyperConnections

Gated = GatedHyperConnections
VARIANTS = [Gated(4, 3), Gated(3, 2, "streams"), Gated(2, 3, norm_eps=1e-2)]


def learned(topology: Gated, depth: int, start: Any = "preserve", noise: float = 0.0) -> dict[str, nn.Parameter]:
    values = topology.parameters(Dims(depth, WIDTH), start)
    return {name: nn.Parameter(value + noise * torch.randn_like(value)) for name, value in values.items()}


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("topology", VARIANTS, ids=str)
def test_formulas_and_gradients(topology: Gated, depth: int) -> None:
    values = learned(topology, depth, "paper", noise=0.5)
    twins = {name: value.detach().double().requires_grad_() for name, value in values.items()}
    x, blocks = torch.randn(2, 3, WIDTH, dtype=torch.float64, requires_grad=True), net(depth, torch.float64)
    got, want = run_learned(topology, values, x, blocks), by_reference(topology, twins, x, blocks)[0]
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)  # 1 + w is float32
    got_grads = torch.autograd.grad(got.square().sum(), [x, *values.values()])
    want_grads = torch.autograd.grad(want.square().sum(), [x, *twins.values()])
    for got_grad, want_grad in zip(got_grads, want_grads, strict=True):
        torch.testing.assert_close(got_grad.double(), want_grad, rtol=1e-5, atol=1e-5 * float(want_grad.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("streams", [2, 3, 4])
def test_starts_as_the_plain_network(streams: int, dtype: torch.dtype) -> None:
    topology, dims = Gated(streams, 3, "streams"), Dims(6, WIDTH)
    values, blocks, x = learned(topology, 6), net(6, dtype), torch.randn(4, 3, WIDTH).to(dtype)
    out, want = run_learned(topology, values, x, blocks), plain(x, blocks)
    assert out.dtype == dtype
    assert torch.equal(out, want) if streams != 3 else torch.allclose(out, want, rtol=1e-2, atol=1e-2)
    table = topology.matrix(topology.weights(values, dims), dims)  # type: ignore[arg-type]
    assert torch.equal(table, torch.ones(7, 7).tril())


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_every_weight_learns(optimizer: Any, zero: bool) -> None:
    topology, blocks = Gated(2, 3, "streams"), net(4, torch.float64, zero)
    values = {name: nn.Parameter(value.double()) for name, value in learned(topology, 4).items()}
    steps = optimizer([*values.values(), *nn.ModuleList(blocks).parameters()], lr=0.01, weight_decay=0)
    x, target = torch.randn(2, 16, WIDTH, dtype=torch.float64)
    history = [copy.deepcopy(values)]
    for _ in range(3):
        steps.zero_grad()
        (run_learned(topology, values, x, blocks) - target).square().sum(-1).mean().backward()
        steps.step()
        history.append(copy.deepcopy(values))
    first = 2 if zero else 1
    for name, step in (("down", first), ("inject", first), ("up", first + 1), ("norm", first + 1)):
        assert (history[step][name] != history[0][name]).all(), name


def test_states() -> None:
    topology, x = Gated(2, 3), torch.randn(5, WIDTH).bfloat16()
    weights = topology.weights(learned(topology, 2, "paper"), Dims(2, WIDTH))  # type: ignore[arg-type]
    states = begin(topology, x, weights)
    assert states[0].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()  # n copies cost nothing
    read, opened = topology.read(states, weights, 1)
    f, g = torch.randn(2, 5, WIDTH).bfloat16()
    (written,) = topology.write(opened, weights, 1, f, g)
    assert read.dtype == written.dtype == topology.template(opened).dtype == torch.bfloat16
    write = opened[1].double()
    exact = x.double().unsqueeze(-2) + write.unsqueeze(-1) * (f.double() + g.double()).unsqueeze(-2)
    torch.testing.assert_close(written.double(), exact, rtol=0.51 * torch.finfo(torch.bfloat16).eps, atol=1e-6)


def test_autocast_changes_only_the_branches() -> None:
    topology, fs = Gated(2, 3), torch.randn(3, 2, WIDTH).bfloat16()
    values, x, blocks = learned(topology, 3, "paper", 0.5), torch.randn(2, WIDTH), [lambda _, f=f: f for f in fs]
    want = run_learned(topology, values, x, blocks)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(run_learned(topology, values, x, blocks), want)


@pytest.mark.slow
def test_compiles_in_one_graph() -> None:
    topology, blocks, x = Gated(2, 3), net(3), torch.randn(4, WIDTH)
    values = learned(topology, 3, "paper", noise=0.5)
    compiled = torch.compile(run_learned, fullgraph=True, backend="aot_eager")
    got, want = compiled(topology, values, x, blocks), run_learned(topology, values, x, blocks)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(*[torch.autograd.grad(out.sum(), list(values.values())) for out in (got, want)])


def test_names_and_options() -> None:
    assert make_topology("hc-gated", {"streams": 2, "rank": 5}) == Gated(2, 5)
    assert list_topologies()["hc-gated"] and Gated.needs_width
    assert Gated(2).for_start("preserve") == Gated(2, reads="streams") and Gated(2).for_start("paper") == Gated(2)
    with pytest.raises(UnsupportedTopology, match=r"hc-gated.*normed.*start='paper'"):
        Gated(2).parameters(Dims(2, WIDTH), "preserve")
    for option, value in (("streams", 1), ("rank", 0), ("reads", "all"), ("norm_eps", 1.0)):
        with pytest.raises(ValueError, match=f"{option}={value!r}"):
            make_topology("hc-gated", {option: value})
