"""Residual streams in graphs in which the forwards of all modules are written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchvision_stub  # noqa: F401
from models import (
    WIDTH,
    Attention,
    BasicBlock,
    LoopGPT,
    Mlp,
    NanoGPT,
    Parallel,
    PreNorm,
    Residual,
    Stack,
    images,
    token_ids,
    vectors,
    wrapped,
)
from torch import Tensor, fx, nn

import rewire
from rewire.passes.find import Finding, finding_in
from rewire.passes.finding.graphs import flow_of
from rewire.patterns.tiny import tiny_model

IDS = torch.arange(3, 15)[None]


def found(model: nn.Module, *args: Any, **kwargs: Any) -> Finding:
    """What is found in the graph that Dynamo makes of a model."""
    results: list[Finding] = []

    def backend(graph: fx.GraphModule, _inputs: Any) -> Any:
        results.append(finding_in(flow_of(graph.graph, graph)))
        return graph.forward

    torch.compiler.reset()
    with torch.no_grad():
        torch.compile(model, backend=backend, fullgraph=True)(*args, **kwargs)
    torch.compiler.reset()
    return results[0]


class PostNormConv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 1)
        self.first = nn.Sequential(BasicBlock(8, 8, 1), BasicBlock(8, 8, 1))
        self.second = nn.Sequential(BasicBlock(8, 16, 2), BasicBlock(16, 16, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(self.stem(x))).mean((2, 3))


SAME: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "stack": (lambda: Stack(PreNorm), (vectors(),), {}),
    "parallel branches": (lambda: Stack(Parallel), (vectors(),), {}),
    "one wrapper for each add": (wrapped, (vectors(),), {}),
    "gpt": (NanoGPT, (token_ids(),), {}),
    "adds in the parent's loop": (LoopGPT, (token_ids(),), {}),
    "resnet": (PostNormConv, (images(),), {}),
    "bert": (lambda: tiny_model("bert"), (IDS,), {}),
    "albert": (lambda: tiny_model("albert"), (IDS,), {}),
    "swin": (lambda: tiny_model("swin"), (images(size=32),), {}),
    "t5": (lambda: tiny_model("t5"), (IDS,), {"decoder_input_ids": IDS}),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow if n in ("parallel branches", "bert", "swin", "t5") else ()) for n in SAME],
)
def test_the_trunks_are_those_of_blocks_one_by_one(name: str) -> None:
    make, args, kwargs = SAME[name]
    model = make().eval()
    expected = {trunk.name: trunk for trunk in rewire.inspect(model).trunks}
    actual = found(model, *args, **kwargs).trunks
    assert list(actual) == ["trunk" if key == "Sequential" else key for key in expected]  # the root has no name there
    for ours, trunk in zip(actual.values(), expected.values(), strict=True):
        assert ours.units == trunk.units
        for site, other in zip(ours.sites, trunk.sites, strict=True):
            assert len(site.post) == len(other.post)
            if other.width is not None:
                assert (site.width, site.channel_dim) == (other.width, other.channel_dim)
            if name not in ("bert", "albert"):  # whose helpers add
                assert (site.name, site.block, site.kind) == (other.name, other.block, other.kind)


class Inner(nn.Module):
    """A branch with residual adds of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(WIDTH), Mlp(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        x = x + self.a(x)
        return x + self.b(x)


class LongSkip(nn.Module):
    """An add around a whole trunk, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(8, WIDTH)
        self.down = nn.Sequential(PreNorm(), PreNorm())
        self.up = nn.Sequential(PreNorm(), PreNorm())

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        x = x + self.down(2 * x)
        return x + self.up(2 * x)


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp, self.pos_conv = nn.Linear(8, WIDTH), nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.layers = nn.ModuleList([PreNorm(), PreNorm()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        x = x + self.pos_conv(x.transpose(1, 2)).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        return x.mean(1)


def test_adds_inside_a_branch_belong_to_it() -> None:
    result = found(Stack(lambda: Residual(Inner())), vectors())
    assert [[site.name for site in trunk.sites] for trunk in result.trunks.values()] == [
        [f"layers.{n}.fn" for n in range(3)]
    ]
    assert result.report.skipped["layers.1.fn.a"] == "inside the branch of another residual add"


def test_an_add_around_a_trunk_is_left_alone() -> None:
    """The stream goes on with what comes out of it, as after a norm: a graph does not show which code calls what."""
    result = found(LongSkip(), vectors())
    (trunk,) = result.trunks.values()
    assert [site.block for site in trunk.sites[::2]] == ["down.0", "down.1", "up.0", "up.1"]
    assert [site.post for site in trunk.sites] == [(), (), (), ("add", "mul"), (), (), (), ()]
    assert set(result.report.skipped.values()) == {"a shortcut around a whole trunk"}


def test_position_embeddings_are_no_branches() -> None:
    result = found(Convolved(), vectors())
    assert [len(trunk.sites) for trunk in result.trunks.values()] == [4]
    assert result.report.skipped == {"pos_conv": "adds a position embedding"}


def test_a_single_add_is_left_alone() -> None:
    result = found(Stack(lambda: Residual(nn.Linear(WIDTH, WIDTH)), depth=1), vectors())
    assert not result.trunks and "a single residual add" in result.report.skipped["layers.0.fn"]


def test_a_forward_that_is_written_out() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inp, self.attn, self.mlp = nn.Linear(8, WIDTH), Attention(), Mlp()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            x = self.inp(x)
            x = x + self.attn(x)
            x = x + self.mlp(x)
            x = x + torch.tanh(x @ self.weight)
            return x.mean(1)

    (trunk,) = found(Flat(), vectors()).trunks.values()
    assert [site.branch for site in trunk.sites][:2] == ["attn", "mlp"]
    assert trunk.units == (1, 2, 3)
