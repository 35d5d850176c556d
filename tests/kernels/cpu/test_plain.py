from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from rewire.kernels.cpu import native, plain

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SHAPE = (5, 3, 8)


@pytest.fixture(params=[1, 1 << 18], ids=["blocks of one row", "one block"], autouse=True)
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "PER_THREAD", request.param)


@pytest.fixture(params=["compiled", "torch"], autouse=True)
def lowering(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the compiled sums know the tensors, and everywhere else."""
    if request.param == "torch":
        monkeypatch.setattr(native, "sums", lambda *_, **__: None)


def draw(count: int, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = SHAPE) -> list[Tensor]:
    return [torch.randn(shape).to(dtype) for _ in range(count)]


def close(got: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """Rounded once: half a unit in the last place of ``dtype``, and what float32 sums lose."""
    assert got.dtype == dtype and got.shape == exact.shape
    slack = 1e-13 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(got.double(), exact, rtol=max(slack, 0.51 * torch.finfo(dtype).eps), atol=slack)


def exact_sum(xs: list[Tensor], factors: list[Tensor], added: list[Tensor]) -> Tensor:
    return sum(x.double() * w.double() for x, w in zip(xs, factors, strict=True)) + sum(f.double() for f in added)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["scalar", "channel", "scores", "scalar and scores", "channel and scores"])
def test_combine(kind: str, dtype: torch.dtype) -> None:
    for n, branches in itertools.product((1, 4), (0, 1, 3)):
        xs, fs = draw(n, dtype), draw(branches, dtype)
        weights = None if kind == "scores" else torch.randn(n, *[8] * kind.startswith("channel"))
        scores = draw(n, shape=(5, 3, 1)) if "scores" in kind else []
        before = [t.clone() for t in (*xs, *fs, *scores)]
        factors = [
            (0 if weights is None else weights[k]) + (scores[k].double() if scores else torch.zeros(1))
            for k in range(n)
        ]
        close(plain.combine(xs, weights, fs, scores), exact_sum(xs, factors, fs), dtype)
        assert all(map(torch.equal, (*xs, *fs, *scores), before))


def test_weight_one_is_a_plain_add() -> None:
    for dtype in DTYPES:
        (x,), (f, g) = draw(1, dtype), draw(2, dtype)
        assert torch.equal(plain.combine([x], torch.ones(1), [f]), f + x)
        assert torch.equal(plain.combine([], None, [f, g]), f + g)
        copy = plain.combine([], None, [f])
        assert torch.equal(copy, f) and copy.data_ptr() != f.data_ptr()


def test_the_dtype_is_that_of_plain_adds() -> None:
    (x,), (f,) = draw(1, torch.bfloat16), draw(1)
    for got in (plain.combine([x], torch.ones(1), [f]), plain.combine([f, x], torch.ones(2))):
        assert got.dtype == torch.float32 and torch.equal(got, x + f)


def test_any_strides() -> None:
    wide = torch.randn(5, 3, 16)
    xs = [wide[..., ::2], torch.randn(5, 8, 3).mT, torch.randn(3, 8).expand(SHAPE), torch.randn(SHAPE)]
    weights = torch.randn(4, 8)
    close(plain.combine(xs, weights), exact_sum(xs, list(weights), []), torch.float32)
    (dx,), dots = plain.combine_with_dots(xs[1:], xs[:1], weights[None, 1:])
    close(dx, exact_sum(xs[1:], list(weights[1:]), []), torch.float32)
    close(dots[0], torch.stack([(g.double() * xs[0]).sum((0, 1)) for g in xs[1:]]), torch.float32)


def test_shapes_broadcast() -> None:
    xs, scores = draw(2, shape=(5, 3, 1, 8)), draw(2, shape=(5, 3, 4, 1))
    close(plain.combine(xs, None, scores=scores), exact_sum(xs, scores, []), torch.float32)


@pytest.mark.parametrize("shape", [(8,), (0, 8), (5, 0), (7, 1)])
def test_odd_shapes(shape: tuple[int, ...]) -> None:
    xs, weights = draw(2, shape=shape), torch.randn(2)
    close(plain.combine(xs, weights), exact_sum(xs, list(weights), []), torch.float32)
    (dx,), dots = plain.combine_with_dots(xs, xs[:1], weights[None])
    assert dx.shape == shape
    close(dots, torch.stack([(xs[0].double() * g).sum() for g in xs])[None], torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channel", [False, True])
def test_combine_with_dots(channel: bool, dtype: torch.dtype) -> None:
    for n, states, branches in ((1, 3, 0), (4, 1, 2), (2, 3, 0), (1, 1, 1)):
        gs, xs, added = draw(n, dtype), draw(states, dtype), draw(branches, dtype)
        weights = torch.randn(states, n, *[8] * channel)
        before = [t.clone() for t in (*gs, *xs, *added)]
        grads, dots = plain.combine_with_dots(gs, xs, weights, added)
        for grad, row in zip(grads, weights, strict=True):
            close(grad, exact_sum(gs, list(row), added), dtype)
        products = [[(x.double() * g.double()).sum((0, 1) if channel else None) for g in gs] for x in xs]
        want = torch.stack([torch.stack(row) for row in products])
        close(dots, want, torch.promote_types(dtype, torch.float32))
        assert all(map(torch.equal, (*gs, *xs, *added), before))


def test_dots_of_many_elements() -> None:
    x, g = torch.rand(2, 1 << 20).unsqueeze(1)
    plain.PER_THREAD = max(plain.PER_THREAD, 1 << 12)
    _, dots = plain.combine_with_dots([g], [x], torch.ones(1, 1))
    torch.testing.assert_close(dots[0, 0].double(), (x.double() * g.double()).sum(), rtol=1e-5, atol=0)


def test_no_gradients() -> None:
    xs = [x.requires_grad_() for x in draw(2)]
    weights = torch.randn(2, requires_grad=True)
    assert not plain.combine(xs, weights).requires_grad
    assert not plain.combine_with_dots(xs, xs[:1], weights[None])[1].requires_grad


def test_no_copy_of_a_source() -> None:
    """Low precision is converted a block at a time, and float32 not at all."""
    for dtype, limit in ((torch.float32, 1), (torch.bfloat16, 2)):
        xs = draw(3, dtype, (64, 1 << 12))
        plain.PER_THREAD = 1 << 13
        with torch.profiler.profile(profile_memory=True) as profile:
            plain.combine(xs, torch.ones(3))
        allocated = [e.cpu_memory_usage for e in profile.events() if e.name in ("aten::empty_like", "aten::_to_copy")]
        size = xs[0].numel() * xs[0].element_size()
        assert sum(b >= size for b in allocated) == 1 and max(allocated) <= limit * size


@pytest.mark.parametrize("eps", [None, 1e-6])
def test_projections_of_other_devices(eps: float | None) -> None:
    """Without kernels those of a GPU come here; `meta` is as strict about tensors of several devices."""
    x, weight = torch.empty(2, 3, 4, device="meta"), torch.empty(4, 5, device="meta")
    found, _ = plain.project(x, weight, eps)
    assert found.is_meta and found.shape == (2, 3, 5)
