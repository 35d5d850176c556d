"""Layouts of fused projections: how a forward takes the output apart says where queries, keys and values are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange
from models import Mlp, vectors
from reading_apart import Reader, check_reads, projections_of
from slow_cases import one_in
from torch import Tensor, nn

import rewire
from rewire.backend.flat_attention import find_attention
from rewire.mixes.fused_qkv import Fused
from rewire.passes.find import finding_in
from rewire.passes.finding.fused import as_fused
from rewire.passes.finding.graphs import flow_of

WIDTH = 24

#: Takes [batch, tokens, 3 * WIDTH] apart into q, k and v, each [batch, heads, tokens, size].
Apart = Callable[[Tensor, int], Any]


def split_heads(parts: Any, heads: int) -> list[Tensor]:
    return [part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in parts]


def turned(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * 0.8 + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * 0.6


def turned_in_parts(z: Tensor, heads: int) -> Any:
    """Queries and keys are cut, turned and put together, as in rotary embeddings of videos."""
    q, k, v = z.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    q, k = (torch.cat([turned(x[..., :2]), turned(x[..., 2:4]), x[..., 4:]], dim=-1) for x in (q, k))
    return q, k, v


def turned_in_place(z: Tensor, heads: int) -> Any:
    q, k, v = z.view(*z.shape[:2], 3, heads, -1).permute(2, 0, 3, 1, 4)
    q, k = q.clone(), k.clone()
    for x in (q, k):
        x[..., :2] = turned(x[..., :2])
    return q, k, v


#: One after the other: [q | k | v].
BESIDE: dict[str, Apart] = {
    "view": lambda z, h: z.view(*z.shape[:2], 3, h, -1).permute(2, 0, 3, 1, 4),
    "view of rows": lambda z, h: z.view(-1, 3 * WIDTH).view(*z.shape[:2], 3, h, -1).permute(2, 0, 3, 1, 4).unbind(0),
    "unflatten": lambda z, h: z.unflatten(-1, (3, h, -1)).permute(2, 0, 3, 1, 4),
    "torch.unflatten": lambda z, h: torch.unflatten(z, 2, (3, h, WIDTH // h)).permute(2, 0, 3, 1, 4),
    "channels first": lambda z, h: z.mT.reshape(len(z), 3, h, WIDTH // h, -1).mT.unbind(1),
    "chunk": lambda z, h: split_heads(torch.chunk(z, 3, dim=-1), h),
    "tensor_split": lambda z, h: split_heads(z.tensor_split(3, dim=-1), h),
    "split": lambda z, h: split_heads(z.split([WIDTH, WIDTH, WIDTH], -1), h),
    "slices": lambda z, h: split_heads((z[..., :WIDTH], z[..., WIDTH : 2 * WIDTH], z[..., 2 * WIDTH :]), h),
    "narrow": lambda z, h: split_heads([z.narrow(-1, n * WIDTH, WIDTH) for n in range(3)], h),
    "einops": lambda z, h: rearrange(z, "b n (three h d) -> three b h n d", three=3, h=h),
    "turned in parts": turned_in_parts,
    "turned in place": turned_in_place,
}
#: Each head has its own three.
BY_HEAD: dict[str, Apart] = {
    "view": lambda z, h: z.view(*z.shape[:2], h, 3, -1).permute(3, 0, 2, 1, 4),
    "chunk": lambda z, h: z.view(*z.shape[:2], h, -1).transpose(1, 2).chunk(3, dim=-1),
}
#: Every third feature.
THIRDS: dict[str, Apart] = {
    "view": lambda z, h: z.view(*z.shape[:2], h, -1, 3).permute(4, 0, 2, 1, 3),
    "slices": lambda z, h: split_heads((z[..., ::3], z[..., 1::3], z[..., 2::3]), h),
    "einops": lambda z, h: rearrange(z, "b n (h d three) -> three b h n d", three=3, h=h),
}
CASES = [
    pytest.param(apart, heads, layout(heads), id=f"{kind}, {how}, {heads}")
    for kind, ways, layout in (
        ("beside", BESIDE, lambda h: Fused(1, (WIDTH,) * 3)),
        ("by head", BY_HEAD, lambda h: Fused(h, (WIDTH // h,) * 3)),
        ("thirds", THIRDS, lambda h: Fused(WIDTH, (1, 1, 1))),
    )
    for how, apart in ways.items()
    for heads in (2, 3)  # a view of three heads has two threes
]


class Attention(nn.Module):
    def __init__(self, apart: Apart, heads: int, rows: int = 3 * WIDTH) -> None:
        super().__init__()
        self.apart, self.heads = apart, heads
        self.qkv, self.out = nn.Linear(WIDTH, rows), nn.Linear(WIDTH, WIDTH)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.apart(self.qkv(x), self.heads)
        return self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))


class Linear(Attention):
    """No softmax: an attention that is not known as one."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.elu(q).add(1) @ (F.elu(k).add(1).mT @ v)


class Block(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2, self.mlp = nn.LayerNorm(WIDTH), attention, nn.LayerNorm(WIDTH), Mlp(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


def net(attention: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(*[Block(attention()) for _ in range(2)])


def layout_in(model: nn.Module, *patterns: rewire.Pattern) -> Fused | None:
    return projections_of(model, (vectors(width=WIDTH),), *patterns).fused


@pytest.mark.parametrize(("apart", "heads", "expected"), CASES)
def test_layouts(apart: Apart, heads: int, expected: Fused) -> None:
    assert layout_in(net(lambda: Attention(apart, heads))) == expected


@pytest.mark.parametrize(
    ("apart", "heads", "expected"),
    one_in(5, CASES),  # with two heads and three
)
def test_layouts_in_flat_graphs(apart: Apart, heads: int, expected: Fused) -> None:
    found = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        flow = flow_of(graph.graph, graph)
        ((name, chain),) = finding_in(flow).chains.items()
        found.append(find_attention(flow, chain.adds[0], finding_in(flow).trunks[name].sites[0]).fused)
        return graph.forward

    torch.compile(net(lambda: Attention(apart, heads)), backend=backend, fullgraph=True)(vectors(width=WIDTH))
    assert found == [expected]


@pytest.mark.parametrize("apart", [BESIDE["view"], BESIDE["turned in parts"], BY_HEAD["chunk"], THIRDS["view"]])
def test_each_reads_its_own(apart: Apart) -> None:
    check_reads(Reader(net(lambda: Attention(apart, 3)), (vectors(width=WIDTH),)))


def test_keys_and_values_of_one_head() -> None:
    def apart(z: Tensor, heads: int) -> Any:
        q, kv = z.split([WIDTH, 16], dim=-1)
        k, v = kv.chunk(2, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, 8)).transpose(1, 2) for part in (q, k, v))
        return q, k.expand_as(q), v.expand_as(q)

    model = net(lambda: Attention(apart, 3, WIDTH + 16))
    assert layout_in(model) == Fused(1, (WIDTH, 8, 8))
    check_reads(Reader(model, (vectors(width=WIDTH),)))


@pytest.mark.parametrize("how", ["view", "chunk", "slices"])
def test_an_attention_that_is_not_known(how: str) -> None:
    assert layout_in(net(lambda: Linear(BESIDE[how], 3))) == Fused(1, (WIDTH,) * 3)


def test_what_a_run_shows_counts_more_than_a_pattern() -> None:
    said = rewire.Pattern("wrong", qkv=("{branch}.qkv",), fused=lambda *_: Fused(3, (8, 8, 8)))
    assert layout_in(net(lambda: Attention(BESIDE["view"], 3)), said) == Fused(1, (WIDTH,) * 3)


@pytest.mark.parametrize(
    ("features", "fused"),
    [
        ("qqkv", Fused(1, (2, 1, 1))),
        ("qkvqkv", Fused(2, (1, 1, 1))),
        ("kkv", Fused(1, (0, 2, 1))),
        ("qvqv", Fused(2, (1, 0, 1))),
        *[(features, None) for features in ("", "qq", "kq", "kqv", "qkvq", "qkvqqkv", "qkvqvk")],
    ],
)
def test_features(features: str, fused: Fused | None) -> None:
    assert as_fused(features) == fused
