"""The operators under `torch.library.opcheck` in Triton's interpreter, and the switch that turns them off."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreter import INTERPRETED, interpret, starts_interpreter
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from rewire.kernels import operators
from rewire.mixes.mix import pending_mix
from rewire.mixes.norms import Norm, mark, normed

F32, BF16 = torch.float32, torch.bfloat16
N, WIDTH = 3, 24
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")


@pytest.mark.slow
@starts_interpreter
def test_in_the_interpreter(tmp_path: Path) -> None:
    interpret(f"{__file__}::TestOperators", tmp_path)


def checked(operator: Any, *args: Any, traced: bool = False) -> Any:
    """Its schema, its outputs' shapes, strides and dtypes without values, and its trace; returns its result."""
    checks = (*CHECKS, "test_aot_dispatch_dynamic") if traced else CHECKS  # slow, and the same for all weights
    found = torch.library.opcheck(getattr(torch.ops.rewire, operator.__name__).default, args, test_utils=checks)
    assert set(found.values()) == {"SUCCESS"}
    return operator(*args)


def drawn(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.randn(shape).to(dtype)


def states(count: int, lead: tuple[int, ...] = (2, 3), dtype: torch.dtype = F32) -> list[Tensor]:
    """Strided ones among them."""
    apart = drawn(*lead, 2 * WIDTH, dtype=dtype)[..., :WIDTH]
    other = drawn(*reversed(lead), WIDTH, dtype=dtype).transpose(0, len(lead) - 1)
    return [apart, other, *(drawn(*lead, WIDTH, dtype=dtype) for _ in range(count))][:count]


def weights_of(kind: str, *counts: int) -> Tensor | None:
    """Transposed, as those that are cut out of larger tables."""
    if kind == "none":
        return None
    shape = (*counts, WIDTH) if kind == "channel" else counts
    return drawn(*reversed(shape)).permute(*reversed(range(len(shape))))


def scores_of(given: bool, lead: tuple[int, ...] = (2, 3)) -> list[Tensor]:
    return list(drawn(*lead, N).split(1, -1)) if given else []


WEIGHTED = [("scalar", False), ("scalar", True), ("channel", False), ("channel", True), ("none", True)]
LEADS = [(2, 3), (5,), (0,), (2, 0)]


def test_schemas_are_signatures() -> None:
    schema = str(torch.ops.rewire.mixes.default._schema)
    assert schema == (
        "rewire::mixes(Tensor[] sources, Tensor? weights, Tensor[] scores, Tensor[] added, Tensor[] probes, "
        "ScalarType? dtype, bool stacks=False, SymInt apart=0) -> Tensor[]"
    )
    assert str(torch.ops.rewire.gates.default._schema).endswith("float eps, float magnitude) -> (Tensor, Tensor)")


@pytest.mark.parametrize(
    ("stacks", "apart", "probed"), [(False, 0, False), (True, 0, False), (True, 2, False), (False, 0, True)]
)
@pytest.mark.parametrize("kind", ["scalar", "channel", "none"])
def test_results_of_tensors_without_values(kind: str, stacks: bool, apart: int, probed: bool) -> None:
    """Of two sources, or four streams and one, 3 mixes; with probes instead, dot products with them."""
    lead, outputs, n = (2, 5), 3, 2 + 3 * stacks
    with FakeTensorMode():
        first = torch.empty(*lead, 4, WIDTH, dtype=BF16) if stacks else torch.empty(*lead, WIDTH, dtype=BF16)
        sources, probes = [first, torch.empty(*lead, WIDTH)], [torch.empty(*lead, WIDTH)] * outputs * probed
        weights = {"scalar": torch.empty(outputs, n), "channel": torch.empty(outputs, n, WIDTH), "none": None}[kind]
        scores = [torch.empty(*lead, n)] * outputs if probed else [torch.empty(*lead, outputs, n)]
        found = operators.mixes(sources, weights, scores, [], probes, None, stacks, apart)
    assert {x.dtype for x in found} == {F32}
    mixes = [(*lead, outputs - apart, WIDTH)] * stacks + [(*lead, WIDTH)] * (apart if stacks else outputs)
    of_weights = [] if weights is None else [tuple(weights.shape)]
    assert [tuple(x.shape) for x in found] == mixes + [*of_weights, (*lead, outputs, n)] * probed


class TestOperators:
    __test__ = INTERPRETED

    @pytest.mark.parametrize(("kind", "scored"), [*WEIGHTED, ("none", False)])
    def test_mix(self, kind: str, scored: bool) -> None:
        for accumulator, added, dtype in ((None, 0, F32), (drawn(2, 3, WIDTH), 1, BF16), (None, 2, BF16)):
            given = (weights_of(kind, N), scores_of(scored), states(added, dtype=dtype), accumulator, dtype)
            assert checked(operators.mix, states(N, dtype=dtype), *given).dtype == dtype

    @pytest.mark.parametrize("lead", LEADS)
    def test_any_number_of_rows(self, lead: tuple[int, ...]) -> None:
        xs, w, scores, grad = states(N, lead), drawn(N), scores_of(True, lead), drawn(*lead, WIDTH)
        check = functools.partial(checked, traced=lead == LEADS[0])
        check(operators.mix, xs, w, scores, [], None, F32)
        of_weights = check(operators.mix_backward, grad, xs, w, scores)[N]
        given = ("layer", drawn(WIDTH), drawn(WIDTH), 1e-5)
        total, _, rstd = check(operators.mix_norm, xs, w, scores, [], None, F32, *given)
        check(operators.mix_norm_backward, grad, grad, total, rstd, "layer", drawn(WIDTH), True, xs, w, scores)
        check(operators.mixes, xs, drawn(2, N), [], [], [], F32)
        check(operators.mixes, [grad], drawn(N, 1), [], [], xs, F32)
        streams, scores = drawn(*lead, 1, WIDTH), drawn(*lead, 2, N)
        sources = [streams, *xs[1:]]
        (mixed,) = check(operators.mixes, sources, drawn(2, N), [scores], [], [], None, True)
        check(operators.mixes_backward, [mixed], sources, drawn(2, N), [scores], sources, True)
        assert grad.numel() or not of_weights.any()

    @pytest.mark.parametrize(("kind", "scored"), WEIGHTED)
    def test_mix_backward(self, kind: str, scored: bool) -> None:
        for dtype in (F32, BF16):
            xs, grad = states(N, dtype=dtype), drawn(WIDTH, dtype=dtype).expand(2, 3, WIDTH)
            checked(operators.mix_backward, grad, xs, weights_of(kind, N), scores_of(scored))

    @pytest.mark.parametrize(("kind", "scored"), [*WEIGHTED, ("none", False)])
    @pytest.mark.parametrize(("norm", "biased"), [("rms", False), ("layer", True), ("layer", False)])
    def test_mix_norm_and_its_backward(self, norm: str, biased: bool, kind: str, scored: bool) -> None:
        sources, weights, scores = states(N), weights_of(kind, N), scores_of(scored)
        scale, bias = drawn(WIDTH), drawn(WIDTH) if biased else None
        accumulator = drawn(2, 3, WIDTH) if scored else None
        given = (sources, weights, scores, states(1), accumulator, F32)
        total, _, rstd = checked(operators.mix_norm, *given, norm, scale, bias, 1e-5)
        for grad_mix in (None, drawn(2, 3, WIDTH)):
            terms = (sources, weights, scores) if scored or weights is not None else ([], None, [])
            checked(operators.mix_norm_backward, drawn(2, 3, WIDTH), grad_mix, total, rstd, norm, scale, biased, *terms)

    @pytest.mark.parametrize("kind", ["scalar", "channel"])
    def test_mixes_with_and_without_probes(self, kind: str) -> None:
        for dtype in (F32, BF16):
            begun = checked(operators.mixes, states(N, dtype=dtype), weights_of(kind, 4, N), [], [], [], F32)
            assert {x.dtype for x in begun} == {F32}
            for count in (1, 4):
                added = states(1, dtype=dtype) if count == 1 else []
                probes = states(count, dtype=dtype)
                *dx, dots = checked(
                    operators.mixes, states(N, dtype=dtype), weights_of(kind, count, N), [], added, probes, dtype
                )
                assert {x.dtype for x in dx} == {dtype} and dots.shape[:2] == (count, N)

    def test_mixes_by_token_with_and_without_probes(self) -> None:
        for dtype in (F32, BF16):
            scores = drawn(2, N, 2, 3).permute(2, 3, 0, 1)
            begun = checked(operators.mixes, states(N, dtype=dtype), None, [scores], [], [], F32)
            assert {x.dtype for x in begun} == {F32}
            for weights in (None, weights_of("channel", 2, N)):
                probes = states(2, dtype=dtype)
                checked(operators.mixes, states(N, dtype=dtype), weights, scores.unbind(-2), [], probes, dtype)

    @pytest.mark.parametrize("lead", LEADS)
    def test_reads_that_attend(self, lead: tuple[int, ...]) -> None:
        for dtype in (F32, BF16):
            xs, (x, grad) = states(N, lead, dtype), states(2, lead, dtype)
            earlier, later = drawn(2, *lead), drawn(N, *lead)
            together, statistics = checked(operators.softmax, [*earlier, *later], None, N)
            torch.testing.assert_close(together.sum(0), torch.full(lead, float(N)))
            numerators, begun = checked(operators.softmax, list(earlier), None, 0)
            for own in ([], list(later)):
                shares, known = checked(operators.softmax, own, begun, N)
                if own:
                    torch.testing.assert_close(shares[0] * numerators, together[:2])
                    torch.testing.assert_close((shares[1:], known), (together[2:], statistics))
            tally = checked(operators.tally, grad, x, statistics, N)
            torch.testing.assert_close(tally[2], (grad.float() * x.float()).sum(-1) / N)
            for count in (1, 2):
                scores = [drawn(N, *lead).movedim(0, -1) for _ in range(count)]
                given = (xs, [x, grad][:count], scores, [tally] * N)
                found = checked(operators.gather_attended, *given, [])
                added = [grad, x][:count]
                carried = checked(operators.gather_attended, *given, added)
                for with_it, without, more in zip(carried, found, added, strict=False):
                    torch.testing.assert_close(with_it.float(), without.float() + more.float(), rtol=2e-2, atol=2e-2)

    @pytest.mark.parametrize("lead", LEADS)
    def test_scores_of_each_source(self, lead: tuple[int, ...]) -> None:
        """Scores as parts of wider tensors, one column after the other."""
        for kind in ("scalar", "channel"):
            xs, weights = states(N, lead), weights_of(kind, 3, N)
            scores = [drawn(5, *lead).movedim(0, -1).narrow(-1, 1, 3) for _ in xs]
            found = checked(operators.mixes, xs, weights, scores, [], [], None)
            in_one = operators.mixes(xs, weights, [torch.stack(scores, -1)], [], [], None)
            torch.testing.assert_close(found, in_one)

    @pytest.mark.parametrize("lead", LEADS)
    def test_hidden_layers(self, lead: tuple[int, ...]) -> None:
        for dtype in (F32, BF16):
            x, read, weight, static = drawn(*lead, WIDTH, dtype=dtype), drawn(4, WIDTH).T, drawn(4, 4), drawn(4)
            hidden, inverse = operators.project(x, read, 1e-6)
            scores = checked(operators.hidden, hidden, weight, static)
            torch.testing.assert_close(scores, nn.functional.gelu(hidden) @ weight + static)
            for carried in (None, x):
                checked(operators.hidden_backward, scores, x, read, weight, hidden, inverse, carried)

    @pytest.mark.parametrize("eps", [None, 1e-6])
    def test_projections_that_are_clamped(self, eps: float | None) -> None:
        x, weight = drawn(2, 3, WIDTH, dtype=BF16), drawn(WIDTH, 4)
        scores, inverse = checked(operators.project, x, weight, eps, True)
        assert torch.equal(scores, operators.project(x, weight, eps)[0].clamp(min=0))
        checked(operators.project_backward, [scores], x, weight, scores, inverse, x, None, None, True)

    @pytest.mark.parametrize("eps", [None, 1e-6])
    def test_projections_whose_gradients_come_apart(self, eps: float | None) -> None:
        x, weight, grad = drawn(2, 3, WIDTH, dtype=BF16), drawn(WIDTH, 5), drawn(2, 3, 5)
        given = x, weight, *operators.project(x, weight, eps), x
        for first in (1, 4):  # each in a layout of its own
            near, later = grad[..., :first].contiguous(), grad[..., first:].movedim(-1, 0).contiguous().movedim(0, -1)
            found = checked(operators.project_backward, [near, later], *given)
            torch.testing.assert_close(found, operators.project_backward([grad], *given), rtol=0, atol=0)

    def test_reads_and_gates_of_streams(self) -> None:
        for lead in ((3,), (2, 3)):
            streams, grad = drawn(*lead, N, WIDTH, dtype=BF16), drawn(*lead, 1, WIDTH, dtype=BF16)
            weight = drawn(WIDTH, N + 2)
            products, inverse = checked(operators.project, streams, weight, 1e-6)
            found = checked(operators.products, grad, streams)
            torch.testing.assert_close(found, (grad.float() * streams.float()).sum(-1, keepdim=True))
            given = [products], streams, weight, products, inverse
            (of_read, _), (without, _) = (
                checked(operators.project_backward, *given, None, *read) for read in ((grad, found), ())
            )
            torch.testing.assert_close(of_read.float(), without.float() + found * grad.float(), rtol=2e-2, atol=0.1)
            for iterations, values in ((0, drawn(N + 1, N + 2)), (3, drawn(2, 2 * N + N * N))):
                x, w = (streams, weight) if iterations == 0 else (streams.flatten(-2), drawn(N * WIDTH, N * (N + 2)))
                s, inverse = operators.project(x, w, 1e-6)
                static, gating = values[:-1].view(s.shape[len(lead) :]), (iterations, 0.0, 2.0)
                made = checked(operators.gates, s, static, values[-1], N, *gating)
                checked(operators.gates_backward, *made, s, static, values[-1], *gating)

    @pytest.mark.parametrize("branches", [1, 2])
    def test_writes_that_are_projected(self, branches: int) -> None:
        """The same numbers as one after the other, of streams that were rounded."""
        for lead in ((3,), (2, 3)):
            streams, fs = drawn(*lead, N, WIDTH, dtype=BF16), [drawn(*lead, WIDTH, dtype=BF16) for _ in range(branches)]
            table = drawn(*lead, N, N + branches)
            weight = drawn(N + 2, WIDTH).T
            found = checked(operators.write_and_project, streams, fs, table, weight, 1e-6)
            new = operators.mixes([streams, *fs], None, [table], [], [], None, True)[0]
            torch.testing.assert_close(found, (new, *operators.project(new, weight, 1e-6)))
            grad, read = torch.randn_like(found[1]), (drawn(*lead, 1, WIDTH, dtype=BF16), drawn(*lead, N, 1))
            for carried, *sent in ((streams, *read), (None, None, None)):
                checked(operators.write_and_project_backward, grad, carried, *sent, *found, streams, fs, table, weight)

    def test_tensors_that_other_ranks_still_compute(self) -> None:
        """Tensor parallelism hands over branches, and gradients, that stand for what a collective will have written."""
        functional = pytest.importorskip("torch.distributed._functional_collectives")
        for awaited in (functional.AsyncCollectiveTensor, lambda x: functional.AsyncCollectiveTensor(x).view(x.shape)):
            sources, weights, (f, grad) = states(N), weights_of("scalar", N), states(2)
            wanted = operators.mix(sources, weights, [], [f], None, F32)
            torch.testing.assert_close(operators.mix(sources, weights, [], [awaited(f)], None, F32), wanted)
            gradients = operators.mix_backward(grad, sources, weights, [])
            torch.testing.assert_close(operators.mix_backward(awaited(grad), sources, weights, []), gradients)
            x, w = sources[0], drawn(WIDTH, 3)
            scores, inverse = operators.project(x, w, 1e-6)
            back = ([drawn(2, 3, 3)], x, w, scores, inverse)
            wanted_by_row = operators.project_backward(*back, grad)
            torch.testing.assert_close(operators.project_backward(*back, awaited(grad)), wanted_by_row)

    @pytest.mark.parametrize("stacked", [0, 2, N])
    @pytest.mark.parametrize(("kind", "scored"), WEIGHTED)
    def test_mixes_and_their_backward(self, kind: str, scored: bool, stacked: int) -> None:
        dtype = BF16 if scored else F32
        streams, others = [drawn(2, 3, stacked, WIDTH, dtype=dtype)] * (stacked > 0), states(N - stacked, dtype=dtype)
        sources = [*streams, *others]
        weights, scores = weights_of(kind, 2, N), [drawn(2, N, 3, 2).permute(0, 2, 3, 1)] * scored
        grads = checked(operators.mixes, sources, weights, scores, [], [], None, stacked > 0)
        for carried in ([], sources):
            checked(operators.mixes_backward, grads, sources, weights, scores, carried, stacked > 0)

    @pytest.mark.parametrize("apart", [1, 2])
    @pytest.mark.parametrize(("kind", "scored"), WEIGHTED)
    def test_stacked_mixes_of_which_some_are_tensors_of_their_own(self, kind: str, scored: bool, apart: int) -> None:
        dtype = BF16 if scored else F32
        sources = [drawn(2, 3, 2, WIDTH, dtype=dtype), *states(1, dtype=dtype)]
        weights, scores = weights_of(kind, 3, N), [drawn(2, 3, 3, N)] * scored
        given = sources, weights, scores, [], [], None, True
        (together,) = operators.mixes(*given)
        stack, *others = grads = checked(operators.mixes, *given, apart)
        assert torch.equal(torch.stack([*stack.unbind(-2), *others], -2), together) and len(others) == apart
        got = checked(operators.mixes_backward, grads, sources, weights, scores, [], True)
        want = operators.mixes_backward([together], sources, weights, scores, [], True)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))

    @pytest.mark.parametrize(("kind", "scored"), [*WEIGHTED, ("none", False)])
    @pytest.mark.parametrize("norm", ["rms", "layer", None])
    def test_mixes_of_a_function_and_their_gradients(self, norm: Any, kind: str, scored: bool) -> None:
        """What `Mix` makes of the operators, against autograd in float64; the sum is used as well."""
        module = nn.Identity() if norm is None else (nn.RMSNorm if norm == "rms" else nn.LayerNorm)(WIDTH, eps=1e-2)
        assert norm is None or mark(module) is None
        parameters = [p.requires_grad_() for p in module.parameters()]
        terms = (states(N), weights_of(kind, N), scores_of(scored), states(2))
        leaves = [
            x.requires_grad_() for group in terms for x in ([group] if isinstance(group, Tensor) else group or [])
        ]
        total, after = pending_mix(terms[0], terms[1], terms[3], terms[2]).normed(module)
        assert after.grad_fn is total.grad_fn
        up = drawn(*total.shape), drawn(*total.shape)
        got = torch.autograd.grad((total, after), (*leaves, *parameters), up)
        exact = [x.detach().double().requires_grad_() for x in (*leaves, *parameters)]
        rest = iter(exact)
        xs, w, s, f = ([next(rest) for _ in range(n)] for n in (N, kind != "none", N * scored, 2))
        factors = [a + b for a, b in zip(w[0] if w else [0] * N, s or [0] * N, strict=True)]
        if kind == "none" and not scored:
            factors = [1.0] * N
        want = sum(a * x for a, x in zip(factors, xs, strict=True)) + sum(f)
        scale = list(rest)
        want_after = want if norm is None else normed(want, Norm(norm, scale[0], scale[1] if scale[1:] else None, 1e-2))
        torch.testing.assert_close((total.double(), after.double()), (want, want_after), rtol=1e-5, atol=1e-5)
        wanted = torch.autograd.grad((want, want_after), exact, [u.double() for u in up])
        for a, b in zip(got, wanted, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)


OFF = """
import torch, rewire
from models import PreNorm, Stack, vectors
from rewire.kernels import switch

model = rewire.compile(Stack(PreNorm), "ancre-ingoing", start="paper", validate=False)
model(vectors()).sum().backward()
print(switch.uses_kernels(torch.ones(1)))
"""


@pytest.mark.parametrize(("value", "launched"), [("Off", False), pytest.param("on", True, marks=pytest.mark.slow)])
def test_rewire_kernels_switches_them(value: str, launched: bool, tmp_path: Path) -> None:
    """A directory for generated kernels appears with the first one."""
    kernels = tmp_path / "kernels"
    environment = {"REWIRE_KERNELS": value, "TRITON_INTERPRET": "1", "REWIRE_CACHE_DIR": str(kernels)}
    done = subprocess.run(
        [sys.executable, "-c", OFF],
        env={**os.environ, **environment, "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == [str(launched)]
    assert kernels.exists() == launched
