from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma3n.configuration_gemma3n import Gemma3nTextConfig
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextLaurelBlock

from rewire.errors import UnsupportedTopology
from rewire.topologies import Topology, make_topology, topologies
from rewire.topologies.base import Dims
from rewire.topologies.laurel import LaurelLR, LaurelPA, LaurelRW

WIDTH = 6
VARIANTS = [LaurelRW(), LaurelRW(total=1.0), LaurelLR(rank=2), LaurelPA(rank=2), LaurelPA(rank=3, last=1)]
PRESERVING = [LaurelRW(), LaurelLR(rank=4), LaurelPA(rank=4, last=2)]


def naive(topology: Topology, x: Tensor, blocks: list[nn.Module], parameters: dict[str, Tensor]) -> Tensor:
    """Sections 2.1 to 2.3 as written."""
    p = {name: value.double() for name, value in parameters.items()}
    xs = [x]
    first_gain = 0
    for i, block in enumerate(blocks):
        f, x = block(xs[-1]), xs[-1]
        if isinstance(topology, LaurelRW):
            e_a, e_b = p["logits"][i, 0].exp(), p["logits"][i, 1].exp()
            xs.append(topology.total * (e_a * f + e_b * x) / (e_a + e_b))
            continue
        ba = torch.einsum("dr,re->ed", p["down"][i], p["up"][i])  # B A, [out, in]
        new = f + x
        if isinstance(topology, LaurelPA):
            used = xs[-topology.last :]
            for j, state in enumerate(used):
                new = new + p["gains"][first_gain + j] * (ba @ state.unsqueeze(-1)).squeeze(-1)
            first_gain += len(used)
        else:
            new = new + (ba @ x.unsqueeze(-1)).squeeze(-1)
        xs.append(new)
    assert "gains" not in p or first_gain == len(p["gains"])
    return xs[-1]


def run(topology: Topology, weights: object, x: Tensor, blocks: list[nn.Module]) -> Tensor:
    states = topology.start(x)
    for t, block in enumerate(blocks, start=1):
        value, states = topology.open(states, weights, t)
        assert value is states[-1]
        assert len(states) == min(t, getattr(topology, "last", 1))
        states = topology.write(states, weights, t, block(value))
    return topology.finish(states, weights, dims(len(blocks)))


def dims(depth: int) -> Dims:
    return Dims(depth, WIDTH)


def drawn(topology: Topology, depth: int) -> dict[str, Tensor]:
    start = topology.parameters(dims(depth), "paper")
    return {name: (0.5 * torch.randn_like(value)).requires_grad_() for name, value in start.items()}


def net(depth: int, dtype: torch.dtype = torch.float32, zero: bool = False) -> list[nn.Module]:
    torch.manual_seed(1)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(depth)]
    if zero:
        for block in blocks:
            nn.init.zeros_(block[2].weight)
            nn.init.zeros_(block[2].bias)
    return [block.to(dtype) for block in blocks]


def plain(x: Tensor, blocks: list[nn.Module]) -> Tensor:
    for block in blocks:
        x = x + block(x)
    return x


@pytest.mark.parametrize("topology", VARIANTS)
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_formulas(topology: Topology, depth: int) -> None:
    parameters, blocks = drawn(topology, depth), net(depth, torch.float64)
    x = torch.randn(2, 3, WIDTH, dtype=torch.float64, requires_grad=True)
    got = run(topology, topology.weights(parameters, dims(depth)), x, blocks)
    want = naive(topology, x, blocks, parameters)
    # a and b come from a float32 softmax; everything else is float64 from float32 parameters.
    close = {"rtol": 1e-5, "atol": 1e-5} if isinstance(topology, LaurelRW) else {}
    torch.testing.assert_close(got, want, **close)
    inputs, upstream = (x, *parameters.values(), *nn.ModuleList(blocks).parameters()), torch.randn_like(x)
    grads = [torch.autograd.grad(out, inputs, upstream) for out in (got, want)]
    torch.testing.assert_close(*grads, **close)


@pytest.mark.parametrize("start", ["preserve", "paper"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("topology", PRESERVING)
def test_starts_as_the_plain_network_bitwise(topology: Topology, dtype: torch.dtype, start: str) -> None:
    parameters = topology.parameters(dims(5), start)  # type: ignore[arg-type]
    assert all(value.dtype == torch.float32 for value in parameters.values())
    weights, blocks, x = topology.weights(parameters, dims(5)), net(5, dtype), torch.randn(4, WIDTH).to(dtype)
    out = run(topology, weights, x, blocks)
    assert out.dtype == dtype
    assert torch.equal(out, plain(x, blocks))
    assert torch.equal(topology.matrix(weights, dims(5)), torch.eye(5))
    if dtype != torch.bfloat16 or not isinstance(topology, LaurelRW):
        f, g = torch.randn(2, 4, WIDTH).to(dtype)
        assert torch.equal(topology.merge((x,), weights, 1, f, g), x + f + g)  # branches in parallel


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("topology", PRESERVING)
def test_every_weight_learns_in_two_steps(topology: Topology, zero: bool, optimizer: type) -> None:
    before = topology.parameters(dims(4), "preserve")
    learned = {name: nn.Parameter(value.clone()) for name, value in before.items()}
    blocks = net(4, zero=zero)
    stepper = optimizer([*learned.values(), *nn.ModuleList(blocks).parameters()], lr=0.1, weight_decay=0)
    x, target = torch.randn(2, 16, WIDTH)
    for _ in range(2):
        stepper.zero_grad()
        nn.functional.mse_loss(run(topology, topology.weights(learned, dims(4)), x, blocks), target).backward()
        stepper.step()
    for name, value in learned.items():
        assert (value != before[name]).all(), name


def test_start_of_the_low_rank_map() -> None:
    parameters = LaurelLR(rank=4).parameters(dims(2), "paper")
    assert (parameters["up"] == 0).all() and parameters["up"].shape == (2, 4, WIDTH)
    want = [[1 / math.sqrt(4 * WIDTH) if i % 4 == j else 0.0 for j in range(4)] for i in range(WIDTH)]  # Footnote 2
    for unit in parameters["down"]:
        torch.testing.assert_close(unit, torch.tensor(want))
    assert LaurelLR(rank=16).parameters(dims(2), "paper")["down"].shape == (2, WIDTH, WIDTH)  # cut to the width
    assert (LaurelPA(last=3).parameters(dims(4), "paper")["gains"] == torch.ones(1 + 2 + 3 + 3)).all()


def test_the_low_rank_block_of_gemma3n() -> None:
    """It has a norm after B A that the paper does not have; with that taken out, it is LAuReL-LR."""
    config = Gemma3nTextConfig(hidden_size=WIDTH, num_attention_heads=2, laurel_rank=2)
    theirs, topology, depth = Gemma3nTextLaurelBlock(config), LaurelLR(rank=2), 3
    theirs.post_laurel_norm = nn.Identity()
    parameters, t = drawn(topology, depth), 2
    with torch.no_grad():
        theirs.linear_left.weight.copy_(parameters["down"][t - 1].T)
        theirs.linear_right.weight.copy_(parameters["up"][t - 1].T)
    x, f, upstream = torch.randn(3, 2, 5, WIDTH)
    x.requires_grad_()
    got = topology.merge((x,), topology.weights(parameters, dims(depth)), t, f)
    want = f + theirs(x)
    torch.testing.assert_close(got, want)
    ours = torch.autograd.grad(got, (x, parameters["down"], parameters["up"]), upstream)
    left, right = theirs.linear_left.weight, theirs.linear_right.weight
    x_grad, left_grad, right_grad = torch.autograd.grad(want, (x, left, right), upstream)
    torch.testing.assert_close((ours[0], ours[1][t - 1], ours[2][t - 1]), (x_grad, left_grad.T, right_grad.T))


def test_the_low_rank_map_is_float32_under_autocast() -> None:
    topology, x, f = LaurelPA(rank=2), torch.randn(4, WIDTH), torch.zeros(4, WIDTH)
    weights = topology.weights(drawn(topology, 2), dims(2))
    want = topology.merge((x, f + 1), weights, 2, f)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(topology.merge((x, f + 1), weights, 2, f), want)
        assert run(topology, weights, x, net(2)).dtype == torch.float32


def test_post_norm_passes_the_sum_through_the_norm() -> None:
    x, y, f, normed = torch.randn(4, 3, WIDTH)
    rw, pa = LaurelRW(), LaurelPA(rank=2, last=2)
    weights = rw.weights(drawn(rw, 1), dims(1))
    torch.testing.assert_close(rw.merge((x,), weights, 1, f), weights[0, 0] * f + weights[0, 1] * x)
    assert rw.push((x,), weights, 1, normed) == (normed,)
    assert LaurelLR().push((x,), None, 1, normed) == (normed,)
    assert pa.push((x, y), None, 3, normed) == (y, normed)


def test_matrices() -> None:
    rw, pa = LaurelRW(), LaurelPA(rank=2, last=2)
    weights = rw.weights(drawn(rw, 3), dims(3))
    assert torch.equal(rw.matrix(weights, dims(3)), torch.diag(weights[:, 1]))
    parameters = drawn(pa, 3)
    want = torch.eye(3)
    for t, (first, count) in enumerate([(0, 1), (0, 2), (1, 2)], start=1):
        trace = (parameters["down"][t - 1] @ parameters["up"][t - 1]).trace() / WIDTH
        for j in range(count):
            want[t - 1, first + j] += parameters["gains"][[0, 1, 3][t - 1] + j] * trace
    torch.testing.assert_close(pa.matrix(pa.weights(parameters, dims(3)), dims(3)), want)
    lr = LaurelLR(rank=2).matrix(LaurelLR(rank=2).weights(parameters, dims(3)), dims(3))
    want = torch.stack([1 + (a @ b).trace() / WIDTH for a, b in zip(parameters["down"], parameters["up"], strict=True)])
    torch.testing.assert_close(lr, torch.diag(want))


@pytest.mark.parametrize("topology", PRESERVING)
def test_compiles_in_one_graph(topology: Topology) -> None:
    blocks, x, parameters = net(3), torch.randn(4, WIDTH), drawn(topology, 3)

    def forward(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return run(topology, topology.weights(parameters, dims(3)), x, blocks)

    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(parameters, x), forward(parameters, x))


def test_only_a_total_of_2_preserves() -> None:
    for total in (1.0, 3.0):
        with pytest.raises(UnsupportedTopology, match=rf"laurel-rw.*total={total} .*total=2.*start='paper'"):
            LaurelRW(total).parameters(dims(2), "preserve")
    weights = LaurelRW(1.0).weights(LaurelRW(1.0).parameters(dims(2), "paper"), dims(2))
    assert weights.tolist() == [[0.5, 0.5]] * 2


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("laurel-rw", {"total": 0.0}, "total=0.0.*positive"),
        ("laurel-rw", {"total": math.inf}, "total=inf.*positive"),
        ("laurel-lr", {"rank": 0}, "rank=0.*whole number"),
        ("laurel-pa", {"rank": 1.5}, "rank=1.5.*whole number"),
        ("laurel-pa", {"last": 0}, "last=0.*whole number"),
    ],
)
def test_wrong_options(name: str, options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_topology(name, options)


def test_names() -> None:
    assert make_topology("laurel-rw", {"total": 1.0}) == LaurelRW(1.0)
    assert make_topology("laurel-lr", {"rank": 4}) == LaurelLR(4)
    assert make_topology("laurel-pa", {"rank": 4, "last": 2}) == LaurelPA(4, 2)
    assert LaurelPA().options() == {"rank": 16, "last": 3}
    assert all(topologies()[name] for name in ("laurel-rw", "laurel-lr", "laurel-pa"))
    assert LaurelLR.needs_width and LaurelPA.needs_width and not LaurelRW.needs_width
