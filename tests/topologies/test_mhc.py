from __future__ import annotations

import copy
import dataclasses
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from formulas import by_reference
from hyper_connections import mHC as Package
from torch import Tensor, nn
from toy_nets import WIDTH, begin, net, plain, run_learned

from rewire.conformance.references import mhc as formulas
from rewire.errors import UnsupportedTopology
from rewire.topologies import list_topologies, make_topology
from rewire.topologies.base import Dims, materialize
from rewire.topologies.hyper import combine
from rewire.topologies.manifolds import (
    MANIFOLDS,
    Manifold,
    cayley,
    convex,
    kronecker,
    permutations,
    sinkhorn,
    sinkhorn_backward,
    spectral,
)
from rewire.topologies.mhc import ManifoldHyperConnections

MHC = ManifoldHyperConnections
RESIDUALS = ["sinkhorn", "identity", "permutations", "cayley", "kronecker", "spectral"]
ANY_NUMBER = [residual for residual in RESIDUALS if residual != "kronecker"]  # of streams, not powers of 2
VARIANTS = [
    *(MHC(2), MHC(4), MHC(3, "sum", 2), MHC(4, iterations=1), MHC(4, "learned", eps=1e-3, norm_eps=1e-2)),
    *[MHC(n, residual=residual) for residual in RESIDUALS[1:] for n in (2, 4)],
    MHC(3, "learned", residual="identity", magnitude=3.0, eps=1e-3),
    *(
        MHC(4, "learned", delayed=True, eps=1e-6),
        MHC(3, "learned", delayed=True, residual="identity"),
        MHC(8, residual="kronecker"),
        MHC(3, "learned", entry_scales=True),
    ),
]


def learned(topology: MHC, depth: int, start: str = "preserve", noise: float = 0.0) -> dict[str, nn.Parameter]:
    values = topology.parameters(Dims(depth, WIDTH), start)  # type: ignore[arg-type]
    return {name: nn.Parameter(value + noise * torch.randn_like(value)) for name, value in values.items()}


@pytest.mark.each_once
@pytest.mark.parametrize("shape", [(2, 3, WIDTH), (5, WIDTH)])
@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("topology", VARIANTS, ids=str)
def test_formulas_and_gradients(topology: MHC, depth: int, shape: tuple[int, ...]) -> None:
    values = learned(topology, depth, "paper", noise=0.5)
    twins = {name: value.detach().double().requires_grad_() for name, value in values.items()}
    x, blocks = torch.randn(shape, dtype=torch.float64, requires_grad=True), net(depth, torch.float64)
    got, (want, _) = run_learned(topology, values, x, blocks), by_reference(topology, twins, x, blocks)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    got_grads = torch.autograd.grad(got.square().sum(), [x, *values.values()])
    want_grads = torch.autograd.grad(want.square().sum(), [x, *twins.values()])
    for got_grad, want_grad in zip(got_grads, want_grads, strict=True):
        torch.testing.assert_close(got_grad.double(), want_grad, rtol=1e-5, atol=1e-5 * float(want_grad.abs().max()))


@pytest.mark.each_once
@pytest.mark.parametrize("eps", [0.0, 1e-6])
@pytest.mark.parametrize("size", [1.0, 50.0, 1000.0])
@pytest.mark.parametrize("iterations", [1, 3, 20])
def test_sinkhorn_in_float32(size: float, iterations: int, eps: float) -> None:
    logits = (size * (2 * torch.rand(64, 4, 4) - 1)).requires_grad_()
    exact, upstream = logits.detach().double().requires_grad_(), torch.randn(64, 4, 4)
    got = sinkhorn(logits, iterations, eps)
    (got_grad,) = torch.autograd.grad(got, logits, upstream)
    assert got.isfinite().all() and got_grad.isfinite().all()
    assert eps > 0 or torch.allclose(got.sum(-1), torch.ones(64, 4))
    if size < 1000:  # where the twin does not overflow
        want = torch.stack([formulas.sinkhorn(one, iterations, eps) for one in exact])
        (want_grad,) = torch.autograd.grad(want, exact, upstream.double())
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(got_grad.double(), want_grad, rtol=1e-4, atol=1e-5)
    if size == 1 and iterations == 20:
        torch.testing.assert_close(got.sum(-2), torch.ones(64, 4), atol=1e-5, rtol=0)


@pytest.mark.parametrize("eps", [0.0, 1e-2])
def test_sinkhorn_is_an_operator(eps: float) -> None:
    logits = torch.randn(2, 24, dtype=torch.float64)[:, 8:].unflatten(-1, (4, 4)).requires_grad_()
    torch.library.opcheck(sinkhorn, (logits, 3, eps))
    torch.library.opcheck(sinkhorn_backward, (torch.randn(2, 4, 4).mT, torch.randn(2, 4, 4).mT, 3, eps))
    assert torch.autograd.gradcheck(lambda x: sinkhorn(x, 3, eps), logits)
    assert torch.autograd.gradgradcheck(lambda x: sinkhorn(x, 3, eps), logits)


def test_sinkhorn_three_times_differentiated() -> None:
    """Also where only one of its inputs has a gradient."""
    logits = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)

    def curvature(one: Any) -> Tensor:
        (first,) = torch.autograd.grad(one(logits).pow(3).sum(), logits, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), logits, create_graph=True)
        return torch.autograd.grad(second.square().sum(), logits)[0]

    torch.testing.assert_close(
        curvature(lambda x: sinkhorn(x, 2, 0.0)), curvature(lambda x: formulas.sinkhorn(x, 2, 0.0))
    )
    constant = logits.detach()
    weights = torch.ones(3, 3, dtype=torch.float64, requires_grad=True)
    grad = sinkhorn_backward(weights, constant, 2, 0.0)
    torch.testing.assert_close(torch.autograd.grad(grad[0, 0], weights)[0].sum(), grad[0, 0])  # linear, and they are 1


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_permutations_and_rotations(n: int) -> None:
    table = permutations(n, torch.device("cpu")).unflatten(-1, (n, n))
    assert torch.equal(table[0], torch.eye(n))
    assert len({tuple(one.argmax(-1).tolist()) for one in table}) == math.factorial(n)
    assert torch.equal(table.sum(-1), torch.ones(math.factorial(n), n))
    assert torch.equal(table.sum(-2), torch.ones(math.factorial(n), n))
    mixed = convex(3 * torch.randn(7, math.factorial(n), dtype=torch.float64), table.flatten(1))
    for dim in (-1, -2):
        torch.testing.assert_close(mixed.sum(dim), torch.ones(7, n, dtype=torch.float64))
    angles = 3 * torch.randn(7, n * (n - 1) // 2, dtype=torch.float64)
    rotation = cayley(angles, n)
    torch.testing.assert_close(rotation @ rotation.mT, torch.eye(n, dtype=torch.float64).expand(7, n, n))
    torch.testing.assert_close(torch.linalg.det(rotation), torch.ones(7, dtype=torch.float64))
    assert torch.equal(cayley(torch.zeros(n * (n - 1) // 2), n), torch.eye(n))
    if n == 2:  # tan of half the angle is half the value
        half = torch.atan(angles[:, 0] / 2)
        torch.testing.assert_close(rotation[:, 0, 1], torch.sin(2 * half))
        torch.testing.assert_close(rotation[:, 0, 0], torch.cos(2 * half))


@pytest.mark.slow
def test_compiled_equals_eager_for_large_logits() -> None:
    def mixed(logits: Tensor, streams: Tensor) -> Tensor:
        return combine(streams, sinkhorn(logits, 20, 0.0).mT)

    compiled = torch.compile(mixed, fullgraph=True)
    for _ in range(4):
        logits, streams = (torch.rand(6, 4, 4) * 100 - 50).requires_grad_(), torch.randn(6, 4, WIDTH)
        got, want = compiled(logits, streams), mixed(logits, streams)
        torch.testing.assert_close(got, want)
        grads = [torch.autograd.grad(out.square().sum(), logits)[0] for out in (got, want)]
        assert grads[0].isfinite().all()
        torch.testing.assert_close(*grads)


@pytest.mark.slow
@pytest.mark.parametrize("residual", RESIDUALS)
def test_compiles_in_one_graph(residual: Any) -> None:
    topology, blocks, x = MHC(output="learned", residual=residual), net(3), torch.randn(4, WIDTH)
    values = learned(topology, 3, noise=0.5)
    with torch.no_grad():
        values["static"][:, 8:].uniform_(-5, 5)
    compiled = torch.compile(run_learned, fullgraph=True, backend="aot_eager")
    got, want = compiled(topology, values, x, blocks), run_learned(topology, values, x, blocks)
    torch.testing.assert_close(got, want)
    grads = [torch.autograd.grad(out.square().sum(), list(values.values())) for out in (got, want)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


def test_orientation() -> None:
    """b_res says that stream o takes stream o - 1; a transpose would take o + 1."""
    topology = MHC(3)
    values = topology.parameters(Dims(1, WIDTH), "preserve")
    values["static"][0, 6:] = 30 * torch.eye(3).roll(1, 0).flatten()  # [out, in]
    values["scale"].zero_()
    weights, streams = topology.weights(values, Dims(1, WIDTH)), torch.randn(5, 3, WIDTH)
    _, states = topology.read((streams,), weights, 1)
    (mixed,) = topology.write(states, weights, 1, torch.zeros(5, WIDTH))
    torch.testing.assert_close(mixed, streams.roll(1, -2))


@pytest.mark.parametrize("start", ["preserve", "paper"])
@pytest.mark.parametrize("residual", ANY_NUMBER)
def test_start_values(residual: Any, start: Any) -> None:
    topology = MHC(3, "learned", residual=residual)
    values, again = (topology.parameters(Dims(2, WIDTH), start) for _ in range(2))
    assert all(torch.equal(values[name], again[name]) for name in values)  # every rank starts with the same
    columns = 6 + {"sinkhorn": 9, "identity": 0, "permutations": 6, "cayley": 3, "spectral": 4}[residual]
    assert {name: tuple(value.shape) for name, value in values.items()} == {
        "static": (2, columns),
        "dynamic": (2, 3 * WIDTH, columns),
        "scale": (2, 2 if residual == "identity" else 3),
        "last_static": (3,),
        "last_dynamic": (3 * WIDTH, 3),
        "last_scale": (1,),
    }
    assert {value.dtype for value in values.values()} == {torch.float32}
    assert (values["scale"] == 0.01).all() and (values["last_scale"] == 0.01).all()
    assert values["dynamic"].any() == values["last_dynamic"].any() == (start == "paper")
    if start == "paper":
        assert values["dynamic"].std() == pytest.approx(0.02, rel=0.25)
    read, table = topology.gates(values["static"], topology.weights(values, Dims(2, WIDTH)))
    carry, write = table[:, :3], table[:, 3]
    pre = 1 / 3 if residual == "identity" else 1 / 2
    want = torch.full((3,), pre) if start == "paper" else torch.tensor([7, 4, 7]) / 18
    torch.testing.assert_close(read.squeeze(-1), want.expand(2, 3))
    torch.testing.assert_close(topology.reading(values["last_static"]).squeeze(-1), want)
    torch.testing.assert_close(write, torch.ones(2, 3) if start == "paper" else torch.tensor([[0.5, 1, 1.5]] * 2))
    blurred = start == "paper" and residual in ("sinkhorn", "permutations")
    nearly = torch.full((3, 3), 1 / 3) if blurred else torch.eye(3)
    torch.testing.assert_close(carry, nearly.expand(2, 3, 3), rtol=0, atol=0.06)
    dense = dataclasses.replace(topology, output="mean").parameters(Dims(2, WIDTH), start)
    assert all(torch.equal(dense[name], values[name]) for name in ("static", "dynamic", "scale")) and len(dense) == 3


#: Each number of streams and each output with each kind of matrix, and all pairs of the two.
PRESERVING = [
    (residual, n, *[("mean", False), ("learned", False), ("learned", True)][(row + column) % 3])
    for row, residual in enumerate([*ANY_NUMBER, "kronecker"])
    for column, n in enumerate((2, 4, 8) if residual == "kronecker" else (2, 3, 4, 5))
]


@pytest.mark.parametrize(("residual", "streams", "output", "delayed"), PRESERVING)
def test_preserving_start_equals_the_plain_network(residual: str, streams: int, output: Any, delayed: bool) -> None:
    topology, depth = MHC(streams, output, residual=residual, delayed=delayed), 24
    values = learned(topology, depth)
    for dtype, error in ((torch.float64, 3e-7), (torch.float32, 1e-5)):
        blocks, x = net(depth, dtype), torch.randn(4, 3, WIDTH).to(dtype)
        out, want = run_learned(topology, values, x, blocks), plain(x, blocks)
        assert out.dtype == dtype
        assert (out - want).norm() <= error * want.norm()
    blocks, x = net(depth, torch.bfloat16), torch.randn(64, WIDTH).bfloat16()
    out, original = run_learned(topology, values, x, blocks), plain(x, blocks)
    exact = plain(x.double(), [copy.deepcopy(block).double() for block in blocks])
    assert out.dtype == torch.bfloat16
    assert (out - exact).norm() <= 1.3 * (original - exact).norm()
    dims = Dims(depth, WIDTH)
    table = topology.matrix(topology.weights(values, dims), dims)
    torch.testing.assert_close(table, torch.ones(depth + 1, depth + 1).tril(), rtol=0, atol=3e-5)


@pytest.mark.parametrize("options", [{"eps": 1e-6}, {"eps": 1e-6, "residual": "identity"}, {"magnitude": 3.0}], ids=str)
def test_preserving_start_of_shipped_options(options: dict[str, Any]) -> None:
    topology, blocks, x = MHC(output="learned", **options), net(6), torch.randn(4, WIDTH)
    out = run_learned(topology, learned(topology, 6), x, blocks)
    torch.testing.assert_close(out, plain(x, blocks), rtol=2e-5, atol=2e-5)  # Sinkhorn's rows sum to 1 - eps


@pytest.mark.parametrize(("residual", "n"), [*((residual, 5) for residual in ANY_NUMBER), ("kronecker", 8)])
def test_the_preserving_start_is_of_the_form_that_the_class_says(residual: str, n: int) -> None:
    """Streams are ``1 x_t + v y_t``, and different."""
    topology, blocks, x = MHC(n, residual=residual), net(3, torch.float64), torch.randn(7, WIDTH, dtype=torch.float64)
    states = begin(topology, x, weights := topology.weights(learned(topology, 3), Dims(3, WIDTH)))
    for t, block in enumerate(blocks, start=1):
        due, states = topology.read(states, weights, t)
        read = materialize(due)
        torch.testing.assert_close(read, x, rtol=1e-6, atol=1e-6)
        states, x = topology.write(states, weights, t, block(read)), x + block(x)
        v = torch.linspace(-1, 1, n, dtype=torch.float64)[:, None]
        y = (states[0] - x.unsqueeze(-2)).select(-2, -1)
        assert y.norm() > 0.1 * x.norm()
        torch.testing.assert_close(states[0], x.unsqueeze(-2) + v * y.unsqueeze(-2), rtol=1e-6, atol=1e-6)


def test_preserving_the_sum_takes_the_mean() -> None:
    assert MHC(3, "sum").for_start("preserve") == MHC(3)
    for kept, start in ((MHC(3, "sum"), "paper"), (MHC(3, "learned"), "preserve"), (MHC(3), "preserve")):
        assert kept.for_start(start) == kept  # type: ignore[arg-type]
    with pytest.raises(UnsupportedTopology, match=r"'mhc'.*output='sum'.*3 times.*start='paper'"):
        MHC(3, "sum").parameters(Dims(2, WIDTH), "preserve")
    with pytest.raises(UnsupportedTopology, match=r"'mhc'.*magnitude=1.0.*start='paper'"):
        MHC(3, magnitude=1.0).parameters(Dims(2, WIDTH), "preserve")


@pytest.mark.each_once
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("residual", RESIDUALS)
def test_every_weight_learns(residual: Any, optimizer: type[torch.optim.Optimizer], zero: bool) -> None:
    depth, n = 4, 4
    topology = MHC(n, "learned", residual=residual)
    blocks = net(depth, torch.float64, zero)
    values = {name: nn.Parameter(value.double()) for name, value in learned(topology, depth).items()}
    options = {"lr": 1e-2 if optimizer is torch.optim.AdamW else 0.1, "weight_decay": 0.0}
    x, target = torch.randn(2, 16, WIDTH, dtype=torch.float64)
    steps = optimizer([*values.values(), *nn.ModuleList(blocks).parameters()], **options)  # type: ignore[call-arg]
    history = [copy.deepcopy(values)]
    for _ in range(4):
        steps.zero_grad()
        (run_learned(topology, values, x, blocks) - target).square().sum(-1).mean().backward()
        steps.step()
        history.append(copy.deepcopy(values))

    def moved(name: str, step: int) -> Tensor:
        return (history[step][name] - history[0][name]).abs() > 1e-12

    first = 2 if zero else 1
    for name in ("static", "dynamic"):
        assert moved(name, first)[..., : 2 * n].all(), name
        at_once = residual not in ("permutations", "kronecker")  # several together have no effect at first
        assert moved(name, first if at_once else first + 1)[1:, ..., 2 * n :].all(), name
        if residual == "cayley":  # the others, in unit 1, mix equal streams
            assert moved(name, 4)[0, ..., 2 * n :].all()
    for name in ("last_static", "last_dynamic"):
        assert moved(name, 1).all(), name
    assert moved("last_scale", 2).all()
    assert moved("scale", first + 1 if at_once else first + 2)[1:].all() and moved("scale", first + 1)[:, :2].all()


@pytest.mark.parametrize("residual", ANY_NUMBER)
@pytest.mark.parametrize("output", ["sum", "learned"])
def test_matrix(residual: Any, output: Any) -> None:
    depth, topology = 3, MHC(3, output, residual=residual)
    values = learned(topology, depth, "paper", noise=0.7)
    dims = Dims(depth, WIDTH)
    table = topology.matrix(topology.weights(values, dims), dims)
    assert (table.dtype, table.shape) == (torch.float32, (depth + 1, depth + 1))
    static = {name: value.detach().double() * ("static" in name) for name, value in values.items()}
    fs = torch.eye(depth + 1, dtype=torch.float64)  # one channel per increment
    static["dynamic"] = static["dynamic"][:, : 3 * (depth + 1)]
    if output == "learned":
        static["last_dynamic"] = static["last_dynamic"][: 3 * (depth + 1)]
    out, reads = by_reference(topology, static, fs[0], [lambda _, f=f: f for f in fs[1:]])
    torch.testing.assert_close(table.double(), torch.stack([*reads, out]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("residual", ANY_NUMBER)
def test_autocast_changes_only_the_branches(residual: Any) -> None:
    topology = MHC(3, "learned", residual=residual)
    values = learned(topology, 3, "paper", noise=0.5)
    x, blocks = torch.randn(2, WIDTH), [lambda _, f=f: f for f in torch.randn(3, 2, WIDTH).bfloat16()]
    want = run_learned(topology, values, x, blocks)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(run_learned(topology, values, x, blocks), want)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("streams", 1), ("streams", 2.0), ("iterations", 0), ("output", "max"), ("residual", "free")),
        *(("magnitude", 0.0), ("magnitude", math.inf), ("eps", -1e-6), ("eps", 0.1), ("norm_eps", 1.0)),
    ],
)
def test_wrong_options(option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{option}={value!r}"):
        make_topology("mhc", {option: value})


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_spectral_matrices_are_on_the_sphere(n: int) -> None:
    made = spectral(3 * torch.randn(7, (n - 1) ** 2, dtype=torch.float64), n)
    assert made.shape == (7, n, n) and (made < 0).any() == (n > 2)
    for dim in (-1, -2):
        torch.testing.assert_close(made.sum(dim), torch.ones(7, n, dtype=torch.float64))
    torch.testing.assert_close(torch.linalg.matrix_norm(made, 2), torch.ones(7, dtype=torch.float64))


@pytest.mark.parametrize("n", [2, 4, 8])
def test_kronecker_products_are_doubly_stochastic(n: int) -> None:
    made = kronecker(3 * torch.randn(7, 2 * (n.bit_length() - 1), dtype=torch.float64), n)
    assert made.shape == (7, n, n) and (made >= 0).all()
    for dim in (-1, -2):
        torch.testing.assert_close(made.sum(dim), torch.ones(7, n, dtype=torch.float64))


def test_a_manifold_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """H_res that keeps a share ``sigmoid(z)`` of each stream, and takes the rest from the mean."""

    def leaky(z: Tensor, n: int, _: Tensor | None) -> Tensor:
        share = torch.sigmoid(z).unsqueeze(-1)
        return share * torch.eye(n, dtype=z.dtype) + (1 - share) / n

    own = Manifold(values=lambda n: 1, matrix=leaky, start=lambda n: torch.tensor([3.0]))
    monkeypatch.setitem(MANIFOLDS, "leaky", own)
    topology, blocks, x = make_topology("mhc", {"residual": "leaky"}), net(4), torch.randn(5, WIDTH)
    values = learned(topology, 4)  # type: ignore[arg-type]
    assert values["static"].shape == (4, 4 + 4 + 1)
    out = run_learned(topology, values, x, blocks)
    torch.testing.assert_close(out, plain(x, blocks))
    out.square().sum().backward()
    assert values["static"].grad is not None


def test_delayed_reads_wait_for_nothing() -> None:
    """Unit t reads by what unit t - 1 computed, whatever its own weights are; the last one's are the output's."""
    topology, x, f = MHC(3, "learned", delayed=True), torch.randn(5, WIDTH), torch.randn(2, 5, WIDTH)
    values = topology.parameters(Dims(2, WIDTH), "paper")
    values["scale"].zero_()
    values["static"][0, :3], values["static"][1, :3] = torch.tensor([9.0, -9, 0]), torch.tensor([0.0, 0, 9])
    weights = topology.weights(values, Dims(2, WIDTH))
    first, states = topology.read(topology.start(x, weights), weights, 1)
    assert torch.equal(materialize(first), x)
    (streams, waiting) = topology.write(states, weights, 1, f[0])
    second, states = topology.read((streams, waiting), weights, 2)
    torch.testing.assert_close(materialize(second), streams.mul(torch.sigmoid(values["static"][0, :3, None])).sum(-2))
    states = topology.write(states, weights, 2, f[1])
    out = states[0].mul(torch.sigmoid(values["static"][1, :3, None])).sum(-2)
    torch.testing.assert_close(topology.finish(states, weights, Dims(2, WIDTH)), out)
    again = topology.lasting(states)  # what a pipeline sends, perhaps rounded on its way
    torch.testing.assert_close(topology.finish(again, weights, Dims(2, WIDTH)), out)
    assert all(isinstance(tensor, Tensor) for tensor in again)


def test_scaled_entries() -> None:
    topology, dims = MHC(4, entry_scales=True), Dims(3, WIDTH)
    drawn = topology.parameters(dims, "paper")["entry"]
    assert drawn.shape == (4, WIDTH) and float(drawn.std()) > 0.1
    assert ((drawn - 0.6).abs() <= (6 / (4 + WIDTH)) ** 0.5).all()
    values = learned(topology, 3)
    blocks, x = net(3, torch.float64), torch.randn(5, WIDTH, dtype=torch.float64)
    (streams,) = topology.start(x, topology.weights(values, dims))  # type: ignore[arg-type]
    assert (streams[:, 0] - streams[:, 3]).abs().max() > 0.1  # apart at once
    out = run_learned(topology, values, x, blocks)
    torch.testing.assert_close(out, plain(x, blocks), rtol=1e-6, atol=1e-6)
    out.square().sum().backward()
    entry, static = values["entry"].grad, values["static"].grad
    assert entry is not None and static is not None and (entry != 0).all()
    assert static[0, 8:].any()  # H_res of unit 1, too, which has no gradient where it mixes copies
    with pytest.raises(ValueError, match=r"entry_scales=True: with delayed=True"):
        MHC(4, "learned", delayed=True, entry_scales=True)


def test_numbers_of_streams_and_outputs() -> None:
    with pytest.raises(ValueError, match=r"delayed=True.*pass output='learned'"):
        MHC(delayed=True)
    with pytest.raises(ValueError, match=r"streams=6.*power of 2"):
        MHC(6, residual="kronecker")
    with pytest.raises(ValueError, match=r"streams=9.*permutations"):
        MHC(9, residual="permutations")


def test_names() -> None:
    assert make_topology("mhc", {"streams": 2, "iterations": 5}) == MHC(2, "mean", 5)
    assert list_topologies()["mhc"]
    assert MHC.needs_width


def unit_of(topology: MHC, values: dict[str, Tensor], streams: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
    """What one unit reads from given streams, and the streams after it wrote f."""
    weights = topology.weights(values, Dims(1, WIDTH))
    read, states = topology.read((streams,), weights, 1)
    return materialize(read), topology.write(states, weights, 1, f)[0]


def test_hyper_connections_package() -> None:
    """It norms each stream on its own, with the same projection for all: equal on streams of one RMS."""
    topology, n = MHC(3), 3
    unit, f = Package(n, dim=WIDTH, layer_index=0), torch.randn(2, WIDTH)
    streams = nn.functional.normalize(torch.randn(2, n, WIDTH), dim=-1) * WIDTH**0.5
    static, phi = torch.randn(n, n + 2), torch.randn(WIDTH, n + 2)  # pre, res [in, out], post
    scale = torch.tensor([0.3, 0.5, 0.2])  # pre, post, res
    with torch.no_grad():
        unit.static_alpha.copy_(static[:, :-1])
        unit.static_beta.copy_(static[:, -1])
        unit.dynamic_alpha_fn.copy_(phi[:, :-1])
        unit.dynamic_beta_fn.copy_(phi[:, -1])
        for theirs, ours in zip((unit.pre_branch_scale, unit.h_post_scale, unit.residual_scale), scale, strict=True):
            theirs.fill_(ours)
    per_stream = torch.einsum("ij,dk->idjk", torch.eye(n), phi)  # logits of stream j come from stream j
    res = per_stream[..., 1:-1].transpose(-1, -2)  # [n, D, out, in]
    dynamic = torch.cat([per_stream[..., 0], per_stream[..., -1], res.flatten(-2)], -1).flatten(0, 1)
    values = {
        "static": torch.cat([static[:, 0], static[:, -1], static[:, 1:-1].T.flatten()]).unsqueeze(0).requires_grad_(),
        "dynamic": dynamic.unsqueeze(0),
        "scale": scale.unsqueeze(0).requires_grad_(),
    }
    want_read, residuals, gates = unit.width_connection(streams.flatten(0, 1))
    want = unit.depth_connection(f, residuals, **gates)
    read, got = unit_of(topology, values, streams, f)
    torch.testing.assert_close(read, want_read, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got.flatten(0, 1), want, rtol=1e-4, atol=1e-5)
    (got.square().sum() + read.square().sum()).backward()
    (want.square().sum() + want_read.square().sum()).backward()
    alpha, beta = unit.static_alpha.grad, unit.static_beta.grad
    grads = {
        "static": torch.cat([alpha[:, 0], beta, alpha[:, 1:].T.flatten()]),
        "scale": torch.stack([unit.pre_branch_scale.grad[0], unit.h_post_scale.grad, unit.residual_scale.grad[0]]),
    }
    for name, grad in grads.items():
        torch.testing.assert_close(values[name].grad[0], grad, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_liger_kernels(tmp_path: Path) -> None:
    """Its Triton kernels, forward and backward, in Triton's interpreter, which has to be chosen before the import.

    The layout of weights is the same, H_res [out, in]; rows come before columns there, which shows in few digits.
    """
    values = learned(MHC(4), 1, "paper", noise=0.3)
    streams, (f, upstream) = torch.randn(3, 4, WIDTH, requires_grad=True), torch.randn(2, 3, WIDTH)
    (static, dynamic, scale) = (values[name].detach()[0] for name in ("static", "dynamic", "scale"))
    torch.save((streams.detach(), dynamic, static, *scale.unbind(), f, upstream), tmp_path / "inputs.pt")
    code = """if True:
        import sys, torch
        from liger_kernel.ops.mhc import LigerMHCCoeffsFunction, LigerMHCPostResFunction, LigerMHCPreFunction
        *learned, f, upstream = torch.load(sys.argv[1] + "/inputs.pt")
        learned = [value.clone().requires_grad_() for value in learned]
        pre, post, res = LigerMHCCoeffsFunction.apply(*learned, True, 20, 1e-6, 0.0, 0.0, 2.0)
        read = LigerMHCPreFunction.apply(learned[0], pre)
        out = LigerMHCPostResFunction.apply(learned[0], f, post, res)
        loss = (read * upstream).sum() + out.square().sum()
        torch.save((read.detach(), out.detach(), torch.autograd.grad(loss, learned)), sys.argv[1] + "/outputs.pt")
    """
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environment, check=True)
    want_read, want, (streams_grad, dynamic_grad, static_grad, *scale_grads) = torch.load(tmp_path / "outputs.pt")
    read, got = unit_of(MHC(4), values, streams, f)
    torch.testing.assert_close(read, want_read, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    ((read * upstream).sum() + got.square().sum()).backward()
    grads = {"static": static_grad, "dynamic": dynamic_grad, "scale": torch.stack(scale_grads)}
    for name, grad in grads.items():
        torch.testing.assert_close(values[name].grad[0], grad, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(streams.grad, streams_grad, rtol=1e-3, atol=1e-4)
