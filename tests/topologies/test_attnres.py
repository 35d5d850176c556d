from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from toy_nets import WIDTH, begin, net, plain, run
from transformers.models.inkling2.configuration_inkling2 import Inkling2TextConfig
from transformers.models.inkling2.modeling_inkling2 import Inkling2BlockAttentionResidual
from x_transformers.x_transformers import AttentionResidual

from rewire.errors import UnsupportedTopology
from rewire.topologies import Recurrence, attnres, list_topologies, make_topology
from rewire.topologies.attnres import AttnRes
from rewire.topologies.base import Dims, materialize

VARIANTS = [AttnRes(block, scaled) for block in (None, 2, 3, 9) for scaled in (False, True)]


def naive(topology: AttnRes, x: Tensor, blocks: list[nn.Module], queries: Tensor) -> Tensor:
    """The formulas as written: r_1, f_1, r_2, .. and the output as r_{T+1}."""
    group, fs = topology.block or 1, [x]
    for t in range(1, len(blocks) + 2):
        sources = [x]
        for first in range(1, t, group):
            sources.append(torch.stack(fs[first : min(first + group, t)]).sum(0))
        w = queries[t - 2].double() if t > 1 else torch.zeros(WIDTH).double()
        keys = [source / (source.square().mean(-1, keepdim=True) + 1e-6).sqrt() for source in sources]
        e = [torch.einsum("d,...d->...", w, key).exp() for key in keys]
        r = torch.zeros_like(x)
        for source, part in zip(sources, e, strict=True):
            share = part / torch.stack(e).sum(0) * (len(sources) if topology.scaled else 1)
            r = r + share.unsqueeze(-1) * source
        if t > len(blocks):
            return r
        fs.append(blocks[t - 1](r))
    raise AssertionError


@pytest.mark.parametrize("topology", VARIANTS)
@pytest.mark.parametrize("depth", [1, 2, 7])
def test_formulas(topology: AttnRes, depth: int) -> None:
    queries = torch.randn_like(topology.parameters(Dims(depth, WIDTH), "paper")["queries"]).requires_grad_()
    assert queries.shape == (depth, WIDTH)
    blocks = net(depth, torch.float64)
    x = torch.randn(2, 3, WIDTH, dtype=torch.float64, requires_grad=True)
    got = run(topology, topology.weights({"queries": queries}, Dims(depth, WIDTH)), x, blocks)
    want = naive(topology, x, blocks, queries)
    torch.testing.assert_close(got, want)
    inputs, upstream = (x, queries, *nn.ModuleList(blocks).parameters()), torch.randn_like(x)
    torch.testing.assert_close(*[torch.autograd.grad(out, inputs, upstream) for out in (got, want)])


def test_any_leading_shape() -> None:
    topology, queries, blocks = AttnRes(block=2), torch.randn(5, WIDTH), net(5)
    x = torch.randn(2, 3, 4, WIDTH)
    out = run(topology, queries, x, blocks)
    torch.testing.assert_close(run(topology, queries, x[1, 2, 3], blocks), out[1, 2, 3])


def test_large_scores_pick_one_source() -> None:
    sources, queries = torch.randn(4, 50, WIDTH), 1e4 * torch.randn(3, WIDTH)
    largest = (nn.functional.normalize(sources, dim=-1) @ queries[2]).argmax(0)  # [tokens]
    torch.testing.assert_close(
        materialize(AttnRes().read(tuple(sources), queries, 4)[0]), sources[largest, torch.arange(50)]
    )


def test_a_group_of_one_unit_is_no_group() -> None:
    x, queries, blocks = torch.randn(2, WIDTH), torch.randn(4, WIDTH), net(4)
    assert torch.equal(run(AttnRes(), queries, x, blocks), run(AttnRes(block=1), queries, x, blocks))


def test_sources_of_the_block_variant() -> None:
    topology, x, queries = AttnRes(block=3), torch.zeros(WIDTH), torch.zeros(8, WIDTH)
    fs = [torch.full((WIDTH,), 10.0**t) for t in range(8)]
    want = ["0", "0 1", "0 11", "0 111", "0 111 1000", "0 111 11000", "0 111 111000", "0 111 111000 1000000"]
    states = begin(topology, x, queries)
    for t, sources in enumerate(want, start=1):
        _, opened = topology.read(states, queries, t)
        numbers = [f"{source[0] / 10:.0f}" for source in opened[: len(sources.split())]]
        assert " ".join(numbers) == sources
        assert len(opened) == (2 if t > 1 else 1) * len(numbers)
        assert t == 1 or opened[-1].shape[-1] == 8 + 2 - t  # scores of the newest source: of the reads left
        states = topology.write(opened, queries, t, fs[t]) if t < 8 else states


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("block", [None, 1, 2, 5])
def test_preserving_start_is_the_plain_network(block: int | None, dtype: torch.dtype) -> None:
    topology, depth = AttnRes(block, scaled=True), 60
    blocks, x = net(depth, dtype), torch.randn(4, WIDTH).to(dtype)
    weights = topology.weights(topology.parameters(Dims(depth, WIDTH), "preserve"), Dims(depth, WIDTH))
    out, want = run(topology, weights, x, blocks), plain(x, blocks)
    assert out.dtype == dtype
    if block in (None, 1):
        assert torch.equal(out, want)
    else:
        rtol = 1e-4 if dtype == torch.float32 else 1e-12
        torch.testing.assert_close(out, want, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("block", [None, 2])
def test_bf16_states(block: int | None) -> None:
    topology, blocks, x = AttnRes(block, scaled=True), net(8, torch.bfloat16), torch.randn(16, WIDTH).bfloat16()
    weights = topology.weights(topology.parameters(Dims(8, WIDTH), "preserve"), Dims(8, WIDTH))
    out, original = run(topology, weights, x, blocks), plain(x, blocks).double()
    exact = plain(x.double(), [copy.deepcopy(block).double() for block in blocks])
    assert out.dtype == torch.bfloat16
    assert (out.double() - exact).norm() <= 1.2 * (original - exact).norm()


def test_paper_start_averages() -> None:
    topology, x, f, g = AttnRes(), *torch.randn(3, 2, WIDTH)
    weights = topology.weights(topology.parameters(Dims(2, WIDTH), "paper"), Dims(2, WIDTH))
    torch.testing.assert_close(materialize(topology.read((x, f, g), weights, 3)[0]), (x + f + g) / 3)
    with pytest.raises(UnsupportedTopology, match=r"attnres.*scaled=True.*start='paper'"):
        topology.parameters(Dims(2, WIDTH), "preserve")


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("topology", [AttnRes(), AttnRes(scaled=True), AttnRes(2, scaled=True)])
def test_every_query_learns_at_once(topology: AttnRes, zero: bool, optimizer: type) -> None:
    blocks, queries = net(4, zero=zero), nn.Parameter(topology.parameters(Dims(4, WIDTH), "paper")["queries"])
    stepper = optimizer([queries, *nn.ModuleList(blocks).parameters()], lr=0.1, weight_decay=0)
    x, target = torch.randn(2, 16, WIDTH)
    for step in range(2):
        before = queries.detach().clone()
        stepper.zero_grad()
        nn.functional.mse_loss(run(topology, queries, x, blocks), target).backward()
        stepper.step()
        # The reads of units 2..4 are seen by branches only: not in the first step, if those return zero.
        moved = queries != before
        assert moved.all() if step or not zero else moved[-1].all()


def test_each_source_is_normed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Tensor] = []
    norm = attnres.rms_norm
    monkeypatch.setattr(attnres, "rms_norm", lambda x: calls.append(x) or norm(x))
    run(AttnRes(), torch.randn(6, WIDTH), torch.randn(2, WIDTH), net(6))
    assert len(calls) == 7


def test_liger_kernel(tmp_path: Path) -> None:
    """Its Triton kernels, forward and backward, in Triton's interpreter, which has to be chosen before the import."""
    topology, t, depth = AttnRes(), 5, 6
    sources = [torch.randn(2, 3, WIDTH, requires_grad=True) for _ in range(t)]
    queries, upstream = torch.randn(depth, WIDTH, requires_grad=True), torch.randn(2, 3, WIDTH)
    torch.save((torch.stack(sources).detach(), queries.detach()[t - 2], upstream), tmp_path / "inputs.pt")
    code = """if True:
        import sys, torch
        from liger_kernel.ops.attn_res import LigerAttnResFunction
        v, w, upstream = torch.load(sys.argv[1] + "/inputs.pt")
        v, w, ones = v.requires_grad_(), w.requires_grad_(), torch.ones(w.shape)
        out = LigerAttnResFunction.apply(v, w, ones, 1e-6)
        torch.save((out.detach(), *torch.autograd.grad(out, (v, w), upstream)), sys.argv[1] + "/outputs.pt")
    """
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environment, check=True)
    want, sources_grad, w_grad = torch.load(tmp_path / "outputs.pt")
    got = materialize(topology.read(tuple(sources), queries, t)[0])
    torch.testing.assert_close(got, want)
    *got_grads, queries_grad = torch.autograd.grad(got, (*sources, queries), upstream)
    torch.testing.assert_close(torch.stack(got_grads), sources_grad)
    torch.testing.assert_close(queries_grad[t - 2], w_grad)


def test_inkling2() -> None:
    """It divides scores by sqrt(D), and sums the normed sources where the paper sums the sources: take normed ones."""
    theirs = Inkling2BlockAttentionResidual(Inkling2TextConfig(hidden_size=WIDTH))
    sources = nn.functional.normalize(torch.randn(4, 2, 3, WIDTH), dim=-1) * WIDTH**0.5
    queries, upstream = torch.randn(3, WIDTH, requires_grad=True), torch.randn(2, 3, WIDTH)
    with torch.no_grad():
        theirs.query.copy_(queries[2] * WIDTH**0.5)
    (want,) = theirs(sources[:3].movedim(0, -2), sources[3])
    got = materialize(AttnRes().read(tuple(sources), queries, 4)[0])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    (want_grad,) = torch.autograd.grad(want, theirs.query, upstream)
    (got_grad,) = torch.autograd.grad(got, queries, upstream)
    torch.testing.assert_close(got_grad[2], want_grad * WIDTH**0.5, rtol=1e-5, atol=1e-5)


def test_x_transformers() -> None:
    """Its query is not learned but the normed last source, plus a learned part; for one token that is a w."""
    theirs = AttentionResidual(WIDTH, lora_rank=2)
    for parameter in theirs.to_query.parameters():
        nn.init.zeros_(parameter)
    sources = torch.randn(4, 1, WIDTH)
    queries = torch.zeros(3, WIDTH)
    queries[2] = nn.functional.normalize(sources[-1, 0], dim=-1)  # rmsnorm / sqrt(D)
    got = materialize(AttnRes().read(tuple(sources), queries, 4)[0])
    torch.testing.assert_close(got, theirs(sources), rtol=1e-5, atol=1e-5)


def test_matrix() -> None:
    third = 1 / 3
    want = torch.tensor([[1, 0, 0, 0], [0.5, 0.5, 0, 0], [0.5, 0.5, 0.5, 0], [third, third, third, third]])
    torch.testing.assert_close(AttnRes(block=2).matrix(torch.zeros(3, WIDTH), Dims(3, WIDTH)), want)
    assert torch.equal(AttnRes(2, scaled=True).matrix(torch.zeros(3, WIDTH), Dims(3, WIDTH)), torch.ones(4, 4).tril())


def test_scores_are_float32_under_autocast() -> None:
    queries, sources = torch.randn(3, WIDTH), tuple(torch.randn(4, 2, WIDTH))
    want = materialize(AttnRes().read(sources, queries, 4)[0])
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(materialize(AttnRes().read(sources, queries, 4)[0]), want)
        assert run(AttnRes(), queries, sources[0], net(3)).dtype == torch.float32


def test_parallel_branches_are_one_increment() -> None:
    x, f, g = torch.randn(3, 2, WIDTH)
    states = AttnRes().write((x,), torch.zeros(2, WIDTH), 1, f, g)
    torch.testing.assert_close(states, (x, f + g))


@pytest.mark.parametrize("topology", [AttnRes(), AttnRes(2, scaled=True)])
def test_compiles_in_one_graph(topology: AttnRes) -> None:
    blocks, x, queries = net(4), torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    compiled = torch.compile(lambda w, x: run(topology, w, x, blocks), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(queries, x), run(topology, queries, x, blocks))


@pytest.mark.parametrize("block", [0, -2, 1.5])
def test_wrong_options(block: float) -> None:
    with pytest.raises(ValueError, match=f"block={block}.*whole number"):
        make_topology("attnres", {"block": block})


def test_name() -> None:
    assert make_topology("attnres", {"block": 4, "scaled": True}) == AttnRes(4, True)
    assert list_topologies()["attnres"]
    assert AttnRes().options() == {"block": None, "scaled": False}
    assert AttnRes.needs_width and not issubclass(AttnRes, Recurrence)
