from __future__ import annotations

import copy
import dataclasses
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from formulas import by_reference
from torch import Tensor, nn
from toy_nets import WIDTH, begin, net, plain, run
from x_transformers.x_transformers import AttentionResidual

from rewire.errors import UnsupportedTopology
from rewire.kernels.cpu import plain as by_torch
from rewire.mixes.attended import AttendedTable
from rewire.topologies import Recurrence, list_topologies, make_topology
from rewire.topologies.attnres import AttnRes
from rewire.topologies.base import Dims, Start, materialize
from rewire.topologies.registry import name_and_options

VARIANTS = [AttnRes(block, scaled) for block in (None, 2, 3, 9) for scaled in (False, True)]
VARIANTS += [AttnRes(form="difference"), AttnRes(additive=True), AttnRes(2, form="difference", additive=True)]
VARIANTS += [AttnRes(heads=2), AttnRes(2, scaled=True, heads=4), AttnRes(heads=8, normed=True, additive=True)]
VARIANTS += [AttnRes(normed=True), AttnRes(3, scaled=True, normed=True)]
VARIANTS += [AttnRes(rank=3), AttnRes(2, scaled=True, rank=5), AttnRes(additive=True, normed=True, rank=1)]
#: Units that begin with an attention, in the tests of separate queries.
ATTENTION = frozenset({1, 2, 5})


def weights_of(topology: AttnRes, queries: Tensor, depth: int | None = None) -> AttendedTable:
    attention = ATTENTION if topology.qkv else frozenset[int]()
    return topology.weights({"queries": queries}, Dims(depth or len(queries), WIDTH, attention))


def read_of(topology: AttnRes, sources: Sequence[Tensor], weights: AttendedTable, t: int) -> Tensor:
    """Read t of the given sources."""
    history = weights.history().after(sources[:-1])
    return materialize(topology.read((sources[-1], history), weights, t)[0])


@pytest.mark.each_once
@pytest.mark.parametrize("topology", VARIANTS)
@pytest.mark.parametrize("depth", [1, 2, 7])
def test_formulas(topology: AttnRes, depth: int) -> None:
    queries = torch.randn_like(topology.parameters(Dims(depth, WIDTH), "paper")["queries"]).requires_grad_()
    assert queries.shape == (depth - topology.additive, topology.rank or WIDTH)
    compare_with_reference(topology, queries, net(depth, torch.float64))


def compare_with_reference(topology: AttnRes, queries: Tensor, blocks: list[nn.Module]) -> None:
    attention = ATTENTION - {1} if topology.qkv else frozenset[int]()  # unit 1 reads x_0 as it is
    x = torch.randn(2, 3, WIDTH, dtype=torch.float64, requires_grad=True)
    got = run(topology, weights_of(topology, queries, len(blocks)), x, blocks)
    want = by_reference(topology, {"queries": queries}, x, blocks, Dims(len(blocks), WIDTH, attention))[0]
    torch.testing.assert_close(got, want)
    inputs, upstream = (x, queries, *nn.ModuleList(blocks).parameters()), torch.randn_like(x)
    grads = [torch.autograd.grad(out, inputs, upstream, allow_unused=True) for out in (got, want)]
    torch.testing.assert_close(*grads)


class Mixer(nn.Module):
    """A branch with four inputs, which stands for an attention."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, residual: Tensor) -> Tensor:
        return self.inner(torch.cat([q, 2 * k, 3 * v, residual.tanh()], -1))


@pytest.mark.parametrize("topology", [AttnRes(qkv=True), AttnRes(2, True, qkv=True, heads=2), AttnRes(additive=True)])
def test_formulas_of_separate_queries(topology: AttnRes) -> None:
    topology, depth = dataclasses.replace(topology, qkv=True), 6
    dims = Dims(depth, WIDTH, ATTENTION)
    queries = torch.randn_like(topology.parameters(dims, "paper")["queries"]).requires_grad_()
    assert queries.shape == (depth + 4 - topology.additive, WIDTH)  # unit 1 has no query
    blocks = net(depth, torch.float64)
    blocks = [Mixer().double() if t in ATTENTION else block for t, block in enumerate(blocks, start=1)]
    blocks[0] = net(1, torch.float64)[0]
    compare_with_reference(topology, queries, blocks)


def test_any_leading_shape() -> None:
    topology, queries, blocks = AttnRes(block=2), torch.randn(5, WIDTH), net(5)
    x = torch.randn(2, 3, 4, WIDTH)
    weights = weights_of(topology, queries)
    out = run(topology, weights, x, blocks)
    torch.testing.assert_close(run(topology, weights, x[1, 2, 3], blocks), out[1, 2, 3])


def test_large_scores_pick_one_source() -> None:
    sources, queries = torch.randn(4, 50, WIDTH), 1e4 * torch.randn(3, WIDTH)
    largest = (nn.functional.normalize(sources, dim=-1) @ queries[2]).argmax(0)  # [tokens]
    read = read_of(AttnRes(), tuple(sources), weights_of(AttnRes(), queries), 4)
    torch.testing.assert_close(read, sources[largest, torch.arange(50)])


def test_a_group_of_one_unit_is_no_group() -> None:
    x, weights, blocks = torch.randn(2, WIDTH), weights_of(AttnRes(), torch.randn(4, WIDTH)), net(4)
    assert torch.equal(run(AttnRes(), weights, x, blocks), run(AttnRes(block=1), weights, x, blocks))


@pytest.mark.parametrize("form", ["softmax", "difference"])
def test_sources_of_the_block_variant(form: Any) -> None:
    topology, x = AttnRes(block=3, form=form), torch.zeros(WIDTH)
    queries = weights_of(topology, torch.zeros(8, WIDTH))
    fs = [torch.full((WIDTH,), 10.0**t) for t in range(8)]
    want = ["0", "0 1", "0 11", "0 111", "0 111 1000", "0 111 11000", "0 111 111000", "0 111 111000 1000000"]
    states = begin(topology, x, queries)
    for t, sources in enumerate(want, start=1):
        _, opened = topology.read(states, queries, t)
        newest, history = opened
        complete = (t - 1) % 3 == 0
        assert not complete or torch.equal(history.states[-1], newest)
        held = (*history.states, *([] if complete else [newest]))
        assert " ".join(f"{source[0] / 10:.0f}" for source in held) == sources
        states = topology.write(opened, queries, t, fs[t]) if t < 8 else states


@pytest.mark.each_once
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("block", [None, 1, 2, 5])
@pytest.mark.parametrize("options", [{}, {"additive": True}, {"form": "difference"}, {"heads": 2}])
def test_preserving_start_is_the_plain_network(options: dict[str, Any], block: int | None, dtype: torch.dtype) -> None:
    topology, depth = AttnRes(block, **options).for_start("preserve"), 60
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
    torch.testing.assert_close(read_of(topology, (x, f, g), weights, 3), (x + f + g) / 3)
    with pytest.raises(UnsupportedTopology, match=r"attnres.*scaled=True.*start='paper'"):
        topology.parameters(Dims(2, WIDTH), "preserve")


def test_form_of_the_preserving_start() -> None:
    assert AttnRes(2).for_start("preserve") == AttnRes(2, scaled=True)
    assert AttnRes(additive=True).for_start("preserve") == AttnRes(additive=True, form="difference")
    assert AttnRes(form="difference").for_start("preserve") == AttnRes(form="difference")
    assert AttnRes(2, heads=4).for_start("paper") == AttnRes(2, heads=4)


def _pre_norm(width: int) -> nn.Module:
    return nn.Sequential(nn.RMSNorm(width, eps=0), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))


@pytest.mark.parametrize("additive", [False, True])
def test_first_gradients_are_those_of_the_paper_start(additive: bool) -> None:
    """Where norms begin the branches and follow the trunk; in the additive form, times 1 + 1/n."""
    blocks, x, upstream, norm = net(6, branch=_pre_norm), *torch.randn(2, 16, WIDTH), nn.RMSNorm(WIDTH, eps=0)
    grads = []
    for start in ("paper", "preserve"):
        topology = AttnRes(additive=additive).for_start(start)
        queries = topology.parameters(Dims(6, WIDTH), start)["queries"].requires_grad_()
        out = norm(run(topology, weights_of(topology, queries, 6), x, blocks))
        grads.append(torch.autograd.grad(out, queries, upstream)[0])
    paper, preserve = grads
    n = torch.arange(2, 2 + len(paper))[:, None]
    torch.testing.assert_close(preserve, paper * (1 + 1 / n) if additive else paper, rtol=1e-3, atol=1e-5)
    assert (paper.norm(dim=1) > 1e-3).all()


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
        nn.functional.mse_loss(run(topology, weights_of(topology, queries), x, blocks), target).backward()
        stepper.step()
        # The reads of units 2..4 are seen by branches only: not in the first step, if those return zero.
        moved = queries != before
        assert moved.all() if step or not zero else moved[-1].all()


def test_each_source_is_normed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Tensor] = []
    project = by_torch.project
    monkeypatch.setattr(by_torch, "project", lambda x, *given: calls.append(x) or project(x, *given))
    run(AttnRes(), weights_of(AttnRes(), torch.randn(6, WIDTH)), torch.randn(2, WIDTH), net(6))
    assert len(calls) == 7


@pytest.mark.slow
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
    got = read_of(topology, tuple(sources), weights_of(topology, queries), t)
    torch.testing.assert_close(got, want)
    *got_grads, queries_grad = torch.autograd.grad(got, (*sources, queries), upstream)
    torch.testing.assert_close(torch.stack(got_grads), sources_grad)
    torch.testing.assert_close(queries_grad[t - 2], w_grad)


def test_x_transformers() -> None:
    """Its query is not learned but the normed last source, plus a learned part; for one token that is a w."""
    theirs = AttentionResidual(WIDTH, lora_rank=2)
    for parameter in theirs.to_query.parameters():
        nn.init.zeros_(parameter)
    sources = torch.randn(4, 1, WIDTH)
    queries = torch.zeros(3, WIDTH)
    queries[2] = nn.functional.normalize(sources[-1, 0], dim=-1)  # rmsnorm / sqrt(D)
    got = read_of(AttnRes(), tuple(sources), weights_of(AttnRes(), queries), 4)
    torch.testing.assert_close(got, theirs(sources), rtol=1e-5, atol=1e-5)


def test_matrix() -> None:
    third = 1 / 3
    want = torch.tensor([[1, 0, 0, 0], [0.5, 0.5, 0, 0], [0.5, 0.5, 0.5, 0], [third, third, third, third]])
    weights, dims = weights_of(AttnRes(), torch.zeros(3, WIDTH)), Dims(3, WIDTH)
    torch.testing.assert_close(AttnRes(block=2).matrix(weights, dims), want)
    plain = torch.ones(4, 4).tril()
    assert torch.equal(AttnRes(2, scaled=True).matrix(weights, dims), plain)
    assert torch.equal(AttnRes(form="difference").matrix(weights, dims), plain)
    want[0], want[3] = 0, 0  # unit 1 and the output are the plain stream
    torch.testing.assert_close(AttnRes(2, additive=True).matrix(weights, dims), plain + want)


def test_scores_are_float32_under_autocast() -> None:
    queries, sources = torch.randn(3, WIDTH), tuple(torch.randn(4, 2, WIDTH))
    want = read_of(AttnRes(), sources, weights_of(AttnRes(), queries), 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(read_of(AttnRes(), sources, weights_of(AttnRes(), queries), 4), want)
        assert run(AttnRes(), weights_of(AttnRes(), queries), sources[0], net(3)).dtype == torch.float32


def test_parallel_branches_are_one_increment() -> None:
    x, f, g = torch.randn(3, 2, WIDTH)
    weights = weights_of(AttnRes(), torch.zeros(2, WIDTH))
    states = AttnRes().write(AttnRes().start(x, weights), weights, 1, f, g)
    torch.testing.assert_close(read_of(AttnRes(), (x, states[0]), weights, 2), (x + f + g) / 2)


@pytest.mark.slow
@pytest.mark.parametrize("topology", [AttnRes(), AttnRes(2, scaled=True), AttnRes(heads=2, normed=True)])
def test_compiles_in_one_graph(topology: AttnRes) -> None:
    blocks, x, queries = net(4), torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    weights = weights_of(topology, queries, len(blocks))
    compiled = torch.compile(lambda w, x: run(topology, w, x, blocks), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(weights, x), run(topology, weights, x, blocks))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"block": block}, f"block={block}.*whole number") for block in (0, -2, 1.5)),
        *(({"heads": heads}, f"heads={heads}.*whole number") for heads in (0, 1.5)),
        ({"form": "sum"}, "form='sum'.*'softmax', 'difference'"),
        ({"scaled": True, "additive": True}, "scaled=True.*additive"),
        ({"scaled": True, "form": "difference"}, "scaled=True.*difference"),
        ({"rank": 4, "heads": 2}, "rank=.*heads="),
        ({"separate_norms": True}, "separate_norms=True.*qkv=True"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_topology("attnres", options)


@pytest.mark.parametrize(
    ("topology", "start", "message"),
    [
        (AttnRes(heads=3), "paper", "heads=3.*8 channels"),
        (AttnRes(qkv=True), "paper", "attnres.*2 units.*leave out qkv=True"),
        (AttnRes(normed=True), "preserve", "attnres.*other sources.*start='paper'"),
    ],
)
def test_what_does_not_fit(topology: AttnRes, start: Start, message: str) -> None:
    with pytest.raises(UnsupportedTopology, match=message):
        topology.for_start(start).parameters(Dims(2, WIDTH), start)


def test_name() -> None:
    assert make_topology("attnres", {"block": 4, "scaled": True}) == AttnRes(4, True)
    assert list_topologies()["attnres"]
    options = {
        **{"block": None, "scaled": False, "form": "softmax"},
        **{"additive": False, "qkv": False, "heads": 1, "normed": False, "separate_norms": False},
        **{"channels": None, "rank": None, "units": None, "sources": None},
    }
    assert name_and_options(AttnRes()) == ("attnres", options)
    assert AttnRes.needs_width and not issubclass(AttnRes, Recurrence)
    assert AttnRes(qkv=True).reads_qkv and not AttnRes().reads_qkv
