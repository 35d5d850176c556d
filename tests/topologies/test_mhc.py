from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hyper_connections import mHC as Package
from torch import Tensor, nn
from toy_nets import WIDTH, net, plain, run_learned
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection

from rewire.errors import UnsupportedTopology
from rewire.topologies import list_topologies, make_topology
from rewire.topologies.base import Dims
from rewire.topologies.hyper import combine
from rewire.topologies.mhc import ManifoldHyperConnections, sinkhorn, sinkhorn_backward

MHC = ManifoldHyperConnections


def naive_sinkhorn(logits: Tensor, iterations: int) -> Tensor:
    """As published, but rows first."""
    matrix = torch.exp(logits)
    for _ in range(iterations):
        matrix = matrix / matrix.sum(-1, keepdim=True)
        matrix = matrix / matrix.sum(-2, keepdim=True)
    return matrix


def naive(topology: MHC, x: Tensor, blocks: list[Any], values: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The formulas as written, stream by stream: the output, and what each unit reads."""
    n, streams, reads = topology.streams, [x] * topology.streams, []
    for t, block in enumerate(blocks):
        flat = torch.cat(streams, -1)
        normed = flat / ((flat**2).mean(-1, keepdim=True) + 1e-6) ** 0.5
        b, alpha, phi = values["static"][t], values["scale"][t], values["dynamic"][t]
        pre = torch.sigmoid(alpha[0] * (normed @ phi[:, :n]) + b[:n])
        post = 2 * torch.sigmoid(alpha[1] * (normed @ phi[:, n : 2 * n]) + b[n : 2 * n])
        logits = alpha[2] * (normed @ phi[:, 2 * n :]) + b[2 * n :]
        res = naive_sinkhorn(logits.reshape(*x.shape[:-1], n, n), topology.iterations)
        reads.append(sum(pre[..., i, None] * streams[i] for i in range(n)))
        f = block(reads[-1])
        streams = [sum(res[..., o, i, None] * streams[i] for i in range(n)) + post[..., o, None] * f for o in range(n)]
    return sum(streams) / (1 if topology.output == "sum" else n), reads


def learned(topology: MHC, depth: int, start: str = "preserve", noise: float = 0.0) -> dict[str, nn.Parameter]:
    values = topology.parameters(Dims(depth, WIDTH), start)  # type: ignore[arg-type]
    return {name: nn.Parameter(value + noise * torch.randn_like(value)) for name, value in values.items()}


@pytest.mark.parametrize("shape", [(2, 3, WIDTH), (5, WIDTH)])
@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("topology", [MHC(2), MHC(4), MHC(3, "sum", 2), MHC(4, iterations=1)], ids=str)
def test_formulas_and_gradients(topology: MHC, depth: int, shape: tuple[int, ...]) -> None:
    values = learned(topology, depth, "paper", noise=0.5)
    twins = {name: value.detach().double().requires_grad_() for name, value in values.items()}
    x, blocks = torch.randn(shape, dtype=torch.float64, requires_grad=True), net(depth, torch.float64)
    got, (want, _) = run_learned(topology, values, x, blocks), naive(topology, x, blocks, twins)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    got_grads = torch.autograd.grad(got.square().sum(), [x, *values.values()])
    want_grads = torch.autograd.grad(want.square().sum(), [x, *twins.values()])
    for got_grad, want_grad in zip(got_grads, want_grads, strict=True):
        torch.testing.assert_close(got_grad.double(), want_grad, rtol=1e-5, atol=1e-5 * float(want_grad.abs().max()))


@pytest.mark.parametrize("size", [1.0, 50.0, 1000.0])
@pytest.mark.parametrize("iterations", [1, 3, 20])
def test_sinkhorn_in_float32(size: float, iterations: int) -> None:
    logits = (size * (2 * torch.rand(64, 4, 4) - 1)).requires_grad_()
    exact, upstream = logits.detach().double().requires_grad_(), torch.randn(64, 4, 4)
    got = sinkhorn(logits, iterations)
    (got_grad,) = torch.autograd.grad(got, logits, upstream)
    assert got.isfinite().all() and got_grad.isfinite().all()
    torch.testing.assert_close(got.sum(-2), torch.ones(64, 4))
    if size < 1000:  # where the twin does not overflow
        want = naive_sinkhorn(exact, iterations)
        (want_grad,) = torch.autograd.grad(want, exact, upstream.double())
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(got_grad.double(), want_grad, rtol=1e-4, atol=1e-5)
    if size == 1 and iterations == 20:
        torch.testing.assert_close(got.sum(-1), torch.ones(64, 4))


def test_sinkhorn_is_an_operator() -> None:
    logits = torch.randn(2, 24, dtype=torch.float64)[:, 8:].unflatten(-1, (4, 4)).requires_grad_()
    torch.library.opcheck(sinkhorn, (logits, 3))
    torch.library.opcheck(sinkhorn_backward, (torch.randn(2, 4, 4).mT, torch.randn(2, 4, 4).mT, 3))
    assert torch.autograd.gradcheck(lambda x: sinkhorn(x, 3), logits)


def test_compiled_equals_eager_for_large_logits() -> None:
    def mixed(logits: Tensor, streams: Tensor) -> Tensor:
        return combine(streams, sinkhorn(logits, 20).mT)

    compiled = torch.compile(mixed, fullgraph=True)
    for _ in range(4):
        logits, streams = (torch.rand(6, 4, 4) * 100 - 50).requires_grad_(), torch.randn(6, 4, WIDTH)
        got, want = compiled(logits, streams), mixed(logits, streams)
        torch.testing.assert_close(got, want)
        grads = [torch.autograd.grad(out.square().sum(), logits)[0] for out in (got, want)]
        assert grads[0].isfinite().all()
        torch.testing.assert_close(*grads)


def test_compiles_in_one_graph() -> None:
    topology, blocks, x = MHC(), net(3), torch.randn(4, WIDTH)
    values = learned(topology, 3, noise=0.5)
    with torch.no_grad():
        values["static"][:, 8:].uniform_(-50, 50)
    compiled = torch.compile(run_learned, fullgraph=True, backend="aot_eager")
    got, want = compiled(topology, values, x, blocks), run_learned(topology, values, x, blocks)
    torch.testing.assert_close(got, want)
    grads = [torch.autograd.grad(out.square().sum(), list(values.values())) for out in (got, want)]
    torch.testing.assert_close(*grads)


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
def test_start_values(start: str) -> None:
    values, again = (MHC(3).parameters(Dims(2, WIDTH), start) for _ in range(2))  # type: ignore[arg-type]
    assert all(torch.equal(values[name], again[name]) for name in values)  # every rank starts with the same
    assert {name: tuple(value.shape) for name, value in values.items()} == {
        "static": (2, 15),
        "dynamic": (2, 3 * WIDTH, 15),
        "scale": (2, 3),
    }
    assert {value.dtype for value in values.values()} == {torch.float32}
    assert torch.equal(values["scale"], torch.full((2, 3), 0.01))
    assert values["dynamic"].std() == pytest.approx(0.02, rel=0.25)
    assert values["dynamic"][..., :6].any() == (start == "paper")
    read, carry, write = MHC(3).gates(values["static"][0])
    torch.testing.assert_close(read, torch.full((3, 1), 0.5 if start == "paper" else 1 / 3))
    assert write.mean() == pytest.approx(1)
    assert len(set(write.tolist())) == (1 if start == "paper" else 3)
    nearly = torch.full((3, 3), 1 / 3) if start == "paper" else torch.eye(3)
    torch.testing.assert_close(carry, nearly, rtol=0, atol=0.06)


@pytest.mark.parametrize("streams", [2, 3, 4, 7])
@pytest.mark.parametrize("depth", [1, 2, 24])
def test_preserving_start_equals_the_plain_network(streams: int, depth: int) -> None:
    topology = MHC(streams)
    values = learned(topology, depth)
    for dtype, error in ((torch.float64, 1e-6), (torch.float32, 3e-6)):
        blocks, x = net(depth, dtype), torch.randn(4, 3, WIDTH).to(dtype)
        out, want = run_learned(topology, values, x, blocks), plain(x, blocks)
        assert out.dtype == dtype
        assert (out - want).norm() <= error * want.norm()
    dims = Dims(depth, WIDTH)
    table = topology.matrix(topology.weights(values, dims), dims)
    torch.testing.assert_close(table, torch.ones(depth + 1, depth + 1).tril())


def test_preserving_start_in_bf16() -> None:
    """Not bitwise, as streams round on their own; but as near to the truth."""
    blocks, x = net(12, torch.bfloat16), torch.randn(64, WIDTH).bfloat16()
    out, original = run_learned(MHC(), learned(MHC(), 12), x, blocks), plain(x, blocks)
    exact = plain(x.double(), [copy.deepcopy(block).double() for block in blocks])
    assert out.dtype == torch.bfloat16
    assert (out - exact).norm() <= 1.3 * (original - exact).norm()


def test_any_mix_of_streams_keeps_their_mean() -> None:
    values, blocks, x = learned(MHC(4, iterations=2), 6), net(6), torch.randn(4, WIDTH)
    with torch.no_grad():
        values["static"][:, 8:].uniform_(-50, 50)  # far from converged after two iterations
    torch.testing.assert_close(run_learned(MHC(4, iterations=2), values, x, blocks), plain(x, blocks))


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_every_weight_learns(optimizer: type[torch.optim.Optimizer], zero: bool) -> None:
    depth, n = 4, 4
    topology, blocks, values = MHC(n), net(depth, torch.float64, zero), learned(MHC(n), depth)
    options = {"lr": 1e-2, "weight_decay": 0.0}
    if optimizer is torch.optim.SGD:  # its steps on H_res are so small that float32 would round some away
        values, options["lr"] = {name: nn.Parameter(value.double()) for name, value in values.items()}, 0.1
    x, target = torch.randn(2, 16, WIDTH, dtype=torch.float64)
    steps = optimizer([*values.values(), *nn.ModuleList(blocks).parameters()], **options)  # type: ignore[call-arg]
    history, grads = [copy.deepcopy(values)], []
    for _ in range(3):
        steps.zero_grad()
        (run_learned(topology, values, x, blocks) - target).square().sum(-1).mean().backward()
        steps.step()
        history.append(copy.deepcopy(values))
        grads.append(values["static"].grad[:, 2 * n :].abs())  # type: ignore[index]
    inner = slice(1, depth - 1)  # H_res of the last unit makes no difference, that of the first hardly any
    wait = 2 if zero else 1  # a gradient of H_res before is rounding noise
    assert grads[wait][inner].min() > 1e3 * torch.stack([*grads[:wait], grads[wait][-1:].expand(depth, -1)]).max()
    moved = {name: history[2][name] != history[0][name] for name in values}
    later = {name: history[1 + wait][name] != history[0][name] for name in values}
    for name in ("static", "dynamic"):
        assert moved[name][..., : 2 * n].all(), name
        assert later[name][inner, ..., 2 * n :].all(), name
    assert later["scale"][:, :2].all()
    assert later["scale"][inner].all()


def test_matrix() -> None:
    depth, topology = 3, MHC(3, output="sum")
    values = learned(topology, depth, "paper", noise=0.7)
    dims = Dims(depth, WIDTH)
    table = topology.matrix(topology.weights(values, dims), dims)
    assert (table.dtype, table.shape) == (torch.float32, (depth + 1, depth + 1))
    static = {name: value.detach().double() * (name == "static") for name, value in values.items()}
    fs = torch.eye(depth + 1, dtype=torch.float64)  # one channel per increment
    static["dynamic"] = static["dynamic"][:, : 3 * (depth + 1)]
    out, reads = naive(topology, fs[0], [lambda _, f=f: f for f in fs[1:]], static)
    torch.testing.assert_close(table.double(), torch.stack([*reads, out]), rtol=1e-5, atol=1e-5)


def test_autocast_changes_only_the_branches() -> None:
    topology, values = MHC(3, output="sum"), learned(MHC(3), 3, "paper", noise=0.5)
    x, blocks = torch.randn(2, WIDTH), [lambda _, f=f: f for f in torch.randn(3, 2, WIDTH).bfloat16()]
    want = run_learned(topology, values, x, blocks)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(run_learned(topology, values, x, blocks), want)


@pytest.mark.parametrize(("option", "value"), [("streams", 1), ("streams", 2.0), ("iterations", 0), ("output", "max")])
def test_wrong_options(option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{option}={value!r}"):
        make_topology("mhc", {option: value})


def test_names() -> None:
    assert make_topology("mhc", {"streams": 2, "iterations": 5}) == MHC(2, "mean", 5)
    assert list_topologies()["mhc"]
    assert MHC.needs_width
    with pytest.raises(UnsupportedTopology, match=r"mhc.*output='sum'.*start='paper'"):
        MHC(output="sum").parameters(Dims(3, WIDTH), "preserve")


def unit_of(topology: MHC, values: dict[str, Tensor], streams: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
    """What one unit reads from given streams, and the streams after it wrote f."""
    weights = topology.weights(values, Dims(1, WIDTH))
    read, states = topology.read((streams,), weights, 1)
    return read, topology.write(states, weights, 1, f)[0]


def test_deepseek_v4() -> None:
    """The code of DeepSeek's model: the same layout, but H_res transposed and, as in the paper, with columns first."""
    topology, depth, n = MHC(3, "sum"), 3, 3
    config = SimpleNamespace(hc_mult=n, hc_sinkhorn_iters=20, hc_eps=0.0, hidden_size=WIDTH, rms_norm_eps=1e-6)
    values, blocks, x = learned(topology, depth, "paper", noise=0.3), net(depth), torch.randn(2, 5, WIDTH)
    transposed = torch.cat([torch.arange(2 * n), 2 * n + torch.arange(n * n).view(n, n).T.flatten()])
    units, streams = [DeepseekV4HyperConnection(config) for _ in range(depth)], x.unsqueeze(-2).expand(2, 5, n, WIDTH)  # type: ignore[arg-type]
    for t, (unit, block) in enumerate(zip(units, blocks, strict=True)):
        with torch.no_grad():
            unit.base.copy_(values["static"][t, transposed])
            unit.fn.copy_(values["dynamic"][t, :, transposed].T)
            unit.scale.copy_(values["scale"][t])
        post, comb, read = unit(streams.contiguous())
        streams = post.unsqueeze(-1) * block(read).unsqueeze(-2) + comb.mT @ streams
    want, got = streams.sum(-2), run_learned(topology, values, x, blocks)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)
    want.square().mean().backward()
    got.square().mean().backward()
    theirs = {
        "static": torch.stack([unit.base.grad[transposed] for unit in units]),
        "dynamic": torch.stack([unit.fn.grad[transposed].T for unit in units]),
        "scale": torch.stack([unit.scale.grad for unit in units]),
    }
    for name, grad in theirs.items():
        torch.testing.assert_close(values[name].grad, grad, rtol=1e-3, atol=1e-4 * float(grad.abs().max()))


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


def test_liger_kernels(tmp_path: Path) -> None:
    """Its Triton kernels, forward and backward, in Triton's interpreter, which has to be chosen before the import.

    The layout of weights is the same, H_res [out, in], and so is the order, rows first.
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
