from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
import toy_nets
from formulas import by_reference
from torch import Tensor, nn
from toy_nets import plain
from transformers.models.gemma3n.configuration_gemma3n import Gemma3nTextConfig
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextLaurelBlock

from rewire.errors import UnsupportedTopology
from rewire.topologies import Topology, list_topologies, make_topology
from rewire.topologies.base import Dims, States, materialize
from rewire.topologies.laurel import LaurelLR, LaurelPA, LaurelRW
from rewire.topologies.registry import name_and_options

WIDTH = 6
net = functools.partial(toy_nets.net, width=WIDTH)
DIFFERENCE: Any = {"total": 1.0, "form": "difference"}
COMBINED = [LaurelLR(rank=2, total=1.0), LaurelLR(rank=2, **DIFFERENCE), LaurelPA(rank=2, last=2, total=2.0)]
VARIANTS = [
    *(LaurelRW(), LaurelRW(total=1.0), LaurelRW(**DIFFERENCE), LaurelLR(rank=2), LaurelPA(rank=2)),
    *(LaurelPA(rank=3, last=1), *COMBINED),
]
PRESERVING = [
    *(LaurelRW(), LaurelRW(**DIFFERENCE), LaurelLR(rank=4), LaurelPA(rank=4, last=2)),
    *(LaurelLR(rank=4, **DIFFERENCE), LaurelPA(rank=4, last=2, **DIFFERENCE), LaurelPA(rank=4, total=2.0)),
]


def run(topology: Topology, weights: object, x: Tensor, blocks: list[nn.Module]) -> Tensor:
    def check(t: int, read: Any, opened: States, written: States) -> None:
        assert read is opened[-1]
        assert len(opened) == min(t, getattr(topology, "last", 1))

    return toy_nets.run(topology, weights, x, blocks, check=check)


def drawn(topology: Topology, depth: int) -> dict[str, Tensor]:
    start = topology.parameters(Dims(depth, WIDTH), "paper")
    return {name: (0.5 * torch.randn_like(value)).requires_grad_() for name, value in start.items()}


@pytest.mark.each_once
@pytest.mark.parametrize("topology", VARIANTS)
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_formulas(topology: Topology, depth: int) -> None:
    parameters, blocks = drawn(topology, depth), net(depth, torch.float64)
    x = torch.randn(2, 3, WIDTH, dtype=torch.float64, requires_grad=True)
    got = run(topology, topology.weights(parameters, Dims(depth, WIDTH)), x, blocks)
    want = by_reference(topology, parameters, x, blocks)[0]
    # a and b come from a float32 softmax; everything else is float64 from float32 parameters.
    close: Any = {"rtol": 1e-5, "atol": 1e-5} if "logits" in parameters else {}
    torch.testing.assert_close(got, want, **close)
    inputs, upstream = (x, *parameters.values(), *nn.ModuleList(blocks).parameters()), torch.randn_like(x)
    grads = [torch.autograd.grad(out, inputs, upstream) for out in (got, want)]
    torch.testing.assert_close(*grads, **close)


@pytest.mark.each_once
@pytest.mark.parametrize("start", ["preserve", "paper"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("topology", PRESERVING)
def test_starts_as_the_plain_network_bitwise(topology: Topology, dtype: torch.dtype, start: str) -> None:
    parameters = topology.parameters(Dims(5, WIDTH), start)  # type: ignore[arg-type]
    assert all(value.dtype == torch.float32 for value in parameters.values())
    weights, blocks, x = topology.weights(parameters, Dims(5, WIDTH)), net(5, dtype), torch.randn(4, WIDTH).to(dtype)
    out = run(topology, weights, x, blocks)
    assert out.dtype == dtype
    assert torch.equal(out, plain(x, blocks))
    assert torch.equal(topology.matrix(weights, Dims(5, WIDTH)), torch.eye(5))
    if dtype != torch.bfloat16 or "logits" not in parameters:
        f, g = torch.randn(2, 4, WIDTH).to(dtype)
        assert torch.equal(materialize(topology.merge((x,), weights, 1, f, g)), x + f + g)  # branches in parallel


@pytest.mark.each_once
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("topology", PRESERVING)
def test_every_weight_learns_in_two_steps(topology: Topology, zero: bool, optimizer: type) -> None:
    before = topology.parameters(Dims(4, WIDTH), "preserve")
    learned = {name: nn.Parameter(value.clone()) for name, value in before.items()}
    blocks = net(4, zero=zero)
    stepper = optimizer([*learned.values(), *nn.ModuleList(blocks).parameters()], lr=0.1, weight_decay=0)
    x, target = torch.randn(2, 16, WIDTH)
    for _ in range(2):
        stepper.zero_grad()
        nn.functional.mse_loss(run(topology, topology.weights(learned, Dims(4, WIDTH)), x, blocks), target).backward()
        stepper.step()
    for name, value in learned.items():
        assert (value != before[name]).all(), name


def test_start_of_the_low_rank_map() -> None:
    parameters = LaurelLR(rank=4).parameters(Dims(2, WIDTH), "paper")
    assert (parameters["up"] == 0).all() and parameters["up"].shape == (2, 4, WIDTH)
    want = [[1 / math.sqrt(4 * WIDTH) if i % 4 == j else 0.0 for j in range(4)] for i in range(WIDTH)]  # Footnote 2
    for unit in parameters["down"]:
        torch.testing.assert_close(unit, torch.tensor(want))
    assert LaurelLR(rank=16).parameters(Dims(2, WIDTH), "paper")["down"].shape == (2, WIDTH, WIDTH)  # cut to the width
    assert (LaurelPA(last=3).parameters(Dims(4, WIDTH), "paper")["gains"] == torch.ones(1 + 2 + 3 + 3)).all()


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
    got = topology.merge((x,), topology.weights(parameters, Dims(depth, WIDTH)), t, f)
    want = f + theirs(x)
    torch.testing.assert_close(got, want)
    ours = torch.autograd.grad(got, (x, parameters["down"], parameters["up"]), upstream)
    left, right = theirs.linear_left.weight, theirs.linear_right.weight
    x_grad, left_grad, right_grad = torch.autograd.grad(want, (x, left, right), upstream)
    torch.testing.assert_close((ours[0], ours[1][t - 1], ours[2][t - 1]), (x_grad, left_grad.T, right_grad.T))


def test_the_low_rank_map_is_float32_under_autocast() -> None:
    topology, x, f = LaurelPA(rank=2), torch.randn(4, WIDTH), torch.zeros(4, WIDTH)
    weights = topology.weights(drawn(topology, 2), Dims(2, WIDTH))
    want = topology.merge((x, f + 1), weights, 2, f)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(topology.merge((x, f + 1), weights, 2, f), want)
        assert run(topology, weights, x, net(2)).dtype == torch.float32


def test_post_norm_passes_the_sum_through_the_norm() -> None:
    x, y, f, normed = torch.randn(4, 3, WIDTH)
    rw, pa = LaurelRW(), LaurelPA(rank=2, last=2)
    weights = rw.weights(drawn(rw, 1), Dims(1, WIDTH))
    torch.testing.assert_close(rw.merge((x,), weights, 1, f).value(), weights.branch[0] * f + weights.shortcut[0] * x)
    assert rw.push((x,), weights, 1, normed) == (normed,)
    assert LaurelLR().push((x,), None, 1, normed) == (normed,)
    assert pa.push((x, y), None, 3, normed) == (y, normed)


def test_matrices() -> None:
    rw, pa = LaurelRW(), LaurelPA(rank=2, last=2)
    weights = rw.weights(drawn(rw, 3), Dims(3, WIDTH))
    assert torch.equal(rw.matrix(weights, Dims(3, WIDTH)), torch.diag(weights.shortcut))
    parameters = drawn(pa, 3)
    want = torch.eye(3)
    for t, (first, count) in enumerate([(0, 1), (0, 2), (1, 2)], start=1):
        trace = (parameters["down"][t - 1] @ parameters["up"][t - 1]).trace() / WIDTH
        for j in range(count):
            want[t - 1, first + j] += parameters["gains"][[0, 1, 3][t - 1] + j] * trace
    torch.testing.assert_close(pa.matrix(pa.weights(parameters, Dims(3, WIDTH)), Dims(3, WIDTH)), want)
    combined = LaurelPA(rank=2, last=2, total=2.0)
    scales = drawn(combined, 3)["logits"]
    scaled = combined.weights({**parameters, "logits": scales}, Dims(3, WIDTH))
    torch.testing.assert_close(combined.matrix(scaled, Dims(3, WIDTH)), want * 2 * scales.softmax(1)[:, 1:])
    lr = LaurelLR(rank=2).matrix(LaurelLR(rank=2).weights(parameters, Dims(3, WIDTH)), Dims(3, WIDTH))
    want = torch.stack([1 + (a @ b).trace() / WIDTH for a, b in zip(parameters["down"], parameters["up"], strict=True)])
    torch.testing.assert_close(lr, torch.diag(want))


@pytest.mark.slow
@pytest.mark.parametrize("topology", PRESERVING)
def test_compiles_in_one_graph(topology: Topology) -> None:
    blocks, x, parameters = net(3), torch.randn(4, WIDTH), drawn(topology, 3)

    def forward(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return run(topology, topology.weights(parameters, Dims(3, WIDTH)), x, blocks)

    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(parameters, x), forward(parameters, x))


def test_the_softmax_preserves_with_a_total_of_2_only() -> None:
    for total in (1.0, 3.0):
        with pytest.raises(UnsupportedTopology, match=rf"laurel-rw.*total={total} .*form='difference'.*start='paper'"):
            LaurelRW(total).parameters(Dims(2, WIDTH), "preserve")
        with pytest.raises(UnsupportedTopology, match=rf"laurel-lr.*total={total} "):
            LaurelLR(total=total).parameters(Dims(2, WIDTH), "preserve")
        assert LaurelRW(total).for_start("preserve") == LaurelRW(total, "difference")
        assert LaurelPA(total=total).for_start("preserve") == LaurelPA(total=total, form="difference")
        assert LaurelRW(total).for_start("paper") == LaurelRW(total)
    for topology in (LaurelRW(), LaurelLR(), LaurelPA(total=2.0)):
        assert topology.for_start("preserve") == topology
    weights = LaurelRW(1.0).weights(LaurelRW(1.0).parameters(Dims(2, WIDTH), "paper"), Dims(2, WIDTH))
    assert weights.branch.tolist() == weights.shortcut.tolist() == [0.5] * 2  # type: ignore[union-attr]


def test_a_difference_has_the_softmax_s_gradient() -> None:
    grads = []
    for form in ("softmax", "difference"):
        logits = torch.zeros(3, 2, requires_grad=True)
        scales = LaurelRW(1.5, form).weights({"logits": logits}, Dims(3, WIDTH))  # type: ignore[arg-type]
        grads.append(torch.autograd.grad(scales.branch.sum() + 3 * scales.shortcut.sum(), logits))  # type: ignore[union-attr]
    assert torch.equal(*grads[0], *grads[1]) and (grads[0][0] != 0).all()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("laurel-rw", {"total": 0.0}, "total=0.0.*positive"),
        ("laurel-rw", {"total": math.inf}, "total=inf.*positive"),
        ("laurel-rw", {"form": "gate"}, "form='gate'.*'softmax', 'difference'"),
        ("laurel-lr", {"total": -1.0}, "total=-1.0.*positive"),
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
    assert name_and_options(LaurelPA()) == (
        "laurel-pa",
        {"rank": 16, "last": 3, "total": None, "form": "softmax"},
    )
    assert all(list_topologies()[name] for name in ("laurel-rw", "laurel-lr", "laurel-pa"))
    assert LaurelLR.needs_width and LaurelPA.needs_width and not LaurelRW.needs_width
