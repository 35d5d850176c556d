from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreter import INTERPRETED, interpret, starts_interpreter
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from twins import F32, F64, TOLERANCES, compare, distance, drawn, leaves_of, penalty_gradients, precise_copy

from rewire.kernels.cpu import native
from rewire.kernels.sums.spec import MAX_OUTPUTS
from rewire.mixes.gating import read_off_gates
from rewire.mixes.norms import mark
from rewire.mixes.streams import PendingRead, combine, read_off_streams, read_streams, write_and_project, write_and_read
from rewire.mixes.tokens import rms_norm
from rewire.topologies.base import materialize

M, N, WIDTH = 3, 4, 9
ONE = torch.ones(1)


def twin_of_combine(streams: Tensor, weights: Tensor, branches: Sequence[Tensor]) -> Tensor:
    n = streams.shape[-2]
    total = torch.einsum("...nk,...nc->...kc", weights[..., :n, :], streams)
    return total + sum(weights[..., n, :, None] * f for f in branches)


def twin_of_read(streams: Tensor, weights: Tensor) -> Tensor:
    return twin_of_combine(streams, weights, ())


def step(
    streams: Tensor, carry: Tensor, write: Tensor, weights: Tensor, branches: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    rows = torch.cat([carry.mT, write.unsqueeze(-1)], -1)
    table = torch.cat([rows, (weights * rows).sum(0, keepdim=True)])
    return write_and_read(streams, table, weights, branches)


def twin_of_step(
    streams: Tensor, carry: Tensor, write: Tensor, weights: Tensor, branches: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    table = torch.cat([carry, write.unsqueeze(-2)], -2)
    written = twin_of_combine(streams, table, [f.unsqueeze(-2) for f in branches])
    return written, twin_of_read(written, weights).squeeze(-2)


def projected(streams: Tensor, weight: Tensor) -> Tensor:
    """A read with weights made of the streams, and the streams that are handed on."""
    products, streams, claim = read_off_streams(streams, weight, 1e-2)
    result, streams = read_streams(streams, torch.tanh(_first(products, streams)), claim)
    return torch.cat([materialize(result).unsqueeze(-2), streams], -2)


def twin_of_projected(streams: Tensor, weight: Tensor) -> Tensor:
    x = streams if len(weight) == streams.shape[-1] else streams.flatten(-2)
    products = rms_norm(x, 1e-2) @ weight
    return torch.cat([twin_of_read(streams, torch.tanh(_first(products, streams))), streams], -2)


def _first(products: Tensor, streams: Tensor) -> Tensor:
    """[..., n, 1], of what was found for each stream, or for all of a token."""
    return products[..., :1] if products.dim() == streams.dim() else products[..., : streams.shape[-2], None]


def written(streams: Tensor, table: Tensor, branches: Sequence[Tensor], weight: Tensor) -> Tensor:
    """New streams, and a read of them with weights made of themselves."""
    streams, *known = write_and_project(streams, table, branches, weight, 1e-2)
    read_with, _, streams, claim = read_off_gates(None, gates_of_first, streams, weight, ONE, ONE, 1e-2, *known)
    result, streams = read_streams(streams, read_with, claim)
    return torch.cat([materialize(result).unsqueeze(-2), streams], -2)


def gates_of_first(products: Tensor, static: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    apart = products.dim() == 4
    first = torch.tanh(products[..., :1] if apart else products[..., : products.shape[-1] - 2, None])
    return first, first


def twin_of_written(streams: Tensor, table: Tensor, branches: Sequence[Tensor], weight: Tensor) -> Tensor:
    return twin_of_projected(twin_of_combine(streams, table, branches), weight)


def arguments_of_written(
    dtype: torch.dtype, apart: bool, n: int = N, width: int = WIDTH, branches: int = 1
) -> tuple[Any, ...]:
    streams, weight = arguments_of_projected(dtype, apart, n, width)
    of_each = [drawn(2, 3, 1, width, dtype=dtype) for _ in range(branches)]
    return streams, drawn(2, 3, n + 1, n, dtype=weight.dtype), of_each, weight


def arguments_of_projected(dtype: torch.dtype, apart: bool, n: int = N, width: int = WIDTH) -> tuple[Any, ...]:
    streams = torch.randn(2, 3, 1, width) + torch.randn(2, 3, n, width)
    weight = torch.randn(n + 2, width if apart else n * width) / n  # as parameters, transposed
    return streams.to(dtype).requires_grad_(), weight.to(torch.promote_types(dtype, F32)).T.requires_grad_()


def side_by_side(function: Any) -> Any:
    """New streams, and behind them the read, in one tensor."""

    def both(*arguments: Any) -> Tensor:
        written, result = function(*arguments)
        return torch.cat([written, result.unsqueeze(-2)], -2)

    return both


def arguments_of_combine(dtype: torch.dtype, per_token: bool, parts: int, n: int = N) -> tuple[Any, ...]:
    """``parts``: of two branches; 0: none."""
    precise, lead = torch.promote_types(dtype, F32), (2, 3) if per_token else ()
    branches = [drawn(2, 3, parts, WIDTH, dtype=dtype) for _ in range(2) if parts]
    return drawn(2, 3, n, WIDTH, dtype=dtype), drawn(*lead, n + (parts > 0), M, dtype=precise), branches


def arguments_of_write_and_read(dtype: torch.dtype, branches: int, n: int = N) -> tuple[Any, ...]:
    precise = torch.promote_types(dtype, F32)
    of_each = [drawn(2, 3, WIDTH, dtype=dtype) for _ in range(branches)]
    weights = [drawn(*shape, dtype=precise) for shape in ((n, n), (n,), (n, 1))]
    return drawn(2, 3, n, WIDTH, dtype=dtype), *weights, of_each


class Held(Tensor):
    """A tensor of another type."""


class Cases:
    """Run as they are, and again by kernels."""

    dtypes: tuple[torch.dtype, ...]

    @pytest.mark.parametrize("per_token", [False, True])
    @pytest.mark.parametrize("parts", [0, 1, M])
    def test_combine(self, per_token: bool, parts: int) -> None:
        for dtype in self.dtypes:
            given = arguments_of_combine(dtype, per_token, parts)
            got = compare(combine, twin_of_combine, given, TOLERANCES[dtype])
            assert got.dtype == dtype and got.shape == (2, 3, M, WIDTH)

    @pytest.mark.parametrize("parts", [1, M])
    def test_branches_that_stand_for_others(self, parts: int) -> None:
        """As those that other ranks still compute, of which there is nothing in memory."""
        streams, weights, branches = arguments_of_combine(F32, False, parts)
        held = [f.detach().as_subclass(Held) for f in branches]
        got, want = (combine(streams, weights, given) for given in (held, branches))
        torch.testing.assert_close(got.as_subclass(Tensor), want)
        assert type(got.grad_fn).__name__ != "_SeveralBackward"

    @pytest.mark.parametrize("branches", [1, 3])
    def test_write_and_read(self, branches: int) -> None:
        for dtype in self.dtypes:
            given = arguments_of_write_and_read(dtype, branches)
            got = compare(side_by_side(step), side_by_side(twin_of_step), given, TOLERANCES[dtype])
            assert got.dtype == dtype

    @pytest.mark.parametrize("n", [1, MAX_OUTPUTS - 1, MAX_OUTPUTS])
    def test_any_number_of_streams(self, n: int) -> None:
        compare(side_by_side(step), side_by_side(twin_of_step), arguments_of_write_and_read(F32, 1, n), 1e-5)

    @pytest.mark.parametrize("which", [0, 1], ids=["streams", "read"])
    def test_only_streams_or_only_a_read_are_used(self, which: int) -> None:
        arguments = arguments_of_write_and_read(F32, 1)
        exact = precise_copy(arguments)
        got, want = step(*arguments)[which], twin_of_step(*exact)[which]
        up = torch.randn(got.shape)
        found = torch.autograd.grad(got, leaves_of(arguments), up, materialize_grads=True)
        wanted = torch.autograd.grad(want, leaves_of(exact), up.double(), materialize_grads=True)
        for a, b in zip((got, *found), (want, *wanted), strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("apart", [True, False], ids=["apart", "side by side"])
    @pytest.mark.parametrize(("n", "width"), [(N, WIDTH), (3, 40), (2, 64), (1, WIDTH)])
    def test_reads_by_what_was_projected(self, apart: bool, n: int, width: int) -> None:
        for dtype in self.dtypes:
            given = arguments_of_projected(dtype, apart, n, width)
            got = compare(projected, twin_of_projected, given, 2 * TOLERANCES[dtype])
            assert got.dtype == dtype

    @pytest.mark.parametrize("apart", [True, False], ids=["apart", "side by side"])
    @pytest.mark.parametrize("used", ["read", "streams", "frozen"])
    def test_only_a_part_of_what_was_projected_is_used(self, apart: bool, used: str) -> None:
        streams, weight = arguments_of_projected(F32, apart)
        part = slice(0, 1) if used == "read" else slice(1, None) if used == "streams" else slice(None)
        leaves = (streams, weight.detach().requires_grad_(used != "frozen"))
        exact = precise_copy((streams, weight))
        got, want = projected(*leaves)[..., part, :], twin_of_projected(*exact)[..., part, :]
        up = torch.randn(got.shape)
        (found,) = torch.autograd.grad(got, streams, up)
        (wanted,) = torch.autograd.grad(want, exact[0], up.double())
        assert distance(found, wanted) <= 1e-5

    @pytest.mark.parametrize("apart", [True, False], ids=["apart", "side by side"])
    @pytest.mark.parametrize(("n", "width", "branches"), [(N, WIDTH, 1), (3, 100, 2), (2, 64, 1), (5, WIDTH, 1)])
    def test_writes_that_are_read_at_once(self, apart: bool, n: int, width: int, branches: int) -> None:
        for dtype in self.dtypes:
            given = arguments_of_written(dtype, apart, n, width, branches)
            got = compare(written, twin_of_written, given, 4 * TOLERANCES[dtype])  # H' is rounded, too
            assert got.dtype == dtype

    @pytest.mark.parametrize("apart", [True, False], ids=["apart", "side by side"])
    @pytest.mark.parametrize("used", ["read", "streams", "only the streams", "frozen"])
    def test_only_a_part_of_what_was_written_is_used(self, apart: bool, used: str) -> None:
        streams, table, branches, weight = arguments_of_written(F32, apart)
        part = slice(0, 1) if used == "read" else slice(None) if used == "frozen" else slice(1, None)
        leaves = streams, table, branches, weight.detach().requires_grad_(used != "frozen")
        exact = precise_copy((streams, table, branches, weight))
        # Of which nobody reads gates, or gates are read
        alone = used == "only the streams"
        got = write_and_project(*leaves, 1e-2)[0] if alone else written(*leaves)[..., part, :]
        want = twin_of_written(*exact)[..., part, :]
        up = torch.randn(got.shape)
        found = torch.autograd.grad(got, [streams, table, *branches], up)
        wanted = torch.autograd.grad(want, [exact[0], exact[1], *exact[2]], up.double())
        for a, b in zip(found, wanted, strict=True):
            assert distance(a, b) <= 1e-5

    def test_one_stream_and_streams_that_are_one_tensor(self) -> None:
        compare(combine, twin_of_combine, arguments_of_combine(F32, True, 1, n=1), 1e-5)
        x, (_, *rest) = drawn(2, 3, WIDTH), arguments_of_combine(F32, True, 1)

        def expanded(function: Any) -> Any:
            return lambda x, *others: function(x.unsqueeze(-2).expand(2, 3, N, WIDTH), *others)

        compare(expanded(combine), expanded(twin_of_combine), (x, *rest), 1e-5)

    def test_shapes_that_broadcast(self) -> None:
        streams = drawn(2, 3, N, WIDTH)
        compare(combine, twin_of_combine, (streams, drawn(1, 3, N, M), []), 1e-5)
        compare(lambda *a: read_streams(*a)[0].unsqueeze(-2), twin_of_read, (streams, drawn(1, 3, N, 1)), 1e-5)

    @pytest.mark.parametrize(
        "case",
        [
            "combine",
            "static combine",
            "write and read",
            "apart",
            "side by side",
            "written apart",
            "written",
        ],
    )
    def test_second_derivatives(self, case: str) -> None:
        """Of a function of the first ones, against float64."""
        function, twin, arguments = {
            "combine": (combine, twin_of_combine, arguments_of_combine(F32, True, 1)),
            "static combine": (combine, twin_of_combine, arguments_of_combine(F32, False, 0)),
            "write and read": (
                side_by_side(step),
                side_by_side(twin_of_step),
                arguments_of_write_and_read(F32, 2),
            ),
            "apart": (projected, twin_of_projected, arguments_of_projected(F32, True)),
            "side by side": (projected, twin_of_projected, arguments_of_projected(F32, False)),
            "written apart": (written, twin_of_written, arguments_of_written(F32, True)),
            "written": (written, twin_of_written, arguments_of_written(F32, False)),
        }[case]
        exact = precise_copy(arguments)
        found = penalty_gradients(function(*arguments).sin(), leaves_of(arguments))
        wanted = penalty_gradients(twin(*exact).sin(), leaves_of(exact))
        for a, b in zip(found, wanted, strict=True):
            assert distance(a, b) <= 1e-4


class TestPlain(Cases):
    __test__ = not INTERPRETED
    dtypes = (F32, F64, torch.bfloat16, torch.float16)

    def test_writing_and_reading_is_one_sum_unless_that_would_round_weights(self) -> None:
        for dtype in self.dtypes:
            written, result = step(*arguments_of_write_and_read(dtype, 1))
            assert (written.grad_fn is result.grad_fn) == (dtype != F64)

    def test_gradients_of_gradients_of_combine(self) -> None:
        streams, weights, branches = arguments_of_combine(F64, True, 1, n=2)

        def function(streams: Tensor, weights: Tensor, *branches: Tensor) -> Tensor:
            return combine(streams, weights, branches)

        assert torch.autograd.gradgradcheck(function, (streams, weights, *branches))


class TestWithoutCompiler(Cases):
    __test__ = not INTERPRETED
    dtypes = (F32, F64)

    @pytest.fixture(autouse=True)
    def without(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(native, "knows", lambda x: False)


class Products(TorchDispatchMode):
    """Notes whether operands of batched matrix products are dense, and so are handed to BLAS."""

    def __init__(self) -> None:
        super().__init__()
        self.dense: list[bool] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.ops.aten.bmm.default, torch.ops.aten.baddbmm.default):
            self.dense += [x.is_contiguous() or x.mT.is_contiguous() for x in args]
        return function(*args, **(kwargs or {}))


@pytest.mark.skipif(INTERPRETED, reason="kernels take their place")
@pytest.mark.parametrize("static", [False, True])
def test_products_of_streams_are_of_dense_tensors(static: bool) -> None:
    """Others are computed token by token on a CPU."""
    streams = torch.randn(3, 5, 1, 8).expand(3, 5, 4, 8).requires_grad_()
    scores = torch.randn(5, 5) if static else torch.randn(3, 5, 5, 5)  # read and table side by side
    read, table = (part.requires_grad_() for part in scores.split([1, 4], -1))
    with Products() as products:
        branch = combine(streams, read[..., :4, :])
        combine(streams, table, [branch]).square().sum().backward()
    assert len(products.dense) > 10 and all(products.dense)  # forward and backward


@pytest.mark.slow
@starts_interpreter
def test_in_the_interpreter(tmp_path: Path) -> None:
    interpret(f"{__file__}::TestByKernels", tmp_path)


class TestByKernels(Cases):
    __test__ = INTERPRETED
    dtypes = (F32, torch.bfloat16)

    def test_they_are_kernels(self) -> None:
        for parts in (1, M):
            result = combine(*arguments_of_combine(F32, True, parts))
            assert type(result.grad_fn).__name__ == "_SeveralBackward"
        written, result = step(*arguments_of_write_and_read(F32, 1))
        assert written.grad_fn is result.grad_fn and type(result.grad_fn).__name__ == "_SeveralBackward"
        assert written.is_contiguous() and result.is_contiguous()
        streams, weight = arguments_of_projected(F32, True)
        products, streams, claim = read_off_streams(streams, weight, 1e-2)
        result, handed_on = read_streams(streams, products[..., :1], claim)
        assert type(materialize(result).grad_fn).__name__ == "_ClaimedBackward" and handed_on is streams
        for n in (N, 5):  # more streams than registers hold
            found = write_and_project(*arguments_of_written(F32, True, n), 1e-2)
            assert type(found[0].grad_fn).__name__ == ("_WrittenBackward" if n == N else "_SeveralBackward")
            assert len(found) == (2 if n == N else 1)

    @pytest.mark.parametrize("kind", ["rms", "layer"])
    @pytest.mark.parametrize("used", ["both", "norm", "read"])
    def test_reads_that_are_normed(self, kind: str, used: str) -> None:
        """By the same kernel; the gradients of the norm's parameters, too, and derivatives of all of them."""
        module = nn.RMSNorm(WIDTH, eps=1e-2) if kind == "rms" else nn.LayerNorm(WIDTH, eps=1e-2)
        exact_module = copy.deepcopy(module).double()
        assert mark(module) is None
        streams, weight = arguments_of_projected(F32, True)

        def both(streams: Tensor, weight: Tensor, module: nn.Module) -> Tensor:
            products, handed_on, claim = read_off_streams(streams, weight, 1e-2)
            pending, _ = read_streams(handed_on, torch.tanh(products[..., :1]), claim)
            assert isinstance(pending, PendingRead)
            total, after = pending.normed(module)
            assert type(after.grad_fn).__name__ == "_ClaimedBackward"
            return {"both": total * after, "norm": after, "read": total}[used]

        def twin(streams: Tensor, weight: Tensor, module: nn.Module) -> Tensor:
            total = twin_of_read(streams, torch.tanh((rms_norm(streams, 1e-2) @ weight)[..., :1])).squeeze(-2)
            return {"both": total * module(total), "norm": module(total), "read": total}[used]

        exact = precise_copy((streams, weight))
        leaves, exact_leaves = [streams, weight], [*exact]
        if used != "read":
            leaves += module.parameters()
            exact_leaves += exact_module.parameters()
        got, want = both(streams, weight, module), twin(*exact, exact_module)
        up = torch.randn(got.shape)
        found = torch.autograd.grad(got, leaves, up, retain_graph=True)
        wanted = torch.autograd.grad(want, exact_leaves, up.double(), retain_graph=True)
        for a, b in zip((got, *found), (want, *wanted), strict=True):
            assert distance(a, b) <= 1e-5
        twice = penalty_gradients(got.sin(), leaves), penalty_gradients(want.sin(), exact_leaves)
        for a, b in zip(*twice, strict=True):
            assert distance(a, b) <= 1e-4

    def test_what_was_read_may_be_written_to(self) -> None:
        streams, weight = arguments_of_projected(F32, True)

        def gradients(change: Any) -> tuple[Tensor, ...]:
            products, handed_on, claim = read_off_streams(streams, weight, 1e-2)
            result, _ = read_streams(handed_on, torch.tanh(products[..., :1]), claim)
            return torch.autograd.grad(change(materialize(result)).sin().sum(), [streams, weight])

        for a, b in zip(gradients(lambda x: x.mul_(2)), gradients(lambda x: x * 2), strict=True):
            assert torch.equal(a, b)

    def test_written_streams_that_lie_anywhere(self) -> None:
        """Streams that are one tensor, wider rows, and gradients, saved tensors and factors of other strides."""
        streams, table, branches, weight = arguments_of_written(F32, True)
        wide = torch.randn(2, 3, N, 2 * WIDTH).requires_grad_()
        for x in (streams[..., :1, :].expand(2, 3, N, WIDTH), wide[..., :WIDTH], streams.transpose(0, 1)):
            given = (x, table.transpose(0, 1) if x.shape[0] == 3 else table)
            given += ([f.transpose(0, 1) if x.shape[0] == 3 else f for f in branches], weight)
            exact = precise_copy(given)
            up = torch.randn(*x.shape[:-2], WIDTH, N + 1).mT
            inputs, wanted_of = [x, given[1], *given[2], weight], [exact[0], exact[1], *exact[2], exact[3]]
            want = torch.autograd.grad(twin_of_written(*exact), wanted_of, up.double())
            for again in (lambda t: t, lambda t: t.repeat_interleave(2, -1)[..., ::2]):
                with torch.autograd.graph.saved_tensors_hooks(lambda t: t, again):
                    found = torch.autograd.grad(written(*given), inputs, up)
                for a, b in zip(found, want, strict=True):
                    assert distance(a, b) <= 1e-5

    def test_no_tokens_are_written(self) -> None:
        streams, table, branches, weight = arguments_of_written(F32, True)
        few = streams[:0], table[:0], [f[:0] for f in branches], weight
        (of_weight,) = torch.autograd.grad(written(*few).sum(), weight)
        assert of_weight.shape == weight.shape and not of_weight.any()
