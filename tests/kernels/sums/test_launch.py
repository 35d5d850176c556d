"""The kernels against their float64 twins, in Triton's interpreter."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreter import INTERPRETED, interpret, starts_interpreter
from torch import Tensor

from rewire.kernels import arguments
from rewire.kernels.sums import grid, launch, reference
from rewire.kernels.sums.launch import GradientInputs, MixInputs
from rewire.kernels.sums.spec import MixSpec

EPS = 0.1  # bounds 1 / sqrt(variance + eps), which multiplies errors
GUARD = 64  # elements around each tensor, NaN
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


@pytest.mark.slow
@starts_interpreter
def test_in_the_interpreter(tmp_path: Path) -> None:
    interpret(f"{__file__}::TestKernels", tmp_path)


def guarded(*shape: int, dtype: torch.dtype = F32, device: Any = None) -> Tensor:
    """A tensor of NaN within more NaN."""
    buffer = torch.full((math.prod(shape) + 2 * GUARD,), math.nan, dtype=dtype)
    return buffer[GUARD:-GUARD].view(shape)


def overrun(x: Tensor) -> bool:
    """Whether something was written around a guarded tensor."""
    buffer = x.as_strided((x.numel() + 2 * GUARD,), (1,), 0)
    return not bool(torch.cat([buffer[:GUARD], buffer[-GUARD:]]).isnan().all())


def draw(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return guarded(*shape, dtype=dtype).copy_(torch.randn(shape))


@dataclasses.dataclass
class Case:
    """Inputs of one mix, and what the float64 twin makes of them."""

    spec: MixSpec
    sources: list[Tensor]
    weights: Tensor | None
    scores: list[Tensor]
    added: list[Tensor]
    norm_weight: Tensor | None
    norm_bias: Tensor | None
    grads: list[Tensor]
    grad_mixes: list[Tensor]

    @classmethod
    def of(cls, spec: MixSpec, width: int, dtype: torch.dtype = F32, lead: tuple[int, ...] = (2, 3)) -> Case:
        n, o, shape = spec.sources, spec.outputs, (*lead, width)
        weight_shape = (o, n, width) if spec.weights == "channel" else (o, n)
        return cls(
            spec,
            [draw(*shape, dtype=dtype) for _ in range(n)],
            None if spec.weights == "none" else draw(*weight_shape),
            [draw(*lead, 1) for _ in range(n * o if spec.scores else 0)],
            [draw(*shape, dtype=dtype) for _ in range(o * spec.added)],
            draw(width, dtype=dtype) if spec.norm else None,
            draw(width, dtype=dtype) if spec.shifted else None,
            [draw(*shape, dtype=dtype) for _ in range(o)],
            [draw(*shape, dtype=dtype) for _ in range(o if spec.keep_mix else 0)],
        )

    def forward(self, keep_mix: bool) -> launch.Mixed:
        spec = dataclasses.replace(self.spec, keep_mix=keep_mix)
        norm = {"norm_weight": self.norm_weight, "norm_bias": self.norm_bias}
        return launch.mix_forward(spec, MixInputs(*self.terms(), self.added, **norm), eps=EPS)

    def backward(self, forward: launch.Mixed) -> launch.Gradients:
        norm = (forward.mixes, forward.rstd, self.grad_mixes, self.norm_weight) if self.spec.norm else ()
        return launch.mix_backward(self.spec, GradientInputs(self.grads, *self.terms(), *norm))

    def terms(self) -> tuple[list[Tensor], Tensor | None, list[Tensor]]:
        return self.sources, self.weights, self.scores

    def expected(self) -> tuple[list[Tensor], list[Tensor], dict[str, Any]]:
        """Mixes, what is normed, and gradients by field of `Gradients`."""

        def leaf(x: Tensor) -> Tensor:
            return x.double().requires_grad_()

        sources, scores, added = (list(map(leaf, xs)) for xs in (self.sources, self.scores, self.added))
        weights, scale, shift = (
            None if x is None else leaf(x) for x in (self.weights, self.norm_weight, self.norm_bias)
        )
        mixes = reference.mixes(self.spec, sources, weights, scores, added)
        normed = [] if scale is None else [reference.normed(self.spec, y, scale, shift, EPS) for y in mixes]
        outputs = [*(normed or mixes), *(mixes if self.grad_mixes else ())]
        torch.autograd.backward(outputs, [g.double() for g in (*self.grads, *self.grad_mixes)])
        gradients = {
            "sources": [x.grad for x in sources],
            "weights": [weights.grad] if weights is not None else [],
            "scores": [x.grad for x in scores],
            "added": [x.grad for x in added[:1]] if self.spec.outputs == 1 else [],
            "norm_weight": [scale.grad] if scale is not None else [],
            "norm_bias": [shift.grad] if shift is not None else [],
        }
        return [y.detach() for y in mixes], [y.detach() for y in normed], gradients

    def check(self) -> None:
        mixes, normed, gradients = self.expected()
        found = self.forward(keep_mix=self.spec.norm is not None)
        for got, want in zip((*found.mixes, *tensors(found.normed)), (*mixes, *normed), strict=True):
            rounded_once(got, want)
        if self.spec.norm:
            for got, want in zip(tensors(self.forward(keep_mix=False).normed), normed, strict=True):
                rounded_once(got, want)
        returned = self.backward(found)
        for name, wanted in gradients.items():
            value = getattr(returned, name)
            values = by_pair(value) if name == "scores" else value if isinstance(value, tuple) else [value]
            for got, want in zip(values[: len(wanted)], wanted, strict=True):
                if self.spec.norm:
                    close(got, want, self.grads[0].dtype)
                else:
                    rounded_once(got, want)


def tensors(x: Tensor | None) -> list[Tensor]:
    return [] if x is None else [x]


def by_pair(scores: Tensor | None) -> list[Tensor]:
    """[..., outputs, N] as outputs times N of [..., 1]."""
    return [] if scores is None else list(scores.flatten(-2).split(1, -1))


def rounded_once(got: Tensor, want: Tensor) -> None:
    """Within half a unit in the last place of the exact value, or the error of float32 sums.

    The interpreter rounds to bfloat16 toward zero, where GPUs round to nearest: a whole unit.
    """
    scale = float(want.abs().max()) if want.numel() else 0.0
    units = 1.01 if got.dtype == BF16 else 0.51
    torch.testing.assert_close(got.double(), want, rtol=units * torch.finfo(got.dtype).eps, atol=3e-6 * max(scale, 1.0))


def close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    """Backward through a norm reads the mix as it was rounded."""
    scale = float(want.abs().max()) if want.numel() else 0.0
    tolerance = 4 * max(torch.finfo(dtype).eps, 1e-6)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=tolerance * max(scale, 1.0))


@contextlib.contextmanager
def made_anew() -> Iterator[pytest.MonkeyPatch]:
    """Routines of other launches mean nothing here, and those of here nothing later."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "_routines", {})
        yield patch


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What `launch` allocates is NaN, and so is what lies around it, before and after."""
    made: list[Tensor] = []

    def empty(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: Any) -> Tensor:
        made.append(guarded(*shape, dtype=dtype))
        assert made[-1].stride() == strides
        return made[-1]

    monkeypatch.setattr(torch, "empty_strided", empty)
    yield
    assert made and not any(map(overrun, made))


@pytest.mark.usefixtures("poisoned")
class TestKernels:
    __test__ = INTERPRETED

    @pytest.mark.parametrize("scores", [False, True])
    @pytest.mark.parametrize("weights", ["none", "scalar", "channel"])
    def test_plain(self, weights: Any, scores: bool) -> None:
        for width, dtype in ((1, F32), (7, BF16), (33, F16), (64, F32), (100, BF16), (257, F16)):
            Case.of(MixSpec(3, weights, scores, added=width % 3), width, dtype).check()

    @pytest.mark.parametrize("sources", [1, 2, 15, 16, 17, 32, 33])
    def test_any_number_of_sources(self, sources: int) -> None:
        kind: Any = ("scalar", "channel", "none")[sources % 3]
        spec = MixSpec(sources, kind, scores=sources % 2 == 0, added=sources % 3)
        Case.of(spec, 24, (BF16, F32)[sources % 2], lead=(7,)).check()

    @pytest.mark.parametrize("weights", ["none", "scalar", "channel"])
    @pytest.mark.parametrize("norm", ["rms", "layer"])
    def test_norms(self, weights: Any, norm: Any) -> None:
        for width, dtype, keep in ((1, F32, True), (7, F16, False), (100, BF16, True), (257, F32, False)):
            Case.of(MixSpec(3, weights, keep, added=width % 3, norm=norm, keep_mix=keep), width, dtype).check()

    @pytest.mark.parametrize("weights", ["scalar", "channel"])
    def test_what_norms_multiply_and_add(self, weights: Any) -> None:
        for norm, bias in (("rms", True), ("layer", True), ("layer", False)):
            spec = MixSpec(2, weights, added=1, norm=norm, keep_mix=True, norm_bias=bias)  # type: ignore[arg-type]
            Case.of(spec, 33, BF16 if bias else F32).check()

    @pytest.mark.parametrize(("weights", "scores"), [("scalar", False), ("channel", True), ("none", True)])
    @pytest.mark.parametrize("outputs", [2, 3, 5, 8])
    def test_outputs(self, weights: Any, scores: bool, outputs: int) -> None:
        for sources, dtype in ((1, F32), (5, BF16)):
            added = (outputs + sources) % 3
            Case.of(MixSpec(sources, weights, scores, added=added, outputs=outputs), 33, dtype).check()

    @pytest.mark.parametrize(("weights", "outputs"), [("channel", 3), ("scalar", 8), ("none", 4)])
    def test_outputs_of_more_sources_than_one_kernel_takes(self, weights: Any, outputs: int) -> None:
        Case.of(MixSpec(33, weights, weights == "none", outputs=outputs), 24, lead=(7,)).check()

    def test_partial_sums_of_later_sites(self) -> None:
        """float32 results of bfloat16 states."""
        case = Case.of(MixSpec(5, outputs=4), 40, BF16)
        found = launch.mix_forward(case.spec, MixInputs(case.sources, case.weights), F32)
        case.grads = [draw(2, 3, 40) for _ in range(4)]
        mixes, _, gradients = case.expected()
        returned = case.backward(found)
        assert {x.dtype for x in found.mixes} == {F32} and {x.dtype for x in returned.sources} == {BF16}
        for got, want in zip((*found.mixes, *returned.sources), (*mixes, *gradients["sources"]), strict=True):
            rounded_once(got, want)

    @pytest.mark.parametrize("norm", ["rms", "layer"])
    @pytest.mark.parametrize("width", [4097, 8192])
    def test_wide_norms(self, width: int, norm: Any) -> None:
        """What the gradients of a claimed sum need is that of its norm alone."""
        Case.of(MixSpec(0, "none", added=4, norm=norm, keep_mix=True), width, lead=(2,)).check()
        Case.of(MixSpec(3, added=1, norm=norm, keep_mix=True), width, lead=(2,)).check()

    @pytest.mark.parametrize("norm", ["rms", "layer"])
    def test_more_sources_than_one_kernel_takes_before_a_norm(self, norm: Any) -> None:
        Case.of(MixSpec(18, "scalar", True, added=1, norm=norm, keep_mix=True), 40, BF16).check()

    def test_no_sources(self) -> None:
        Case.of(MixSpec(0, "none", added=2, norm="layer", keep_mix=True), 40).check()

    @pytest.mark.parametrize(
        ("weights", "scores", "attended"),
        [
            ("scalar", False, False),
            ("scalar", True, False),
            ("channel", True, False),
            ("none", True, False),
            ("none", True, True),
        ],
    )
    @pytest.mark.parametrize(("sources", "outputs"), [(1, 1), (18, 1), (5, 2), (6, 4), (2, 8), (10, 8)])
    def test_probes(self, weights: Any, scores: bool, attended: bool, sources: int, outputs: int) -> None:
        dtype, width = ((F32, 257), (BF16, 33))[sources % 2]
        more = {"added": 1 + scores, "accumulate": scores, "attended": attended}
        spec = MixSpec(sources, weights, scores, outputs=outputs, probe=True, **more)
        case = Case.of(spec, width, dtype)
        probes = [draw(2, 3, width, dtype=dtype) for _ in range(outputs)]
        running = [draw(2, 3, width) for _ in range(outputs * spec.accumulate)]
        inputs = (*case.terms(), case.added, running)
        means, given = draw(sources, 2, 3) if attended else None, MixInputs(*inputs, probes=probes)
        if attended:  # one tensor, each number of all rows in one piece
            table = torch.stack(case.scores).view(outputs, sources, 2, 3).movedim((0, 1), (-2, -1))
            given = given._replace(scores=[table], means=means)
        found = launch.mix_forward(spec, given)
        for got, want in zip(found.mixes, reference.mixes(spec, *inputs), strict=True):
            rounded_once(got, want)
        per_weight, per_score = reference.dots(spec, case.sources, probes, case.scores, means)
        assert (found.weight_dots is None) == (per_weight is None)
        if per_weight is not None and found.weight_dots is not None:
            rounded_once(found.weight_dots, per_weight)
        for got, want in zip(by_pair(found.score_dots), per_score, strict=True):
            rounded_once(got, want)

    def test_depth_blocked_backward(self) -> None:
        """Gradients of 3 states and of all weights between them and 4 later sites: one pass over the sites."""
        states = [draw(6, 40) for _ in range(3)]
        forward = Case.of(MixSpec(3, outputs=4), 40, lead=(6,))
        forward.sources = states
        _, _, wanted = forward.expected()
        spec = MixSpec(4, outputs=3, probe=True)
        assert forward.weights is not None
        found = launch.mix_forward(spec, MixInputs(forward.grads, forward.weights.t(), probes=states))
        for got, want in zip(found.mixes, wanted["sources"], strict=True):
            rounded_once(got, want)
        assert found.weight_dots is not None
        rounded_once(found.weight_dots.t(), wanted["weights"][0])

    @pytest.mark.parametrize("expanded", [False, True])
    @pytest.mark.parametrize("weights", ["none", "channel"])
    def test_hyper_connections(self, weights: Any, expanded: bool) -> None:
        """n streams that are views of one tensor, and a branch; n new streams, again in one tensor, and a read."""
        n, width = 4, 33
        streams = draw(2, 3, 1, width).expand(2, 3, n, width) if expanded else draw(2, 3, n, width)
        case = Case.of(MixSpec(n + 1, weights, True, outputs=n + 1), width)
        case.sources[:n] = streams.unbind(-2)
        mixes, _, gradients = case.expected()
        found = launch.mix_forward(case.spec, MixInputs(*case.terms()), stacked=n)
        assert found.stacked is not None and found.stacked.shape == (2, 3, n, width)
        rounded_once(found.stacked, torch.stack(mixes[:n], -2))
        rounded_once(found.mixes[n], mixes[n])
        returned = launch.mix_backward(case.spec, GradientInputs(case.grads, *case.terms()), stacked=n)
        assert returned.stacked is not None and returned.stacked.is_contiguous()
        rounded_once(returned.stacked, torch.stack(gradients["sources"][:n], -2))
        for got, want in zip(
            (*returned.sources, *by_pair(returned.scores)), gradients["sources"] + gradients["scores"], strict=True
        ):
            rounded_once(got, want)
        assert len(found.apart) == 1 and not returned.sources[:n][0].is_contiguous()

    @pytest.mark.parametrize("uneven", [False, True])
    @pytest.mark.parametrize("expanded", [False, True])
    def test_stacks_and_tables_are_what_their_parts_are(self, expanded: bool, uneven: bool) -> None:
        """Bitwise: streams in one tensor, beside a branch, and scores in one; in rows that have to be copied, too."""
        n, width = 3, 33

        def stack(count: int) -> Tensor:
            return draw(3, 2, count, width).transpose(0, 1) if uneven else draw(2, 3, count, width)

        streams = draw(2, 3, 1, width).expand(2, 3, n, width) if expanded else stack(n)
        table = draw(3, 2, 2, n + 1).transpose(0, 1) if uneven else draw(2, n + 1, 2, 3).permute(2, 3, 0, 1)
        tables, branch, grads, carried = [table], draw(2, 3, width), stack(2), stack(n)
        spec, weights, scores = MixSpec(n + 1, "scalar", True, outputs=2), draw(2, n + 1), by_pair(table)
        apart = launch.mix_forward(spec, MixInputs([*streams.unbind(-2), branch], weights, scores))
        given = MixInputs([streams, branch], weights, tables, stacks=True)
        assert all(map(torch.equal, apart.mixes, launch.mix_forward(spec, given).mixes))
        back = dataclasses.replace(spec, carried=True)
        terms = (list(grads.unbind(-2)), [*streams.unbind(-2), branch], weights, scores)
        by_part = launch.mix_backward(back, GradientInputs(*terms, carried=[*carried.unbind(-2), branch]), stacked=n)
        in_one = GradientInputs([grads], [streams, branch], weights, tables, carried=[carried, branch], stacks=True)
        found = launch.mix_backward(back, in_one, stacked=n)
        assert found.added is None and torch.equal(found.apart[0], by_part.apart[0])
        for name in ("stacked", "weights", "scores"):
            assert torch.equal(getattr(found, name), getattr(by_part, name))

    def test_sums_over_many_tiles(self) -> None:
        """More rows than programs have at once, so that each loops; and more than one block of columns."""
        for kind in ("scalar", "channel"):
            case = Case.of(MixSpec(2, kind, True, outputs=2), 300, lead=(70,))
            with made_anew() as patch:
                patch.setattr(grid, "PROGRAMS", 8)
                case.check()
        with made_anew() as patch:
            patch.setattr(grid, "PROGRAMS", 3)
            Case.of(MixSpec(2, "scalar", True, norm="layer", keep_mix=True), 300, lead=(20,)).check()

    def test_accumulator(self) -> None:
        xs, start = [draw(4, 40, dtype=BF16) for _ in range(2)], list(draw(4, 2, 40).unbind(1))
        spec, weights = MixSpec(2, outputs=2, accumulate=True), draw(2, 2)
        found = launch.mix_forward(spec, MixInputs(xs, weights, accumulators=start), F32).mixes
        for got, want in zip(found, reference.mixes(spec, xs, weights, accumulators=start), strict=True):
            assert got.dtype == F32
            rounded_once(got, want)

    def test_a_chain_rounds_as_one_kernel_would(self) -> None:
        case = Case.of(MixSpec(12, "channel", True, added=1), 40)
        whole = case.forward(keep_mix=False).mixes[0]
        with made_anew() as patch:
            patch.setattr("rewire.kernels.sums.spec.FAN_IN", 5)
            assert torch.equal(case.forward(keep_mix=False).mixes[0], whole)

    @pytest.mark.parametrize("norm", [None, "rms"])
    def test_strides(self, norm: Any) -> None:
        """Rows with gaps, rows in another order, channels apart, and one row for all."""
        width, spec = 40, MixSpec(4, "channel", True, added=1, norm=norm)
        case = Case.of(spec, width, lead=(3, 5))
        case.sources = [
            draw(3, 5, 2 * width)[..., :width],
            draw(5, 3, width).transpose(0, 1),
            draw(3, width, 5).transpose(1, 2),
            draw(width).expand(3, 5, width),
        ]
        case.scores = [x.unsqueeze(-1) for x in draw(3, 5, 4).unbind(-1)]
        case.added = [draw(3, 5, width + 3)[..., 2:-1]]
        case.grads = [draw(width).expand(3, 5, width)]
        case.check()
        case.sources = list(draw(3, 5, 4 * width).split(width, -1))
        case.scores = [*case.scores[:3], draw(3, 5, 1)]
        case.check()

    @pytest.mark.parametrize(("lead", "width"), [((0,), 12), ((2, 0, 3), 12), ((), 12), ((), 1), ((3,), 0)])
    def test_few_elements(self, lead: tuple[int, ...], width: int) -> None:
        for spec in (MixSpec(2), MixSpec(17, "channel", True, outputs=2), MixSpec(2, norm="layer", keep_mix=True)):
            Case.of(spec, width, lead=lead).check()
        case = Case.of(MixSpec(2, "channel", True, outputs=2, probe=True), width, lead=lead)
        probes = [draw(*lead, width) for _ in range(2)]
        found = launch.mix_forward(case.spec, MixInputs(*case.terms(), probes=probes), stacked=2)
        assert found.weight_dots is not None and found.stacked is not None and found.stacked.shape == (*lead, 2, width)
        per_weight, per_score = reference.dots(case.spec, case.sources, probes)
        for got, want in zip((found.weight_dots, *by_pair(found.score_dots)), (per_weight, *per_score), strict=True):
            rounded_once(got, want)  # type: ignore[arg-type]

    def test_strides_that_depend_on_the_number_of_tokens_are_not_compiled_in(self) -> None:
        """The first token of each sequence."""
        case = Case.of(MixSpec(2), 24, lead=(3,))
        case.sources = [draw(3, 300, 24)[:, 0] for _ in range(2)]
        assert case.sources[0].stride(0) > arguments.MAX_ROW_STRIDE * 24
        assert arguments.row_stride(case.sources[0].shape, case.sources[0].stride()) is None
        case.check()

    def test_weight_one_is_a_plain_add(self) -> None:
        x, f = draw(3, 40, dtype=F16), draw(3, 40, dtype=F16)
        found = launch.mix_forward(MixSpec(1, added=1), MixInputs([x], torch.ones(1), added=[f]))
        assert torch.equal(found.mixes[0], x + f)

    def test_mixed_dtypes(self) -> None:
        xs, weights, f = [draw(3, 40), draw(3, 40, dtype=BF16)], draw(2), draw(3, 40, dtype=F16)
        spec = MixSpec(2, added=1)
        found = launch.mix_forward(spec, MixInputs(xs, weights, added=[f])).mixes[0]
        assert found.dtype == F32
        rounded_once(found, reference.mixes(spec, xs, weights, added=[f])[0])
        gradients = launch.mix_backward(spec, GradientInputs([found], xs, weights))
        assert [x.dtype for x in gradients.sources] == [F32, BF16]

    @pytest.mark.parametrize("norm", [None, "layer"])
    def test_two_runs_are_bitwise_equal(self, norm: Any) -> None:
        case = Case.of(MixSpec(5, "scalar" if norm else "channel", True, added=1, norm=norm, keep_mix=bool(norm)), 257)
        runs = [case.backward(case.forward(keep_mix=bool(norm))) for _ in range(2)]
        for a, b in zip(*(torch.utils._pytree.tree_leaves(tuple(run)) for run in runs), strict=True):
            assert torch.equal(a, b) if isinstance(a, Tensor) else a == b


def test_float64_is_refused() -> None:
    x = torch.randn(3, 8, dtype=torch.float64)
    with pytest.raises(TypeError, match="float64"):
        launch.mix_forward(MixSpec(1), MixInputs([x], torch.ones(1)))
    with pytest.raises(TypeError, match="have to be float32"):
        launch.mix_forward(MixSpec(1), MixInputs([x.float()], torch.ones(1, dtype=torch.bfloat16)))


def test_arguments_have_to_fit_the_spec() -> None:
    x, ones = torch.randn(3, 8), torch.ones(2)
    with pytest.raises(ValueError, match="sources: the spec asks for 2, got 1"):
        launch.mix_forward(MixSpec(2), MixInputs([x], ones))
    with pytest.raises(ValueError, match=r"\[1, 2\], got \[3\]"):
        launch.mix_forward(MixSpec(2), MixInputs([x, x], torch.ones(3)))
    with pytest.raises(ValueError, match="one shape"):
        launch.mix_forward(MixSpec(2), MixInputs([x, x[:2]], ones))
    with pytest.raises(ValueError, match=r"Scores .* \[3, 1\]"):
        launch.mix_forward(MixSpec(1, scores=True), MixInputs([x], torch.ones(1), [torch.ones(2, 1)]))
    with pytest.raises(ValueError, match="norm_weight: the spec asks for 1"):
        launch.mix_forward(MixSpec(2, norm="rms"), MixInputs([x, x], ones))
    attended = MixSpec(2, "none", True, probe=True, attended=True)
    apart = MixInputs([x, x], None, [torch.ones(3, 1)] * 2, probes=[x], means=torch.ones(2, 3))
    with pytest.raises(ValueError, match="one tensor, each of all rows in one piece"):
        launch.mix_forward(attended, apart)
    wide = torch.randn(1, 8200)
    with pytest.raises(ValueError, match="at most 8192 channels"):
        launch.mix_forward(MixSpec(1, norm="rms"), MixInputs([wide], torch.ones(1), norm_weight=torch.ones(8200)))
    with pytest.raises(ValueError, match="probes: the spec asks for 2, got 1"):
        launch.mix_forward(MixSpec(2, outputs=2, probe=True), MixInputs([x, x], torch.ones(2, 2), probes=[x]))
    with pytest.raises(ValueError, match="stacked=2: there are 1 mixes without a norm"):
        launch.mix_forward(MixSpec(2), MixInputs([x, x], ones), stacked=2)
    with pytest.raises(ValueError, match="stacked=3: there are 2 gradients of sources"):
        launch.mix_backward(MixSpec(2), GradientInputs([x], [x, x], ones), stacked=3)
    with pytest.raises(ValueError, match="of one dtype"):
        launch.mix_backward(MixSpec(2), GradientInputs([x], [x, x.bfloat16()], ones), stacked=2)
    with pytest.raises(ValueError, match="mixes: the spec asks for 1"):
        launch.mix_backward(MixSpec(2, norm="rms"), GradientInputs([x], [x, x], ones, norm_weight=torch.ones(8)))
