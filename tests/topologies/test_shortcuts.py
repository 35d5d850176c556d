"""Schemes that change the shortcut of each unit: learned scales, biases and gates, skips, and the input read again."""

from __future__ import annotations

import functools
from typing import Any, get_args

import pytest
import torch
import toy_nets
from formulas import by_reference
from torch import Tensor, nn
from toy_nets import plain

from rewire.errors import UnsupportedTopology
from rewire.topologies import Topology, ddl, make_topology, review
from rewire.topologies.base import Dims, Start, materialize

WIDTH = 6
net = functools.partial(toy_nets.net, width=WIDTH)
SCHEMES: dict[str, tuple[str, dict[str, Any]]] = {
    "x0-lambdas": ("x0-lambdas", {}),
    "x0-lambdas, state": ("x0-lambdas", {"shortcut": "state"}),
    "unet": ("unet", {}),
    "scale": ("residual-scale", {}),
    "scale, bias": ("residual-scale", {"bias": True}),
    "scale, branch": ("residual-scale", {"branch": True}),
    "scale, branch, bias": ("residual-scale", {"branch": True, "bias": True}),
    "gate": ("variance-gate", {}),
    "difference": ("variance-gate", {"form": "difference", "temperature": 2.0}),
}
#: Those that read the branch, too: test_ddl.py and test_review.py have the rest of their tests.
OF_BRANCHES = {
    f"{name}, {form}": (name, {"form": form})
    for name, forms in (("ddl", ddl.Form), ("review", review.Form))
    for form in get_args(forms)
}
EVERY = SCHEMES | OF_BRANCHES


def made(key: str, start: Start = "paper") -> Topology:
    name, options = EVERY[key]
    return make_topology(name, options).for_start(start)


def drawn(topology: Topology, depth: int) -> dict[str, Tensor]:
    start = topology.parameters(Dims(depth, WIDTH), "paper")
    return {name: (0.5 * torch.randn_like(value)).requires_grad_() for name, value in start.items()}


@pytest.mark.each_once
@pytest.mark.parametrize("key", EVERY)
@pytest.mark.parametrize("depth", [2, 3, 6])
def test_formulas(key: str, depth: int) -> None:
    topology, blocks, dims = made(key), net(depth, torch.float64), Dims(depth, WIDTH)
    parameters, x = drawn(topology, depth), torch.randn(2, 3, WIDTH, dtype=torch.float64, requires_grad=True)
    got = toy_nets.run(topology, topology.weights(parameters, dims), x, blocks)
    want = by_reference(topology, parameters, x, blocks)[0]
    # Gates come from a float32 sigmoid, biases are multiplied in float32; all else is float64 of float32 parameters.
    close: Any = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(got, want, **close)
    inputs, upstream = (x, *parameters.values(), *nn.ModuleList(blocks).parameters()), torch.randn_like(x)
    grads = [torch.autograd.grad(out, inputs, upstream) for out in (got, want)]
    torch.testing.assert_close(*grads, **close)


@pytest.mark.each_once
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("key", EVERY)
def test_preserving_start_is_bitwise(key: str, dtype: torch.dtype) -> None:
    topology = made(key, "preserve")
    parameters = topology.parameters(Dims(5, WIDTH), "preserve")
    assert all(value.dtype == torch.float32 for value in parameters.values())
    weights, x = topology.weights(parameters, Dims(5, WIDTH)), torch.randn(4, WIDTH).to(dtype)
    for zero in (False, True):
        blocks = net(5, dtype, zero=zero)
        out = toy_nets.run(topology, weights, x, blocks)
        assert out.dtype == dtype and torch.equal(out, plain(x, blocks))
    if not key.startswith("review"):  # which has no constant form
        assert torch.equal(topology.matrix(weights, Dims(5, WIDTH)), torch.eye(5))


@pytest.mark.each_once
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("start", ["preserve", "paper"])
@pytest.mark.parametrize("key", SCHEMES)
def test_every_weight_learns(key: str, start: Start, zero: bool) -> None:
    topology = made(key, start)
    before = topology.parameters(Dims(4, WIDTH), start)
    learned: dict[str, Tensor] = {name: nn.Parameter(value.clone()) for name, value in before.items()}
    blocks = net(4, zero=zero)
    stepper = torch.optim.SGD([*learned.values(), *nn.ModuleList(blocks).parameters()], lr=0.1)
    x, target = torch.randn(2, 16, WIDTH)
    for _ in range(1 + zero):
        stepper.zero_grad()
        out = toy_nets.run(topology, topology.weights(learned, Dims(4, WIDTH)), x, blocks)
        nn.functional.mse_loss(out, target).backward()
        stepper.step()
    for name, value in learned.items():
        assert (value != before[name]).all(), name


def test_first_gradients_are_of_the_paper_start_s_size() -> None:
    """The gate's other form is not a saturated one."""
    sizes = []
    for start in get_args(Start):
        topology = made("gate", start)
        gates = topology.parameters(Dims(4, WIDTH), start)["gates"].requires_grad_()
        x, target = torch.randn(2, 16, WIDTH, generator=torch.Generator().manual_seed(0))
        out = toy_nets.run(topology, topology.weights({"gates": gates}, Dims(4, WIDTH)), x, net(4))
        (gradient,) = torch.autograd.grad(nn.functional.mse_loss(out, target), gates)
        sizes.append(float(gradient.norm()))
    assert 0.5 < sizes[0] / sizes[1] < 10


def test_paper_starts() -> None:
    start = made("x0-lambdas").parameters(Dims(4, WIDTH), "paper")
    torch.testing.assert_close(start["resid_lambdas"], 1.15 - 0.10 * torch.arange(4) / 3)
    torch.testing.assert_close(start["x0_lambdas"], 0.20 - 0.15 * torch.arange(4) / 3)
    assert made("unet").parameters(Dims(5, WIDTH), "paper")["skip_weights"].tolist() == [1.0, 1.0]
    weights = made("gate").weights(made("gate").parameters(Dims(2, WIDTH), "paper"), Dims(2, WIDTH))
    torch.testing.assert_close(weights.branch, torch.full((2, WIDTH), 0.5))
    torch.testing.assert_close(weights.shortcut**2 + weights.branch**2, torch.ones(2, WIDTH))


def test_the_gate_leaves_some_of_the_shortcut() -> None:
    weights = made("gate").weights({"gates": torch.full((1, WIDTH), 50.0)}, Dims(1, WIDTH))
    torch.testing.assert_close(weights.shortcut, torch.full((1, WIDTH), 1e-3**0.5))


def test_states_of_the_skips() -> None:
    """No state is kept longer than its partner needs it."""
    topology, blocks, held = made("unet"), net(7), []
    weights = topology.weights(topology.parameters(Dims(7, WIDTH), "paper"), Dims(7, WIDTH))
    toy_nets.run(
        topology, weights, torch.randn(2, WIDTH), blocks, check=lambda *seen: held.append(1 + len(seen[3][1].states))
    )
    assert held == [1, 2, 3, 4, 3, 2, 1]


def test_matrices() -> None:
    topology = made("x0-lambdas")
    weights = topology.weights(drawn(topology, 3), Dims(3, WIDTH))
    want = torch.diag(weights[:, 0])
    want[:, 0] += weights[:, 1]
    assert torch.equal(topology.matrix(weights, Dims(3, WIDTH)), want)
    weights = made("unet").weights({"skip_weights": torch.tensor([2.0, 3.0])}, Dims(4, WIDTH))
    want = torch.eye(4)
    want[2, 2] += 2  # x_2 is what unit 3 reads anyway
    want[3, 1] = 3
    assert torch.equal(made("unet").matrix(weights, Dims(4, WIDTH)), want)
    topology = made("scale, branch")
    parameters = drawn(topology, 3)
    table = topology.matrix(topology.weights(parameters, Dims(3, WIDTH)), Dims(3, WIDTH))
    torch.testing.assert_close(table, torch.diag(parameters["shortcut"].mean(1)))


@pytest.mark.parametrize("key", ["scale, branch, bias", "scale, branch", "scale, bias"])
def test_parallel_branches_are_summed_before_their_bias(key: str) -> None:
    topology, (x, f, g) = made(key), torch.randn(3, 4, WIDTH)
    weights = topology.weights(drawn(topology, 1), Dims(1, WIDTH))
    merged = [materialize(topology.merge((x,), weights, 1, *fs)) for fs in ((f, g), (f + g,))]  # type: ignore[attr-defined]
    torch.testing.assert_close(*merged)


@pytest.mark.slow
@pytest.mark.parametrize("key", SCHEMES)
def test_compiles_in_one_graph(key: str) -> None:
    topology = made(key)
    blocks, x, parameters = net(4), torch.randn(4, WIDTH), drawn(topology, 4)

    def forward(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return toy_nets.run(topology, topology.weights(parameters, Dims(4, WIDTH)), x, blocks)

    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(parameters, x), forward(parameters, x))


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"temperature=0.*positive"):
        make_topology("variance-gate", {"temperature": 0})
    with pytest.raises(ValueError, match=r"shortcut='block'.*'mix', 'state'"):
        make_topology("x0-lambdas", {"shortcut": "block"})
    with pytest.raises(ValueError, match=r"form='exact'.*'gate', 'difference'"):
        make_topology("variance-gate", {"form": "exact"})
    with pytest.raises(UnsupportedTopology, match=r"variance-gate.*never both 1.*start='paper'"):
        made("gate").parameters(Dims(2, WIDTH), "preserve")
    with pytest.raises(UnsupportedTopology, match=r"'unet' pairs units.*only one"):
        made("unet").parameters(Dims(1, WIDTH), "preserve")
    topology = made("scale, bias")
    with pytest.raises(UnsupportedTopology, match=r"no constant form"):
        topology.program(topology.weights(drawn(topology, 2), Dims(2, WIDTH)), Dims(2, WIDTH))
