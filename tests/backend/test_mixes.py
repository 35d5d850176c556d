"""Weighted sums that people write by hand, and what only looks like one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from rewire.backend.mixes import contraction, lower_mixes, weighted_sum

B, T, D = 2, 5, 8


def states(count: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    return tuple(torch.randn(B, T, D, generator=torch.Generator().manual_seed(n)).to(dtype) for n in range(count))


def weights(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(9))


def lowered(function: Callable[..., Tensor], args: tuple[Tensor, ...]) -> tuple[fx.GraphModule, Any, dict[str, str]]:
    graph = fx.symbolic_trace(function)
    FakeTensorProp(graph).propagate(*args)
    found, left = lower_mixes(graph.graph, graph)
    graph.graph.lint()
    graph.recompile()
    return graph, found, left


STREAMS = (weights(B, T, 4, D),)

#: name -> (function, arguments, sources, outputs)
MIXES: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...], int, int]] = {
    "scalars and a branch": (lambda x, y, f, w: w[0] * x + y * w[1] + f, (*states(3), weights(2)), 2, 1),
    "numbers beside a scalar": (lambda x, y, w: 0.5 * x + w * y, (*states(2), weights(1)), 2, 1),
    "python's sum": (
        lambda x, y, z, w: sum(a * b for a, b in zip((w[0], w[1], w[2]), (x, y, z), strict=True)),
        (*states(3), weights(3)), 3, 1,
    ),
    "channels": (lambda x, y, w: w[0] * x + y * w[1], (*states(2), weights(2, D)), 2, 1),
    "tokens": (lambda x, y, w: w * x + (1 - w) * y, (*states(2), weights(B, T, 1)), 2, 1),
    "einsum": (
        lambda x, y, z, w: torch.einsum("n, n b t d -> b t d", w, torch.stack([x, y, z])),
        (*states(3), weights(3)), 3, 1,
    ),
    "einsum of several": (
        lambda x, y, z, w: torch.einsum("mn,n...d->m...d", w, torch.stack((x, y, z), dim=0)),
        (*states(3), weights(2, 3)), 3, 2,
    ),
    "einsum per channel": (
        lambda x, y, w: torch.einsum("nd,...nd->...d", w, torch.stack([x, y], -2)), (*states(2), weights(2, D)), 2, 1,
    ),
    "einsum per token": (
        lambda x, y, w: torch.einsum("btn,nbtd->btd", w, torch.stack([x, y])), (*states(2), weights(B, T, 2)), 2, 1,
    ),
    "hyper-connections": (
        lambda h, w: torch.einsum("...st,...sd->...td", w, h), (*STREAMS, weights(B, T, 4, 5)), 4, 5,
    ),
    "static hyper-connections": (
        lambda h, w: torch.einsum("st,bnsd->bntd", w, h), (*STREAMS, weights(4, 5)), 4, 5,
    ),
    "streams in front": (
        lambda h, w: torch.einsum("btsm,sbtd->btmd", w, h), (weights(4, B, T, D), weights(B, T, 4, 2)), 4, 2,
    ),
    "tensordot": (
        lambda x, y, z, w: torch.tensordot(w, torch.stack([x, y, z]), dims=1), (*states(3), weights(3)), 3, 1,
    ),
    "tensordot by dimensions": (
        lambda x, y, w: torch.tensordot(torch.stack([x, y], 1), w, dims=([1], [0])), (*states(2), weights(2)), 2, 1,
    ),
    "product and sum": (
        lambda x, y, z, w: (w.view(-1, 1, 1, 1) * torch.stack([x, y, z])).sum(0), (*states(3), weights(3)), 3, 1,
    ),
    "product and sum per token": (lambda h, w: (h * w[..., None]).sum(dim=-2), (*STREAMS, weights(B, T, 4)), 4, 1),
    "product and sum per batch": (lambda h, w: (h * w).sum(dim=2), (*STREAMS, weights(B, 1, 4, 1)), 4, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXES)
def test_mixes_are_recognised(name: str) -> None:
    function, args, sources, outputs = MIXES[name]
    graph, found, left = lowered(function, args)
    assert [(mix.sources, mix.outputs) for mix in found] == [(sources, outputs)] and not left
    calls = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert any(call in (weighted_sum, contraction) for call in calls) and torch.stack not in calls
    inputs = [x.clone().requires_grad_() for x in args]
    others = [x.clone().requires_grad_() for x in args]
    expected, actual = function(*inputs), graph(*others)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    upstream = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, inputs, upstream)
    torch.testing.assert_close(torch.autograd.grad(actual, others, upstream), gradients, atol=1e-5, rtol=1e-4)


NOT_MIXES: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "attention": (
        lambda p, v: torch.einsum("bhqk,bhkd->bhqd", p, v), (weights(B, 3, 12, 12), weights(B, 3, 12, D)),
    ),
    "linear": (lambda x, w: torch.einsum("btd,ed->bte", x, w), (*states(1), weights(12, D))),
    "mixing tokens": (lambda x, w: torch.einsum("st,btd->bsd", w, x), (weights(B, 12, D), weights(12, 12))),
    "rotary": (lambda x, y, c, s: x * c + y * s, (*states(2), weights(T, D), weights(T, D))),
    "layer scale": (lambda x, f, w: x + w * f, (*states(2), weights(D))),
    "numbers": (lambda x, y: 0.5 * x + 0.5 * y, states(2)),
    "plain sum": (lambda x, y: torch.stack([x, y]).sum(0), states(2)),
    "pooling": (lambda x, w: (w * x).sum(1), (weights(B, 12, D), weights(B, 12, 1))),
    "two contracted": (lambda x, w: torch.einsum("bn,bntd->td", w, x), (weights(B, 3, T, D), weights(B, 3))),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_MIXES)
def test_other_sums_stay(name: str) -> None:
    function, args = NOT_MIXES[name]
    graph, found, left = lowered(function, args)
    assert not found and not left
    assert torch.equal(graph(*args), function(*args))


LEFT: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...], str]] = {
    "another dtype": (lambda x, y, w: w[0] * x + w[1] * y, (*states(2, torch.bfloat16), weights(2, D)), "float32"),
    "tokens and channels": (
        lambda x, y, v, w: v * x + w * y, (*states(2), weights(B, T, 1), weights(D)), "others per channel",
    ),
    "all at once": (
        lambda x, y, w: torch.einsum("nbtd,nbtd->btd", w, torch.stack([x, y])), (*states(2), weights(2, B, T, D)),
        "per token and channel",
    ),
    "transposed": (
        lambda x, y, w: torch.einsum("n,nbtd->tbd", w, torch.stack([x, y])), (*states(2), weights(2)), "another order",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_says_why(name: str) -> None:
    function, args, reason = LEFT[name]
    _, found, left = lowered(function, args)
    assert not found
    (why,) = left.values()
    assert reason in why


def test_a_sum_that_is_used_elsewhere_stays_whole() -> None:
    def function(x: Tensor, y: Tensor, z: Tensor, w: Tensor) -> Tensor:
        inner = w[0] * x + w[1] * y
        return torch.relu(inner) * (inner + w[2] * z)

    args = (*states(3), weights(3))
    graph, found, _ = lowered(function, args)
    assert [mix.sources for mix in found] == [2]
    torch.testing.assert_close(graph(*args), function(*args))


def test_shapes_must_be_known() -> None:
    graph = fx.symbolic_trace(MIXES["tensordot"][0])
    assert lower_mixes(graph.graph, graph) == ([], {})
