from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import toy_nets
from formulas import by_reference
from torch import Tensor, nn
from toy_nets import WIDTH, begin, opened, plain

from rewire.topologies import Recurrence, Topology, make_topology
from rewire.topologies.base import Dims, QKVInputs, States

NAMES = ["grn-v1", "grn-v2", "grn-v3", "dca"]


def dims_of(name: str, depth: int) -> Dims:
    """Every other unit begins with an attention, where the topology asks for it."""
    return Dims(depth, WIDTH, frozenset(range(1, depth + 1, 2) if name == "dca" else ()))


class Block(nn.Module):
    """An attention over dimension -2 and what follows it: returns the increment of either one read or of q, k, v."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.last = nn.Linear(width, width)

    def forward(self, *ways: Tensor) -> Tensor:
        q, k, v = (ways * 3)[:3]
        scores = self.inner[0](q) @ self.inner[1](k).transpose(-1, -2)
        attention = scores.softmax(-1) @ self.inner[2](v)
        return self.last(torch.tanh(self.inner[3](q + attention)))


net = functools.partial(toy_nets.net, branch=Block)


def run(topology: Topology, parameters: dict[str, Tensor], x: Tensor, blocks: list[nn.Module], dims: Dims) -> Tensor:
    def check(t: int, read: Any, opened: States, written: States) -> None:
        assert isinstance(read, QKVInputs) == (t in dims.attention)
        assert not isinstance(read, QKVInputs) or read.residual is read.q

    return toy_nets.run(topology, topology.weights(parameters, dims), x, blocks, dims, check)


def learned(topology: Topology, dims: Dims, start: str = "preserve") -> dict[str, nn.Parameter]:
    start_values = topology.parameters(dims, start)  # type: ignore[arg-type]
    assert all(value.dtype == torch.float32 for value in start_values.values())
    return {name: nn.Parameter(value) for name, value in start_values.items()}


def randomised(topology: Topology, dims: Dims) -> dict[str, nn.Parameter]:
    torch.manual_seed(2)
    parameters = learned(topology, dims)
    for value in parameters.values():
        nn.init.normal_(value, std=0.4)
    return parameters


@pytest.mark.each_once
@pytest.mark.parametrize("last", [None, 1, 2, 9])
@pytest.mark.parametrize(("depth", "leading"), [(1, (3,)), (2, (2, 3)), (5, (2, 1, 3))])
@pytest.mark.parametrize("name", NAMES)
def test_formulas_and_gradients(name: str, depth: int, leading: tuple[int, ...], last: int | None) -> None:
    topology, dims = make_topology(name, {"last": last}), dims_of(name, depth)
    parameters, blocks = randomised(topology, dims), net(depth, torch.float64)
    assert set(parameters) == ({"b", "w"} if name in ("grn-v3", "dca") else {"b"})
    x = torch.randn(*leading, WIDTH, dtype=torch.float64, requires_grad=True)
    out = run(topology, parameters, x, blocks, dims)
    twins = {key: value.detach().double().requires_grad_() for key, value in parameters.items()}
    want = by_reference(topology, twins, x, blocks, dims)[0]
    assert out.dtype == torch.float64
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)
    cotangent = torch.randn_like(out)
    got_grads = torch.autograd.grad(out, [x, *parameters.values()], cotangent)
    want_grads = torch.autograd.grad(want, [x, *twins.values()], cotangent)
    for got, twin in zip(got_grads, want_grads, strict=True):
        torch.testing.assert_close(got.double(), twin, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "last", "b", "w"),
    [
        ("grn-v1", None, (15,), None),  # 1 + 2 + .. + 5
        ("grn-v1", 1, (1 + 2 + 3 + 3 + 3,), None),
        ("grn-v2", 2, (1 + 2 + 3 + 4 + 4, WIDTH), None),
        ("grn-v3", None, (15, WIDTH), (5, WIDTH)),
        ("dca", None, (3 * 1 + 2 + 3 * 3 + 4 + 5, WIDTH), (3 + 1 + 3 + 1 + 1, WIDTH)),
        ("dca", 1, (3 * 1 + 2 + 3 * 3 + 3 + 3, WIDTH), (9, WIDTH)),
    ],
)
def test_sizes(name: str, last: int | None, b: tuple[int, ...], w: tuple[int, ...] | None) -> None:
    topology, dims = make_topology(name, {"last": last}), dims_of(name, 4)
    shapes = {key: tuple(value.shape) for key, value in topology.parameters(dims, "paper").items()}
    assert shapes == ({"b": b} if w is None else {"b": b, "w": w})
    assert topology.needs_width == (name != "grn-v1")
    assert topology.granularity == "block"
    assert not isinstance(topology, Recurrence)


@pytest.mark.each_once
@pytest.mark.parametrize("last", [None, 1, 2])
@pytest.mark.parametrize("start", ["preserve", "paper"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_starts_as_the_plain_network(name: str, dtype: torch.dtype, start: str, last: int | None) -> None:
    topology, dims, blocks = make_topology(name, {"last": last}), dims_of(name, 6), net(6, dtype)
    x = torch.randn(2, 3, WIDTH).to(dtype)
    out, want = run(topology, learned(topology, dims, start), x, blocks, dims), plain(x, blocks)
    assert out.dtype == dtype
    if last is None and dtype != torch.bfloat16:
        assert torch.equal(out, want)
    else:
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(out, want, rtol=4 * eps, atol=4 * eps)


@pytest.mark.each_once
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("last", [None, 1])
@pytest.mark.parametrize("name", NAMES)
def test_every_weight_learns(name: str, last: int | None, optimizer: type[torch.optim.Optimizer], zero: bool) -> None:
    topology, dims = make_topology(name, {"last": last}), dims_of(name, 5)
    parameters, blocks = learned(topology, dims), net(5, torch.float32, zero)
    start = copy.deepcopy(parameters)
    optim = optimizer([*parameters.values(), *nn.ModuleList(blocks).parameters()], lr=1e-2, weight_decay=0)  # type: ignore[call-arg]
    x, target = torch.randn(2, 4, 5, WIDTH)
    for step in range(2):
        optim.zero_grad()
        nn.functional.mse_loss(run(topology, parameters, x, blocks, dims), target, reduction="sum").backward()
        optim.step()
        if step == 1 or not zero:  # with zero branches, most weights have no gradient in the first step
            for key, value in parameters.items():
                assert (value != start[key]).all(), key


@pytest.mark.parametrize("name", NAMES)
def test_matrix(name: str) -> None:
    depth, last = 4, 1
    topology, dims = make_topology(name, {"last": last}), dims_of(name, depth)
    parameters = randomised(topology, dims)
    table = topology.matrix(topology.weights(parameters, dims), dims)
    assert table.dtype == torch.float32
    assert table.shape == (depth + 1, depth + 1)
    means = iter(parameters["b"].reshape(len(parameters["b"]), -1).mean(1).tolist())
    stacks = [[[0]], [[0], [1]], [[0], [1], [2]], [[0], [1, 2], [3]], [[0], [1, 2, 3], [4]]]  # members of each vector
    for t, stack in enumerate(stacks, start=1):
        ways = 3 if t in dims.attention else 1
        want = [0.0] * (depth + 1)
        for members in [members for _ in range(ways) for members in stack]:
            share = next(means) / ways
            for i in members:
                want[i] += share
        assert table[t - 1].tolist() == pytest.approx(want)
    full = make_topology(name, {})
    ones = full.matrix(full.weights(full.parameters(dims, "preserve"), dims), dims)
    torch.testing.assert_close(ones, torch.ones(depth + 1, depth + 1).tril())


@pytest.mark.parametrize("name", NAMES)
def test_low_precision_states_round_once(name: str) -> None:
    topology, dims = make_topology(name, {}), dims_of(name, 2)
    weights = topology.weights(randomised(topology, dims), dims)
    stack = tuple(torch.randn(3, 2, 3, WIDTH).bfloat16())

    def finish(x: Tensor, *increments: Tensor) -> Tensor:
        states = begin(topology, x, weights)
        for t, f in enumerate(increments, start=1):
            states = topology.write(topology.read(states, weights, t)[1], weights, t, f)
        return topology.finish(states, weights, dims)

    out = finish(*stack)
    want = finish(*(x.double() for x in stack))
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), want, rtol=2**-8 + 1e-5, atol=1e-6)
    mixed = finish(stack[0].float(), *stack[1:])  # as under autocast
    assert mixed.dtype == torch.float32
    torch.testing.assert_close(mixed.double(), want, rtol=1e-5, atol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(finish(stack[0].float(), *stack[1:]), mixed)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grn-v2", "dca"])
def test_compiles_in_one_graph(name: str) -> None:
    topology, dims, blocks = make_topology(name, {"last": 1}), dims_of(name, 3), net(3)
    parameters, x = learned(topology, dims), torch.randn(4, 2, WIDTH)

    def forward(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return run(topology, parameters, x, blocks, dims)

    want = forward(parameters, x)
    out = torch.compile(forward, fullgraph=True, backend="aot_eager")(parameters, x)
    torch.testing.assert_close(out, want)
    want_grads = torch.autograd.grad(want.square().sum(), list(parameters.values()))
    grads = torch.autograd.grad(out.square().sum(), list(parameters.values()))
    torch.testing.assert_close(grads, want_grads, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("last", [0, -1, 1.5])
@pytest.mark.parametrize("name", NAMES)
def test_wrong_options(name: str, last: float) -> None:
    with pytest.raises(ValueError, match=rf"last={last}.*whole number"):
        make_topology(name, {"last": last})


def test_parallel_branches_are_one_increment() -> None:
    topology, dims = make_topology("grn-v1", {}), Dims(1)
    weights = topology.weights({"b": torch.tensor([1.0, 2.0, 3.0])}, dims)
    x, f, g = torch.randn(3, 2, WIDTH)
    states = topology.write(opened(topology, x, weights), weights, 1, f, g)
    newest, history = states
    assert torch.equal(newest, f + g)
    assert torch.equal(history.states[0], x)
    torch.testing.assert_close(topology.finish(states, weights, dims), 2 * x + 3 * (f + g))
