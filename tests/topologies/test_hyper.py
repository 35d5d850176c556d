from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from formulas import by_reference
from hyper_connections import HyperConnections as Package
from torch import Tensor, nn
from toy_nets import WIDTH, begin, net, plain, run_learned

from rewire.errors import UnsupportedTopology
from rewire.topologies import list_topologies, make_topology
from rewire.topologies.base import Dims, materialize
from rewire.topologies.hyper import DynamicHyperConnections, FracConnections, HyperConnections, Streams

VARIANTS = [
    *[HyperConnections(n) for n in (1, 2, 4)],
    *[HyperConnections(n, output) for output in ("sum", "learned") for n in (2, 4)],
    *[DynamicHyperConnections(n) for n in (1, 4)],
    *[DynamicHyperConnections(n, output) for output in ("sum", "learned") for n in (1, 4)],
    *[FracConnections(m, dynamic) for m in (1, 2, 4) for dynamic in (False, True)],
]


def learned(topology: Streams, depth: int, start: str = "preserve", noise: float = 0.0) -> dict[str, nn.Parameter]:
    values = topology.parameters(Dims(depth, WIDTH), start)  # type: ignore[arg-type]
    return {name: nn.Parameter(value + noise * torch.randn_like(value)) for name, value in values.items()}


@pytest.mark.each_once
@pytest.mark.parametrize("shape", [(2, 3, WIDTH), (WIDTH,)])
@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("topology", VARIANTS, ids=str)
def test_formulas_and_gradients(topology: Streams, depth: int, shape: tuple[int, ...]) -> None:
    values = learned(topology, depth, "paper", noise=0.5)
    twins = {name: value.detach().double().requires_grad_() for name, value in values.items()}
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    blocks = net(depth, torch.float64)
    got, (want, _) = run_learned(topology, values, x, blocks), by_reference(topology, twins, x, blocks)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    got_grads = torch.autograd.grad(got.square().sum(), [x, *values.values()])
    want_grads = torch.autograd.grad(want.square().sum(), [x, *twins.values()])
    for got_grad, want_grad in zip(got_grads, want_grads, strict=True):
        torch.testing.assert_close(got_grad.double(), want_grad, rtol=1e-5, atol=1e-5 * float(want_grad.abs().max()))


STATIC = [topology for topology in VARIANTS if type(topology) is HyperConnections]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("topology", STATIC, ids=str)
def test_written_and_read_in_one_pass(topology: HyperConnections, dtype: torch.dtype) -> None:
    """Against the formulas in float64, which does not take that way."""
    values = learned(topology, 4, "paper", noise=0.3)
    twins = {name: value.detach().double().requires_grad_() for name, value in values.items()}
    x = torch.randn(2, 3, WIDTH).to(dtype).requires_grad_()
    exact, blocks = x.detach().double().requires_grad_(), net(4, dtype)
    want, _ = by_reference(topology, twins, exact, copy.deepcopy(nn.ModuleList(blocks)).double())
    got = run_learned(topology, values, x, blocks)
    found = torch.autograd.grad(got.square().sum(), [x, *values.values()])
    wanted = torch.autograd.grad(want.square().sum(), [exact, *twins.values()])
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    for a, b in zip((got, *found), (want, *wanted), strict=True):
        assert (a.double() - b).norm() <= tolerance * b.norm()


def test_a_read_that_comes_with_a_write() -> None:
    """It is there, and the same is computed where it did not come along, but for rounding."""
    topology, dims, x = HyperConnections(4), Dims(2), torch.randn(5, WIDTH, requires_grad=True)
    values = learned(topology, 2, "paper", noise=0.5)
    weights = topology.weights(values, dims)
    states = topology.write(topology.read(topology.start(x, weights), weights, 1)[1], weights, 1, x.sin())
    (streams,) = topology.lasting(states)
    assert streams is states[0] and topology.lasting((streams,)) == (streams,)
    (got, opened), (want, again) = topology.read(states, weights, 2), topology.read((streams,), weights, 2)
    assert got is states[1] and opened[0] is streams
    torch.testing.assert_close(got, want)
    ends = [topology.write(one, weights, 2, read.cos()) for read, one in ((got, opened), (want, again))]
    assert [len(end) for end in ends] == [1, 1]
    leaves = [x, *values.values()]
    torch.testing.assert_close(*(torch.autograd.grad(end[0].sum(), leaves, retain_graph=True) for end in ends))


def test_start_values() -> None:
    static = HyperConnections(3).parameters(Dims(4), "paper")["static"]
    assert static.dtype == torch.float32
    assert static[..., 0].argmax(1).tolist() == [1, 2, 0, 1]  # unit t reads stream t mod n
    assert static[..., 0].sum(1).tolist() == [1, 1, 1, 1]
    assert torch.equal(static[..., 1:4], torch.eye(3).expand(4, 3, 3))
    assert torch.equal(static[..., 4], torch.ones(4, 3))
    dynamic = DynamicHyperConnections(3).parameters(Dims(4, WIDTH), "preserve")
    assert torch.equal(dynamic["static"], static)
    assert torch.equal(dynamic["dynamic"], torch.zeros(4, WIDTH, 5))
    assert torch.equal(dynamic["scale"], torch.full((4, 2), 0.01))
    frac = FracConnections(2).parameters(Dims(4, WIDTH), "preserve")
    assert frac["static"].tolist() == [[[1, 0, 1, 0, 1], [0, 1, 0, 1, 1]]] * 4
    assert frac["dynamic"].shape == (4, WIDTH // 2, 5)
    assert FracConnections(2, dynamic=False).parameters(Dims(4, WIDTH), "preserve").keys() == {"static"}


@pytest.mark.each_once
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("topology", VARIANTS, ids=str)
def test_starts_as_the_plain_network_bitwise(topology: Streams, dtype: torch.dtype) -> None:
    blocks, x = net(6, dtype), torch.randn(4, 3, WIDTH).to(dtype)
    values = learned(topology, 6)
    out = run_learned(topology, values, x, blocks)
    assert out.dtype == dtype
    assert torch.equal(out, plain(x, blocks))
    table = topology.matrix(topology.weights(values, Dims(6, WIDTH)), Dims(6, WIDTH))
    assert torch.equal(table, torch.ones(7, 7).tril())


def test_the_sum_is_n_times_the_mean() -> None:
    blocks, x, topology = net(3), torch.randn(4, WIDTH), HyperConnections(3, "sum")
    out = run_learned(topology, learned(topology, 3, "paper"), x, blocks)
    torch.testing.assert_close(out, 3 * plain(x, blocks))
    out = run_learned(topology, learned(topology, 3), x, blocks)  # its last unit divides by n
    torch.testing.assert_close(out, plain(x, blocks))


@pytest.mark.each_once
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("topology", VARIANTS, ids=str)
def test_every_weight_learns(topology: Streams, optimizer: type[torch.optim.Optimizer], zero: bool) -> None:
    blocks, values = net(4, zero=zero), learned(topology, 4)
    x, target = torch.randn(16, WIDTH), torch.randn(16, WIDTH)
    rate = 1e-3 if optimizer is torch.optim.AdamW else 0.02 if getattr(topology, "output", "") == "sum" else 0.2
    options = {"lr": rate, "weight_decay": 0.0}
    steps = optimizer([*values.values(), *nn.ModuleList(blocks).parameters()], **options)  # type: ignore[call-arg]
    history = [copy.deepcopy(values)]
    for _ in range(3):
        steps.zero_grad()
        (run_learned(topology, values, x, blocks) - target).square().sum(-1).mean().backward()
        steps.step()
        history.append(copy.deepcopy(values))
    start, _, second, third = history
    for name in values:
        late = zero and name == "scale"  # the scale of B waits for f_t, and then for its W
        assert (second[name] != start[name])[..., : 1 if late else None].all(), name
        assert (third[name] != start[name]).all(), name


@pytest.mark.parametrize("topology", [HyperConnections(3), DynamicHyperConnections(2), FracConnections(4)], ids=str)
def test_states(topology: Streams) -> None:
    x, dims = torch.randn(5, WIDTH).bfloat16(), Dims(2, WIDTH)
    weights = topology.weights(learned(topology, 2, noise=0.3), dims)
    states = begin(topology, x, weights)
    assert states[0].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()  # n copies cost nothing
    for t in (1, 2):
        assert len(states) == (2 if t == 2 and type(topology) is HyperConnections else 1)
        read, opened = topology.read(states, weights, t)
        for now in (states, opened):
            like = topology.template(now)
            assert (like.shape, like.dtype) == (x.shape, x.dtype)
        states = topology.write(opened, weights, t, materialize(read))
        assert states[0].dtype == torch.bfloat16
        assert states[0].numel() == x.numel() * getattr(topology, "streams", 1)


def test_low_precision_rounds_once() -> None:
    topology = HyperConnections(4)
    values = learned(topology, 2, "paper", noise=0.5)
    weights, streams = topology.weights(values, Dims(2)), torch.randn(32, 4, WIDTH).bfloat16()
    f, g = torch.randn(2, 32, WIDTH).bfloat16()
    read, opened = topology.read((streams,), weights, 1)
    got, after = topology.write(opened, weights, 1, f, g)
    a, b = values["static"].detach().double()
    exact = a[:, 1:5].T @ streams.double() + a[:, 5:] * (f.double() + g.double()).unsqueeze(-2)
    half = {"rtol": 0.51 * torch.finfo(torch.bfloat16).eps, "atol": 1e-6}
    torch.testing.assert_close(got.double(), exact, **half)
    torch.testing.assert_close(read.double(), (a[:, :1].T @ streams.double()).squeeze(-2), **half)
    torch.testing.assert_close(after.double(), (b[:, :1].T @ exact).squeeze(-2), **half)


def test_parallel_branches_keep_the_order_of_plain_adds() -> None:
    x, f, g = torch.randn(3, 5, WIDTH) * 10
    for topology in (HyperConnections(4), FracConnections(2)):
        weights = topology.weights(learned(topology, 1), Dims(1, WIDTH))
        states = topology.write(topology.read(begin(topology, x, weights), weights, 1)[1], weights, 1, f, g)
        assert torch.equal(topology.finish(states, weights, Dims(1, WIDTH)), x + f + g)


@pytest.mark.parametrize("topology", VARIANTS, ids=str)
def test_matrix(topology: Streams) -> None:
    depth, parts = 3, topology.parts
    dims, values = Dims(depth, WIDTH), learned(topology, depth, "paper", noise=0.5)
    table = topology.matrix(topology.weights(values, dims), dims)
    assert (table.dtype, table.shape) == (torch.float32, (depth + 1, depth + 1))
    static = {name: value.double() for name, value in values.items() if "static" in name}
    want = torch.zeros(depth + 1, depth + 1, dtype=torch.float64)
    for i in range(depth + 1):
        for k in range(parts):  # the weight of part k of f_i in part k of each read and of the output
            fs = torch.zeros(depth + 1, WIDTH, dtype=torch.float64)
            fs[i].view(parts, -1)[k] = 1
            out, reads = by_reference(topology, static, fs[0], [lambda _, f=f: f for f in fs[1:]])
            want[:, i] += torch.stack([*reads, out]).view(depth + 1, parts, -1)[:, k, 0].detach() / parts
    torch.testing.assert_close(table.double(), want, rtol=1e-5, atol=1e-5)
    assert torch.autograd.grad(table.sum(), values["static"])[0].any()


@pytest.mark.parametrize("topology", VARIANTS, ids=str)
def test_autocast_changes_only_the_branches(topology: Streams) -> None:
    values, x, fs = learned(topology, 3, "paper", noise=0.5), torch.randn(2, WIDTH), torch.randn(3, 2, WIDTH).bfloat16()
    blocks = [lambda _, f=f: f for f in fs]
    want = run_learned(topology, values, x, blocks)
    with torch.autocast("cpu", torch.bfloat16):
        got = run_learned(topology, values, x, blocks)
    assert got.dtype == torch.float32
    assert torch.equal(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("topology", [HyperConnections(2), DynamicHyperConnections(2), FracConnections(2)], ids=str)
def test_compiles_in_one_graph(topology: Streams) -> None:
    blocks, x, values = net(3), torch.randn(4, WIDTH), learned(topology, 3, noise=0.5)
    compiled = torch.compile(run_learned, fullgraph=True, backend="aot_eager")
    got, want = compiled(topology, values, x, blocks), run_learned(topology, values, x, blocks)
    torch.testing.assert_close(got, want)
    grads = [torch.autograd.grad(out.square().sum(), list(values.values())) for out in (got, want)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize(
    ("name", "option", "value", "message"),
    [
        ("hc-static", "streams", 0, "whole number, 1 or more"),
        ("hc-dynamic", "streams", 2.0, "whole number"),
        ("hc-static", "output", "max", "'mean', 'sum', 'learned'"),
        ("frac-hc", "fractions", -1, "whole number, 1 or more"),
        ("frac-hc", "fractions", True, "whole number"),
        ("frac-hc", "dynamic", 1, "True or False"),
    ],
)
def test_wrong_options(name: str, option: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"{option}={value!r}.*{message}"):
        make_topology(name, {option: value})


def test_names() -> None:
    assert make_topology("hc-static", {"streams": 2}) == HyperConnections(2)
    assert make_topology("hc-dynamic", {}) == DynamicHyperConnections(4, "mean")
    assert make_topology("frac-hc", {"dynamic": False}) == FracConnections(4, False)
    assert all(list_topologies()[name] for name in ("hc-static", "hc-dynamic", "frac-hc"))
    assert [one.needs_width for one in (HyperConnections, DynamicHyperConnections, FracConnections)] == [0, 1, 1]
    with pytest.raises(UnsupportedTopology, match=r"fractions=3.*8 channels"):
        FracConnections(3).parameters(Dims(2, WIDTH), "paper")


def load(unit: Package, values: dict[str, Tensor], t: int) -> None:
    """Weights of our unit t (from 0); theirs lie in our order A_m | A_r | B, but for fractions."""
    theirs = {
        "static": (unit.static_alpha, unit.static_beta),
        "scale": (unit.dynamic_alpha_scale, unit.dynamic_beta_scale),
    }
    theirs["dynamic"] = (unit.dynamic_alpha_fn, unit.dynamic_beta_fn)
    with torch.no_grad():
        unit.dynamic_alpha_scale.zero_()  # without input
        unit.dynamic_beta_scale.zero_()
        for name, value in values.items():
            alpha, beta = value[t].split([value.shape[-1] - 1, 1], -1)
            theirs[name][0].copy_(alpha.squeeze() if name == "scale" else alpha)
            theirs[name][1].copy_(beta.squeeze())


@pytest.mark.parametrize("topology", [HyperConnections(3, "sum"), DynamicHyperConnections(3, "sum")], ids=str)
def test_hyper_connections_package(topology: HyperConnections) -> None:
    """Its RMS norm has a learned scale, which starts at 1, and no epsilon (hence 1e-5)."""
    values = learned(topology, 3, "paper", noise=0.5)
    blocks, x = net(3, torch.float64), torch.randn(2, 5, WIDTH, dtype=torch.float64)
    expand, reduce = Package.get_expand_reduce_stream_functions(3)
    units = [Package(3, dim=WIDTH, branch=block, layer_index=t).double() for t, block in enumerate(blocks, start=1)]
    start = [torch.cat([unit.static_alpha, unit.static_beta[:, None]], -1) for unit in units]
    assert torch.equal(torch.stack(start), topology.parameters(Dims(3, WIDTH), "paper")["static"].double())
    streams = expand(x)
    for t, unit in enumerate(units):
        load(unit, values, t)
        streams = unit(streams)
    want, got = reduce(streams), run_learned(topology, values, x, blocks)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    want.square().mean().backward()
    got.square().mean().backward()
    for name, kind in (("static", "static_{}"), ("dynamic", "dynamic_{}_fn"), ("scale", "dynamic_{}_scale")):
        if name in values:
            columns = [[getattr(unit, kind.format(part)).grad for part in ("alpha", "beta")] for unit in units]
            rows = [torch.cat([a.reshape(*b.shape, -1), b.unsqueeze(-1)], -1) for a, b in columns]
            torch.testing.assert_close(values[name].grad.double(), torch.stack(rows), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dynamic", [False, True])
def test_hyper_connections_package_fractions(dynamic: bool) -> None:
    """Reads and the mix only: it writes each fraction of f_t to all fractions, the paper to its own."""
    m, topology = 4, FracConnections(4, dynamic)
    values = learned(topology, 1, noise=0.5)
    unit, x = Package(1, dim=WIDTH, num_fracs=m, layer_index=0).double(), torch.randn(2, 5, WIDTH).double()
    swapped = torch.arange(2 * m).view(2, m).T.flatten()  # theirs: A_m and A_r column by column in turn
    with torch.no_grad():
        unit.static_alpha.copy_(values["static"][0, :, swapped])
        unit.dynamic_alpha_scale.copy_(values["scale"][0, 0] if dynamic else torch.tensor(0.0))
        unit.dynamic_alpha_fn.copy_(values["dynamic"][0, :, swapped] if dynamic else torch.tensor(0.0))
    want_read, want_mix, _ = unit.width_connection(x)
    weights = topology.weights(values, Dims(1, WIDTH))
    read, states = topology.read(begin(topology, x, weights), weights, 1)
    mixed = topology.finish(topology.write(states, weights, 1, torch.zeros_like(x)), weights, Dims(1, WIDTH))
    torch.testing.assert_close(materialize(read), want_read, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mixed, want_mix, rtol=1e-5, atol=1e-5)
