from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from formulas import by_reference, unpacked
from torch import Tensor, nn
from toy_nets import begin, net, opened, plain, run

from rewire.conformance import reference
from rewire.conformance.references import ancre as formulas
from rewire.errors import UnsupportedTopology
from rewire.topologies import ANCRe, Topology, list_topologies, make_topology
from rewire.topologies.ancre import ANCReCascaded, ANCReConstant, Cascade
from rewire.topologies.base import Dims
from rewire.topologies.registry import name_and_options

NORMALIZED = ["ingoing", "outgoing"]
KINDS = [*NORMALIZED, "none"]


def shares(logits: Tensor, depth: int, kind: str, tau: float) -> dict[tuple[int, int], float]:
    """p[i, j] for 0 <= i < j <= T."""
    name, pairs = f"ancre-{kind}", [(i, j) for j in range(1, depth + 1) for i in range(j)]
    c = unpacked(name, {"logits": logits}, Dims(depth), reference(name).with_options({}))["c"]
    return {pair: float(p) for pair, p in formulas.shortcuts(c, pairs, kind, tau).items()}


def learned(topology: Topology, depth: int, start: str = "preserve") -> nn.Parameter:
    (value,) = topology.parameters(Dims(depth), start).values()  # type: ignore[arg-type]
    return nn.Parameter(value)


def free_logits(kind: str, depth: int) -> Tensor:
    """bool [T(T+1)/2]: logits that are not alone in their softmax."""
    pairs = [(i, j) for j in range(1, depth + 1) for i in range(j)]
    alone = (0, 1) if kind == "ingoing" else (depth - 1, depth)
    return torch.tensor([kind == "none" or pair != alone for pair in pairs])


@pytest.mark.each_once
@pytest.mark.parametrize("cascade", ["replace", "keep"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_formulas(kind: str, cascade: str, depth: int) -> None:
    torch.manual_seed(0)
    topology = ANCRe(kind, temperature=0.3, cascade=cascade)  # type: ignore[arg-type]
    logits = torch.randn(depth * (depth + 1) // 2)
    p = shares(logits, depth, kind, 0.3)
    weights = topology.weights({"logits": logits}, Dims(depth))
    table = topology.matrix(weights, Dims(depth))
    assert table.dtype == torch.float32
    assert table.shape == (depth, depth)
    for row in range(depth):
        for i in range(depth):
            want = p.get((i, row + 1), 0.0)
            assert float(table[row, i]) == pytest.approx(want, rel=1e-5, abs=0)
    x, blocks = torch.randn(2, 3, 8, dtype=torch.float64), net(depth, torch.float64)
    want, _ = by_reference(topology, {"logits": logits}, x, blocks)
    torch.testing.assert_close(run(topology, weights, x, blocks), want, rtol=1e-5, atol=1e-5)


def test_states_are_all_x() -> None:
    topology, depth = ANCRe(temperature=0.3), 4
    blocks, x = net(depth), torch.randn(3, 8)
    logits = torch.randn(10)
    weights = topology.weights({"logits": logits}, Dims(depth))
    output, reads = by_reference(topology, {"logits": logits}, x, blocks)
    states = begin(topology, x, weights)
    for t, block in enumerate(blocks, start=1):
        newest, opened = topology.read(states, weights, t)
        assert len(opened[1].states) == t
        assert newest is opened[1].states[-1]
        states = topology.write(opened, weights, t, block(newest))
    newest, history = states
    assert torch.equal(history.states[0], x)
    assert topology.finish(states, weights, Dims(depth)) is newest
    for got, want in zip((*history.states, newest), (*reads, output), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("kind", NORMALIZED)
@pytest.mark.parametrize("start", ["preserve", "paper", "random"])
def test_sums(kind: str, start: str) -> None:
    topology, depth = ANCRe(kind), 7  # type: ignore[arg-type]
    torch.manual_seed(0)
    logits = torch.randn(28) if start == "random" else learned(topology.for_start("preserve"), depth, start)
    p = topology.matrix(topology.weights({"logits": logits}, Dims(depth)), Dims(depth))
    torch.testing.assert_close(p.sum(1 if kind == "ingoing" else 0), torch.ones(depth))
    assert (p >= 0).all()
    assert (p.triu(1) == 0).all()


def test_paper_starts() -> None:
    for kind in NORMALIZED:
        assert (ANCRe(kind).parameters(Dims(5), "paper")["logits"] == 0).all()  # type: ignore[arg-type]
    uniform = torch.tensor([[1, 0, 0], [1 / 2, 1 / 2, 0], [1 / 3, 1 / 3, 1 / 3]])
    for topology in (ANCRe(), ANCRe("none"), ANCRe("none", cascade="keep")):
        torch.testing.assert_close(
            topology.matrix(topology.weights(topology.parameters(Dims(3), "paper"), Dims(3)), Dims(3)), uniform
        )
    outgoing = ANCRe("outgoing")
    want = torch.tensor([[1 / 3, 0, 0], [1 / 3, 1 / 2, 0], [1 / 3, 1 / 2, 1]])
    torch.testing.assert_close(
        outgoing.matrix(outgoing.weights(outgoing.parameters(Dims(3), "paper"), Dims(3)), Dims(3)), want
    )


def preserving(kind: str, **options: Any) -> ANCRe:
    """ANCRe in the form that starts as the original network."""
    return ANCRe(kind, **options).for_start("preserve")  # type: ignore[arg-type]


@pytest.mark.each_once
@pytest.mark.parametrize("cascade", ["replace", "keep"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.001, 0.01, 0.1, 1.0])
@pytest.mark.parametrize("depth", [1, 2, 3, 24, 200])
def test_preserving_start_is_exact(kind: str, temperature: float, depth: int, cascade: str) -> None:
    topology = preserving(kind, temperature=temperature, cascade=cascade)
    logits = topology.parameters(Dims(depth), "preserve")["logits"]
    assert logits.dtype == torch.float32
    assert logits.shape == (depth * (depth + 1) // 2,)
    original = torch.eye(depth) if cascade == "replace" else torch.zeros(depth, depth)
    assert torch.equal(topology.matrix(topology.weights({"logits": logits}, Dims(depth)), Dims(depth)), original)


class Relu(nn.Module):
    """A branch without a norm, which multiplies what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return 3 * torch.relu(self.up(x))


@pytest.mark.each_once
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("cascade", ["replace", "keep"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("depth", [2, 12, 40])
def test_preserving_start_is_the_plain_network_bitwise(kind: str, cascade: str, depth: int, dtype: torch.dtype) -> None:
    torch.manual_seed(depth)
    topology, x = preserving(kind, cascade=cascade), torch.randn(4, 8).to(dtype)
    for blocks in (net(depth, dtype), [Relu().to(dtype) for _ in range(min(depth, 12))]):
        dims = Dims(len(blocks))
        weights = topology.weights({"logits": learned(topology, dims.depth)}, dims)
        assert torch.equal(run(topology, weights, x, blocks), plain(x, blocks))


@pytest.mark.parametrize("kind", NORMALIZED)
@pytest.mark.parametrize("depth", [3, 24, 150])
def test_logits_have_the_gradients_of_the_paper_s_start(kind: str, depth: int) -> None:
    gradients = []
    for topology, start in ((preserving(kind), "preserve"), (ANCRe(kind), "paper")):  # type: ignore[arg-type]
        logits = learned(topology, depth, start)
        torch.manual_seed(0)
        topology.matrix(topology.weights({"logits": logits}, Dims(depth)), Dims(depth)).backward(
            torch.randn(depth, depth)
        )
        gradients.append(logits.grad)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("kind", KINDS)
def test_every_logit_learns_from_the_preserving_start(kind: str) -> None:
    depth = 6
    topology, blocks, free = preserving(kind), net(depth), free_logits(kind, depth)
    x, target = torch.randn(16, 8), torch.randn(16, 8)
    logits = learned(topology, depth)
    before = {id(p): p.detach().clone() for p in (logits, *nn.ModuleList(blocks).parameters())}
    optimizer = torch.optim.Adam([logits, *nn.ModuleList(blocks).parameters()], lr=1e-3)
    for step in range(2):
        optimizer.zero_grad()
        out = run(topology, topology.weights({"logits": logits}, Dims(depth)), x, blocks)
        nn.functional.mse_loss(out, target).backward()
        assert logits.grad is not None
        assert (logits.grad[free] != 0).all(), step
        optimizer.step()
    moved = (logits.detach() - before[id(logits)]).abs()
    assert (moved[free] > 1e-4).all()
    assert all((p.detach() != before[id(p)]).any() for p in nn.ModuleList(blocks).parameters())


@pytest.mark.parametrize("kind", NORMALIZED)
@pytest.mark.parametrize("depth", [3, 24, 64, 150])
def test_gradients_near_one_hot_are_not_noise(kind: str, depth: int) -> None:
    """Against the softmax in float64: the largest entry's gradient must not cancel away."""
    topology = ANCRe(kind)  # type: ignore[arg-type]
    row, column = torch.tril_indices(depth, depth)
    logits = nn.Parameter(0.01 * math.log(depth / 1e-8) * (row == column))  # others have a weight of 1e-8 together
    torch.manual_seed(0)
    upstream = torch.randn(depth, depth)
    topology.matrix(topology.weights({"logits": logits}, Dims(depth)), Dims(depth)).backward(upstream)
    exact = logits.detach().double().requires_grad_()
    table = torch.full((depth, depth), -math.inf, dtype=torch.float64).index_put((row, column), exact / 0.01)
    table.softmax(1 if kind == "ingoing" else 0).backward(upstream.double())
    assert logits.grad is not None
    assert exact.grad is not None
    size = exact.grad.abs().max()
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=1e-3, atol=float(1e-3 * size))


@pytest.mark.parametrize("kind", KINDS)
def test_learns_a_shortcut(kind: str) -> None:
    """A teacher of the same blocks has a weight on 0:T, taken from T-1:T (ingoing) or 0:1 (outgoing)."""
    depth = 4
    topology, blocks = preserving(kind), net(depth)
    for parameter in nn.ModuleList(blocks).parameters():
        parameter.requires_grad_(False)
    logits = learned(topology, depth)
    shortcut = depth * (depth - 1) // 2  # row T, source 0
    teacher = logits.detach().clone()
    teacher[shortcut] = teacher.max() + (0 if kind == "none" else 0.05)
    target = topology.weights({"logits": teacher}, Dims(depth))
    assert topology.matrix(target, Dims(depth))[-1, 0] > 0.6
    start = topology.matrix(topology.weights({"logits": logits}, Dims(depth)), Dims(depth))[-1, 0].item()
    optimizer = torch.optim.Adam([logits], lr=3e-2 if kind == "none" else 3e-3)
    for _ in range(200):
        x = torch.randn(64, 8)
        optimizer.zero_grad()
        out = run(topology, topology.weights({"logits": logits}, Dims(depth)), x, blocks)
        nn.functional.mse_loss(out, run(topology, target, x, blocks)).backward()
        optimizer.step()
    end = topology.matrix(topology.weights({"logits": logits}, Dims(depth)), Dims(depth))
    assert start == 0
    assert end[-1, 0] > 0.4


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_states(kind: str) -> None:
    depth = 6
    topology, blocks, x = preserving(kind), net(depth, torch.bfloat16), torch.randn(4, 8).bfloat16()
    logits = learned(topology, depth)
    weights = topology.weights({"logits": logits}, Dims(depth))
    out = run(topology, weights, x, blocks)
    assert {w.dtype for w in (*weights.rows, *weights.by_state.near)} == {torch.float32}
    assert out.dtype == torch.bfloat16
    out.float().square().mean().backward()
    assert logits.grad is not None
    assert logits.grad.dtype == torch.float32
    assert (logits.grad[free_logits(kind, depth)] != 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_leaves_the_weights_in_float32(kind: str) -> None:
    depth = 5
    topology = ANCRe(kind)  # type: ignore[arg-type]
    torch.manual_seed(0)
    logits = torch.randn(15) * 0.01
    want = topology.weights({"logits": logits}, Dims(depth))
    blocks, x = net(depth), torch.randn(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        got = topology.weights({"logits": logits}, Dims(depth))
        out = run(topology, got, x, blocks)
    assert {w.dtype for w in (*got.rows, *got.by_state.near)} == {torch.float32}
    assert all(map(torch.equal, got.rows, want.rows))
    assert out.dtype == torch.float32  # as in the plain network: float32 stream + bfloat16 branch


def test_parallel_branches_are_summed() -> None:
    topology, x, f, g = ANCRe(), *torch.randn(3, 2, 8)
    weights = topology.weights(topology.parameters(Dims(1), "paper"), Dims(1))
    newest, _ = topology.write(opened(topology, x, weights), weights, 1, f, g)
    torch.testing.assert_close(newest, x + f + g)


@pytest.mark.parametrize(
    "kind", ["ingoing", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("outgoing", "none"))]
)
def test_compiles_in_one_graph(kind: str) -> None:
    depth = 3
    topology, blocks, x = preserving(kind), net(depth), torch.randn(4, 8)

    def forward(logits: Tensor, x: Tensor) -> Tensor:
        return run(topology, topology.weights({"logits": logits}, Dims(depth)), x, blocks)

    logits = learned(topology, depth)
    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(logits, x), forward(logits, x))
    (got,) = torch.autograd.grad(compiled(logits, x).square().sum(), logits)
    (want,) = torch.autograd.grad(forward(logits, x).square().sum(), logits)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-8)


def test_the_softmax_by_itself_does_not_preserve() -> None:
    for kind in NORMALIZED:
        with pytest.raises(UnsupportedTopology, match=f"ancre-{kind}.*difference.*start='paper'"):
            ANCRe(kind).parameters(Dims(3), "preserve")  # type: ignore[arg-type]


def test_keep_without_normalization() -> None:
    topology, x, blocks = ANCRe("none", cascade="keep"), torch.randn(4, 8), net(3)
    logits = learned(topology, 3)
    out = run(topology, topology.weights({"logits": logits}, Dims(3)), x, blocks)
    torch.testing.assert_close(out, plain(x, blocks), rtol=1e-6, atol=1e-6)
    out.square().sum().backward()
    assert logits.grad is not None
    assert (logits.grad != 0).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"normalize": "in"}, "normalize='in'.*'ingoing', 'outgoing', 'none'"),
        ({"cascade": "add"}, "cascade='add'.*'replace', 'keep'"),
        ({"form": "other"}, "form='other'.*'softmax', 'difference'"),
        ({"temperature": 0.0}, "temperature=0.0.*positive"),
        ({"temperature": -1.0}, "temperature=-1.0.*positive"),
        ({"temperature": math.inf}, "temperature=inf.*positive"),
        ({"temperature": math.nan}, "temperature=nan.*positive"),
    ],
)
def test_wrong_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ANCRe(**options)  # type: ignore[arg-type]


def test_names() -> None:
    assert make_topology("ancre-ingoing", {}) == ANCRe()
    options = {"temperature": 0.1, "cascade": "keep"}
    assert make_topology("ancre-outgoing", options) == ANCRe("outgoing", 0.1, "keep")
    assert make_topology("ancre-none", {"cascade": "keep"}) == ANCRe("none", cascade="keep")
    assert make_topology("ancre-constant", {}) == ANCReConstant()
    assert make_topology("ancre-cascaded", {}) == ANCReCascaded()
    with pytest.raises(TypeError, match="no option 'temperature': it takes cascade"):
        make_topology("ancre-none", {"temperature": 1.0})
    names = {"ancre-ingoing", "ancre-outgoing", "ancre-none", "ancre-constant", "ancre-cascaded"}
    assert names <= list_topologies().keys()
    assert all(list_topologies()[name] for name in names)
    few = {"units": None, "sources": None}
    options = {"temperature": 0.01, "cascade": "replace", "form": "softmax", "block": None, **few}
    assert name_and_options(ANCRe()) == ("ancre-ingoing", options)
    assert name_and_options(ANCRe("none")) == ("ancre-none", {"cascade": "replace", "block": None, **few})


@pytest.mark.parametrize("cascade", ["replace", "keep"])
def test_constant(cascade: Cascade) -> None:
    topology, depth = ANCReConstant(cascade), 5
    p = {(i, j): 1 / j for j in range(1, depth + 1) for i in range(j)}
    x, blocks = torch.randn(4, 8, dtype=torch.float64), net(depth, torch.float64)
    assert topology.parameters(Dims(depth), "paper") == {}
    weights = topology.weights({}, Dims(depth))
    want, _ = by_reference(topology, {}, x, blocks)
    torch.testing.assert_close(run(topology, weights, x, blocks), want, rtol=1e-6, atol=1e-6)
    table = topology.matrix(weights, Dims(depth))
    for row in range(depth):
        assert table[row].tolist() == pytest.approx([p.get((i, row + 1), 0.0) for i in range(depth)])
    with pytest.raises(UnsupportedTopology, match=r"ancre-constant.*start='paper'"):
        topology.parameters(Dims(depth), "preserve")


def test_cascaded() -> None:
    topology, depth = ANCReCascaded(), 4
    x, blocks = torch.randn(4, 8, dtype=torch.float64), net(depth, torch.float64)
    for start in ("preserve", "paper"):
        weights = topology.weights({"scales": learned(topology, depth, start)}, Dims(depth))
        assert torch.equal(run(topology, weights, x, blocks), plain(x, blocks))
        assert torch.equal(topology.matrix(weights, Dims(depth)), torch.eye(depth))
    scales = torch.randn(depth, requires_grad=True)
    want = x
    for block, a in zip(blocks, scales.tolist(), strict=True):
        want = block(want) + a * want
    out = run(topology, topology.weights({"scales": scales}, Dims(depth)), x, blocks)
    torch.testing.assert_close(out, want)
    out.sum().backward()
    assert scales.grad is not None
    assert (scales.grad != 0).all()
    assert len(topology.write((x,), topology.weights({"scales": torch.ones(depth)}, Dims(depth)), 1, x)) == 1


def test_cascaded_beside_the_shortcut_that_is_kept() -> None:
    topology, depth = ANCReCascaded("keep"), 4
    x, blocks = torch.randn(4, 8, dtype=torch.float64), net(depth, torch.float64)
    weights = topology.weights({"scales": learned(topology, depth, "preserve")}, Dims(depth))
    assert torch.equal(run(topology, weights, x, blocks), plain(x, blocks))
    scales, want = torch.randn(depth), x
    for block, a in zip(blocks, scales.tolist(), strict=True):
        want = want + block(want) + a * want
    torch.testing.assert_close(run(topology, topology.weights({"scales": scales}, Dims(depth)), x, blocks), want)
    with pytest.raises(ValueError, match="cascade='both'"):
        ANCReCascaded("both")  # type: ignore[arg-type]


def test_what_is_kept_is_frozen_with_it() -> None:
    for topology in (ANCReConstant("keep"), ANCReCascaded("keep")):
        program = topology.program(topology.weights({"scales": torch.full((3,), 0.5)}, Dims(3)), Dims(3))
        assert [sum(term.fixed for term in line.terms) for unit in program.units for line in unit.after] == [1, 1, 1]
