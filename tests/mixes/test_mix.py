from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rewire.kernels.cpu import plain
from rewire.kernels.sums.spec import MAX_ADDED
from rewire.mixes.mix import mix


def naive(sources: list[Tensor], weights: list[Tensor], added: list[Tensor]) -> Tensor:
    """The float64 twin of `mix`."""
    total = torch.zeros(sources[0].shape, dtype=torch.float64)
    for source, weight in zip(sources, weights, strict=True):
        total = total + float(weight) * source.double()
    for branch in added:
        total = total + branch.double()
    return total


def draw(count: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    torch.manual_seed(seed)
    return [torch.randn(2, 3, 8).to(dtype) for _ in range(count)]


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 9), st.integers(0, 3), st.sampled_from([torch.float32, torch.float64]), st.integers(0, 99))
def test_matches_the_twin(count: int, branches: int, dtype: torch.dtype, seed: int) -> None:
    sources, added = draw(count, dtype, seed), draw(branches, dtype, seed + 1)
    weights = torch.randn(count)
    got = mix(sources, weights, added)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), naive(sources, list(weights), added), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got, mix(sources, list(weights.unbind()), added), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_rounds_once(dtype: torch.dtype) -> None:
    sources, added, weights = draw(12, dtype), draw(2, dtype, 1), torch.randn(12)
    got = mix(sources, weights, added)
    assert got.dtype == dtype
    exact = naive(sources, list(weights), added)
    # Half a unit in the last place; sums of rounded terms miss it.
    torch.testing.assert_close(got.double(), exact, rtol=0.51 * torch.finfo(dtype).eps, atol=1e-5)


def test_float64_is_not_accumulated_in_float32() -> None:
    sources, weights = draw(5, torch.float64), torch.randn(5)
    torch.testing.assert_close(mix(sources, weights), naive(sources, list(weights), []), rtol=1e-13, atol=1e-13)


def test_more_branches_than_a_kernel_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    combine = plain.combine

    def counted(sources: Any, weights: Any, added: Any, scores: Any) -> Tensor:
        counts.append(len(added))
        return combine(sources, weights, added, scores)

    monkeypatch.setattr(plain, "combine", counted)
    (x,), (w,), branches = draw(1, torch.float32), [torch.tensor(0.5, requires_grad=True)], draw(6, torch.float32)
    branches = [f.detach().requires_grad_() for f in branches]
    got = mix([x], [w], branches)
    torch.testing.assert_close(got, 0.5 * x + sum(branches))
    upstream = torch.randn_like(got)
    grads = torch.autograd.grad(got, [w, *branches], upstream)
    assert counts == [MAX_ADDED]
    torch.testing.assert_close(grads[0], (upstream * x).sum())
    assert all(torch.equal(grad, upstream) for grad in grads[1:])


def test_weight_one_is_a_plain_add() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        (x,), (f,) = draw(1, dtype), draw(1, dtype, 1)
        assert torch.equal(mix([x], torch.ones(1), [f]), x + f)


def test_the_dtype_is_that_of_plain_adds() -> None:
    (x,), (f,) = draw(1, torch.float32), draw(1, torch.bfloat16, 1)
    assert mix([x], torch.ones(1), [f]).dtype == (x + f).dtype == torch.float32
    assert mix([f], torch.ones(1), [x]).dtype == torch.float32
    assert mix([f, x], torch.ones(2)).dtype == torch.float32


def test_sources_and_weights_are_left_alone() -> None:
    sources, added, weights = draw(3, torch.float32), draw(1, torch.float32, 1), torch.ones(3)
    before = [x.clone() for x in (*sources, *added, weights)]
    got = mix(sources, weights, added)
    assert all(torch.equal(a, b) for a, b in zip((*sources, *added, weights), before, strict=True))
    assert got.data_ptr() not in {x.data_ptr() for x in (*sources, *added)}
    assert mix(sources[:1], torch.ones(1)).data_ptr() != sources[0].data_ptr()


def test_gradients() -> None:
    sources = [x.requires_grad_() for x in draw(3, torch.float64)]
    added = [x.requires_grad_() for x in draw(1, torch.float64, 1)]
    weights = torch.randn(3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda w, f, *xs: mix(xs, w, [f]), (weights, *added, *sources))


def test_low_precision_gradients() -> None:
    sources = [x.requires_grad_() for x in draw(4, torch.bfloat16)]
    weights = torch.randn(4, requires_grad=True)
    upstream = torch.randn(2, 3, 8).bfloat16()
    mix(sources, weights).backward(upstream)
    assert weights.grad is not None
    assert weights.grad.dtype == torch.float32
    exact = torch.stack([(upstream.double() * x.detach().double()).sum() for x in sources])
    torch.testing.assert_close(weights.grad.double(), exact, rtol=1e-5, atol=1e-5)
    for x, w in zip(sources, weights, strict=True):
        assert x.grad is not None
        assert x.grad.dtype == torch.bfloat16
        torch.testing.assert_close(x.grad, (upstream.float() * w.detach()).bfloat16(), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_keeps_no_copies_of_sources(dtype: torch.dtype) -> None:
    sources = [x.requires_grad_() for x in draw(4, dtype)]
    weights = torch.randn(4, requires_grad=True)
    saved: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        mix(sources, weights)
    own = {x.data_ptr() for x in sources}
    assert all(x.data_ptr() in own for x in saved if x.numel() >= sources[0].numel())
    assert own <= {x.data_ptr() for x in saved}  # it does see what is saved


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiles_in_one_graph(dtype: torch.dtype) -> None:
    sources, added = [x.requires_grad_() for x in draw(3, dtype)], draw(1, dtype, 1)
    weights = torch.randn(3, requires_grad=True)
    compiled = torch.compile(lambda w, f, *xs: mix(xs, w, [f]), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(weights, *added, *sources), mix(sources, weights, added))
    (want,) = torch.autograd.grad(mix(sources, weights, added).float().sum(), weights)
    (got,) = torch.autograd.grad(compiled(weights, *added, *sources).float().sum(), weights)
    torch.testing.assert_close(got, want)


def test_autocast_changes_nothing() -> None:
    sources, weights = draw(5, torch.float32), torch.randn(5)
    want = mix(sources, weights)
    with torch.autocast("cpu", torch.bfloat16):
        got = mix(sources, weights)
    assert got.dtype == torch.float32
    assert torch.equal(got, want)


@pytest.mark.parametrize(("sources", "weights"), [(2, 3), (3, 2), (0, 0)])
def test_counts_must_agree(sources: int, weights: int) -> None:
    with pytest.raises(ValueError, match=f"{sources} sources, {weights} weights"):
        mix(draw(sources, torch.float32), torch.ones(weights))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_many_numbers_are_one_product_without_gradients(dtype: torch.dtype) -> None:
    sources, numbers = draw(6, dtype), [0.1, -2.0, 1 / 3, 4.0, -5.0, 0.7]
    with torch.no_grad():
        got = mix(sources, numbers, sources[:1])
    torch.testing.assert_close(got, mix(sources, numbers, sources[:1]))
    assert got.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_weights_can_be_numbers(dtype: torch.dtype) -> None:
    """The same sums as with tensors, and nothing is kept for the backward pass."""
    sources, added, weights = draw(3, dtype), draw(1, dtype, 1), torch.tensor([0.5, -1.25, 3.0])
    kept: list[Tensor] = []
    leaves = [x.requires_grad_() for x in (*sources, *added)]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        got = mix(sources, weights.tolist(), added)
    want = mix(sources, weights, added)
    assert not kept
    torch.testing.assert_close(got, want, rtol=1e-6 if dtype != torch.bfloat16 else 0, atol=0)
    seed = torch.randn_like(got)
    for a, b in zip(torch.autograd.grad(got, leaves, seed), torch.autograd.grad(want, leaves, seed), strict=True):
        torch.testing.assert_close(a, b)
    channels = torch.randn(8)
    mixed = mix(sources[:2], (0.5, channels), added)
    torch.testing.assert_close(mixed, mix(sources[:2], (torch.tensor(0.5).expand(8), channels), added))
