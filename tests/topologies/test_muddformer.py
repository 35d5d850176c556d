from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
import toy_nets
from formulas import by_reference
from torch import Tensor, nn
from toy_nets import WIDTH, opened, plain

from rewire.topologies import list_topologies, make_topology
from rewire.topologies.base import Dims, QKVInputs, States
from rewire.topologies.muddformer import MUDDFormer

TRUNKS = [Dims(1, WIDTH), Dims(1, WIDTH, frozenset({1})), Dims(2, WIDTH), Dims(2, WIDTH, frozenset({1, 2}))]
TRUNKS += [Dims(5, WIDTH), Dims(5, WIDTH, frozenset({1, 3, 4}))]
MUDD = MUDDFormer()


class Block(nn.Module):
    """A branch that tells its four inputs apart, or takes one for all."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inputs = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.out = nn.Linear(width, width)

    def forward(self, *ways: Tensor) -> Tensor:
        ways *= 4 // len(ways)
        return self.out(torch.tanh(sum(linear(way) for linear, way in zip(self.inputs, ways, strict=True))))


net = functools.partial(toy_nets.net, branch=Block)


def run(weights: object, x: Tensor, blocks: list[nn.Module], dims: Dims) -> Tensor:
    def check(t: int, read: Any, opened: States, written: States) -> None:
        assert len(opened[1].states) == len(written[1].states) == t
        assert isinstance(read, QKVInputs) == (t in dims.attention and t > 1)
        assert opened[0] is (read.residual if isinstance(read, QKVInputs) else read)

    return toy_nets.run(MUDD, weights, x, blocks, dims, check)


def drawn(dims: Dims) -> dict[str, Tensor]:
    start = MUDD.parameters(dims, "paper")
    return {name: (0.5 * torch.randn_like(value)).requires_grad_() for name, value in start.items()}


@pytest.mark.parametrize("dims", TRUNKS)
def test_formulas(dims: Dims) -> None:
    parameters, blocks = drawn(dims), net(dims.depth, torch.float64)
    x = torch.randn(2, 3, WIDTH, dtype=torch.float64, requires_grad=True)
    got = run(MUDD.weights(parameters, dims), x, blocks, dims)
    want = by_reference(MUDD, parameters, x, blocks, dims)[0]
    torch.testing.assert_close(got, want)
    inputs, upstream = (x, *parameters.values(), *nn.ModuleList(blocks).parameters()), torch.randn_like(x)
    torch.testing.assert_close(*[torch.autograd.grad(out, inputs, upstream) for out in (got, want)])


def test_any_leading_shape() -> None:
    dims, blocks, x = TRUNKS[-1], net(5), torch.randn(2, 3, 4, WIDTH)
    weights = MUDD.weights(drawn(dims), dims)
    torch.testing.assert_close(run(weights, x[1, 2, 3], blocks, dims), run(weights, x, blocks, dims)[1, 2, 3])


@pytest.mark.each_once
@pytest.mark.parametrize("start", ["preserve", "paper"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("dims", TRUNKS)
def test_starts_as_the_plain_network_bitwise(dims: Dims, dtype: torch.dtype, start: str) -> None:
    parameters = MUDD.parameters(dims, start)  # type: ignore[arg-type]
    assert all(value.dtype == torch.float32 for value in parameters.values())
    weights, blocks, x = MUDD.weights(parameters, dims), net(dims.depth, dtype), torch.randn(4, WIDTH).to(dtype)
    out = run(weights, x, blocks, dims)
    assert out.dtype == dtype
    assert torch.equal(out, plain(x, blocks))
    assert torch.equal(MUDD.matrix(weights, dims), torch.eye(dims.depth + 1)[1:])
    f, g = torch.randn(2, 4, WIDTH).to(dtype)
    assert torch.equal(MUDD.merge(opened(MUDD, x, weights), weights, 1, f, g), x + f + g)  # branches in parallel


@pytest.mark.each_once
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("dims", TRUNKS)
def test_every_weight_learns_in_two_steps(dims: Dims, zero: bool, optimizer: type) -> None:
    before, blocks = MUDD.parameters(dims, "preserve"), net(dims.depth, zero=zero)
    learned = {name: nn.Parameter(value.clone()) for name, value in before.items()}
    stepper = optimizer([*learned.values(), *nn.ModuleList(blocks).parameters()], lr=0.1, weight_decay=0)
    x, target = torch.randn(2, 64, WIDTH)
    for _ in range(2):
        stepper.zero_grad()
        nn.functional.mse_loss(run(MUDD.weights(learned, dims), x, blocks, dims), target).backward()
        stepper.step()
    for name, value in learned.items():
        assert (value != before[name]).all(), name


def test_sizes_and_start() -> None:
    dims = Dims(3, 512, frozenset({1, 3}))  # reads: unit 2 in 1 way, unit 3 in 4, the output in 1
    parameters = MUDD.parameters(dims, "paper")
    assert parameters["w1"].shape == (2 + 12 + 4, 512)
    assert parameters["w2"].shape == (2**2 + 12**2 + 4**2,)
    assert (parameters["w2"] == 0).all()
    assert parameters["static"].tolist() == [0, 1] + [0, 0, 1] * 4 + [0, 0, 0, 1]
    assert abs(parameters["w1"].std().item() * math.sqrt(512) - 1) < 0.05
    torch.manual_seed(7)
    state = torch.get_rng_state()
    assert torch.equal(MUDD.parameters(dims, "preserve")["w1"], parameters["w1"])  # whatever the seed
    assert torch.equal(torch.get_rng_state(), state)


def test_post_norm_adds_to_the_residual_way() -> None:
    dims = TRUNKS[3]
    weights = MUDD.weights(drawn(dims), dims)
    x, y, f, normed = torch.randn(4, 3, WIDTH)
    value, states = MUDD.read((y, opened(MUDD, x, weights)[1]), weights, 2)
    assert isinstance(value, QKVInputs)
    assert torch.equal(MUDD.merge(states, weights, 2, f), value.residual + f)
    newest, history = MUDD.push(states, weights, 2, normed)
    assert newest is normed and all(map(torch.equal, history.states, (x, y)))


def test_matrix() -> None:
    dims = Dims(2, WIDTH, frozenset({2}))
    parameters = MUDD.parameters(dims, "paper")
    parameters["static"] = torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8, 10, 20, 30])  # unit 2: q, k, v, r; output
    assert MUDD.matrix(MUDD.weights(parameters, dims), dims).tolist() == [[4, 5, 0], [10, 20, 30]]


def test_weights_are_float32_under_autocast() -> None:
    dims, sources = TRUNKS[-1], tuple(torch.randn(4, 2, WIDTH))
    weights = MUDD.weights(drawn(dims), dims)
    history = opened(MUDD, sources[0], weights)[1].after(sources[1:3])
    want = MUDD.read((sources[3], history), weights, 4)[0]
    with torch.autocast("cpu", torch.bfloat16):
        got = MUDD.read((sources[3], history), weights, 4)[0]
        assert run(weights, sources[0], net(5), dims).dtype == torch.float32
    assert isinstance(got, QKVInputs) and isinstance(want, QKVInputs)
    for way in ("q", "k", "v", "residual"):
        assert torch.equal(getattr(got, way), getattr(want, way))


NORMED = MUDDFormer(norms=True)


@pytest.mark.each_once
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("block", [None, 2])
@pytest.mark.parametrize("dims", TRUNKS)
def test_with_norms_it_starts_as_the_plain_network_bitwise(dims: Dims, block: int | None, dtype: torch.dtype) -> None:
    topology = MUDDFormer(norms=True, block=block)
    parameters = topology.parameters(dims, "preserve")
    weights, blocks, x = topology.weights(parameters, dims), net(dims.depth, dtype), torch.randn(4, WIDTH).to(dtype)
    out = toy_nets.run(topology, weights, x, blocks, dims)
    assert out.dtype == dtype
    assert torch.equal(out, plain(x, blocks))
    assert torch.equal(topology.matrix(weights, dims), torch.eye(dims.depth + 1)[1:]) or block


@pytest.mark.parametrize("dims", TRUNKS[2:])
def test_with_norms_every_weight_learns_in_two_steps(dims: Dims) -> None:
    before, blocks = NORMED.parameters(dims, "preserve"), net(dims.depth)
    learned = {name: nn.Parameter(value.clone()) for name, value in before.items()}
    stepper = torch.optim.AdamW([*learned.values(), *nn.ModuleList(blocks).parameters()], lr=0.01, weight_decay=0)
    x, target = torch.randn(2, 64, WIDTH)
    for step in range(2):
        stepper.zero_grad()
        out = toy_nets.run(NORMED, NORMED.weights(learned, dims), x, blocks, dims)
        nn.functional.mse_loss(out, target).backward()
        if step == 0:
            assert learned["static"].grad is not None and (learned["static"].grad != 0).all()
            assert all(p.grad is not None and p.grad.abs().max() < 10 for p in learned.values())
        stepper.step()
    for name, value in learned.items():
        assert (value != before[name]).all(), name


def test_norms_hold_one_state_for_each_read() -> None:
    """They are kept as they are normed: once each, not once for each read."""
    dims, blocks, x = Dims(5, WIDTH), net(5), torch.randn(2, WIDTH)
    weights = NORMED.weights(NORMED.parameters(dims, "paper"), dims)

    def check(t: int, read: Any, opened: States, written: States) -> None:
        held = opened[1].states
        assert len(held) == t
        torch.testing.assert_close(held[0].square().mean(-1), torch.ones(2), rtol=1e-4, atol=0)

    toy_nets.run(NORMED, weights, x, blocks, dims, check)


@pytest.mark.slow
@pytest.mark.parametrize("dims", TRUNKS[-2:])
def test_compiles_in_one_graph(dims: Dims) -> None:
    """In float64: nets of drawn weights multiply rounding errors."""
    blocks, x, parameters = net(5, torch.float64), torch.randn(4, WIDTH, dtype=torch.float64), drawn(dims)

    def forward(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return run(MUDD.weights(parameters, dims), x, blocks, dims)

    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(parameters, x), forward(parameters, x))


def test_name() -> None:
    assert make_topology("muddformer", {}) == MUDD
    assert list_topologies()["muddformer"]
    assert MUDD.reads_qkv and MUDD.needs_width and MUDD.granularity == "block"
