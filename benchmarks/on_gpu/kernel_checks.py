"""Every generated kernel against float64, on fresh random inputs, however they lie in memory.

Results start as NaN, everything is computed twice, and the two have to be bitwise equal.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from rewire.kernels.sums import launch, reference
from rewire.kernels.sums.spec import MixSpec, NormKind, Weights

EPS = 0.1  # of the norms: bounds 1 / sqrt(variance + eps), which multiplies errors
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
KINDS: tuple[Weights, ...] = ("none", "scalar", "channel")
#: How tensors [rows, width] lie in memory.
Layout = Literal["contiguous", "in wider rows", "stacked", "one row for all", "not aligned", "transposed"]
LAYOUTS: tuple[Layout, ...] = ("in wider rows", "stacked", "one row for all", "not aligned", "transposed")
NORMS: tuple[tuple[NormKind, bool], ...] = (
    ("rms", False),
    ("rms", True),
    ("layer", True),
)  # and whether the mix is kept


@dataclasses.dataclass(frozen=True)
class Check:
    """One kernel at one size.

    Attributes:
        spec: what it computes.
        rows, width: of its tensors.
        dtype: of its states.
        layout: of all its tensors.
    """

    spec: MixSpec
    rows: int
    width: int
    dtype: torch.dtype
    layout: Layout = "contiguous"

    @property
    def name(self) -> str:
        fields = [f for f in dataclasses.fields(MixSpec) if f.name != "sources"]
        given = [(f.name, getattr(self.spec, f.name), f.default) for f in fields]
        options = [f"{name}={value}" for name, value, default in given if value != default]
        size = f"{self.rows} x {self.width}, {str(self.dtype).removeprefix('torch.')}"
        layout = "" if self.layout == "contiguous" else f", {self.layout}"
        return " ".join([f"{self.spec.sources} sources", *options, f"({size}{layout})"])


def checks(small: bool) -> list[Check]:
    """All kinds of kernels, those that most topologies need first; if not ``small``, at the sizes of models."""
    sums = [MixSpec(n) for n in (1, 2, 8, 16, 24, 32)]
    sums += [MixSpec(3, weights, scores, added) for weights in KINDS for scores, added in ((False, 2), (True, 1))]
    # Depth blocking: sums that are begun, and gradients that several states gather.
    blocked = [MixSpec(18, outputs=o) for o in (2, 4, 8)] + [MixSpec(3, added=1, accumulate=True)]
    blocked += [MixSpec(n, outputs=o, probe=True) for n, o in ((20, 1), (5, 2), (5, 4), (10, 8))]
    blocked += [MixSpec(4, outputs=1, added=1, probe=True), MixSpec(5, "channel", outputs=4, probe=True)]
    # Queries, keys and values; streams; scores beside probes.
    several = [MixSpec(5, weights, True, outputs=o) for weights in KINDS for o in (3, 4)]
    several += [MixSpec(5, "none", True, outputs=8), MixSpec(4, "channel", True, probe=True)]
    several += [MixSpec(18, "none", True, outputs=4, probe=True, attended=True), MixSpec(5, outputs=5)]
    several += [MixSpec(5, "none", True, outputs=2, probe=True), MixSpec(10, "channel", True, outputs=4, probe=True)]
    several += [MixSpec(10, "none", True, outputs=8, probe=True, attended=True)]
    norms = [
        MixSpec(3, weights, keep, added=1, norm=norm, keep_mix=keep) for weights in KINDS[1:] for norm, keep in NORMS
    ]
    norms += [
        MixSpec(3, norm="rms", keep_mix=True),
        MixSpec(3, norm="layer", keep_mix=True, norm_bias=False),
        MixSpec(3, added=1, norm="rms", keep_mix=True, accumulate=True),
        MixSpec(0, "none", added=2, norm="rms", keep_mix=True),
        MixSpec(18, norm="rms", keep_mix=True),
    ]
    specs = sums + blocked + norms + several
    placed = [MixSpec(3, added=1), MixSpec(3, "channel", True, outputs=3), MixSpec(5, outputs=4, probe=True)]
    placed += [MixSpec(3, norm="rms", keep_mix=True, added=1, accumulate=True), MixSpec(18, scores=True)]
    if small:  # not those that the interpreter takes seconds for
        found = [Check(spec, 5, 24, F32) for spec in specs if spec.pairs <= 40]
        return found + [Check(spec, 5, 24, F32, layout) for spec in placed for layout in LAYOUTS]
    found = [Check(spec, 1000, 2048, BF16, layout) for spec in placed for layout in LAYOUTS]
    found += [Check(spec, 3000, 2048, BF16) for spec in specs]
    found += [Check(spec, 1000, 100, F32) for spec in specs]
    found += [Check(spec, 500, 8192, F16) for spec in norms]
    return found + [Check(MixSpec(n, "channel", True), 7, width, BF16) for n, width in ((2, 1), (3, 33), (32, 4096))]


def run(check: Check, device: torch.device, seed: int) -> float:
    """Forward and every gradient of ``check``.

    Returns:
        The largest error as a share of the tolerance, 0 to 1.

    Raises:
        AssertionError: a result is wrong, or differs from run to run.
    """
    torch.manual_seed(seed)
    inputs = Inputs.of(check, device)
    with _poisoned():
        first, second = inputs.results(), inputs.results()
    for name, values in first.items():
        for value, again in zip(values, second[name], strict=True):
            assert torch.equal(value, again), f"{name} differs from run to run"
    wanted = inputs.exact()
    assert first.keys() == wanted.keys()
    shares = [
        (_share(value, want, check, name, device), name)
        for name, values in first.items()
        for value, want in zip(values, wanted[name], strict=True)
    ]
    worst, name = max(shares)
    assert worst <= 1, f"{name}: the error is {worst:.3g} times what is allowed"
    return worst


def _share(value: Tensor, want: Tensor, check: Check, name: str, device: torch.device) -> float:
    """Largest error over the tolerance: one rounding of the result, and those of float32 sums.

    Behind a norm, backward starts from a mix that was rounded. The interpreter rounds to bfloat16 toward zero.
    """
    if not value.numel():
        return 0.0
    scale = max(float(want.abs().max()), 1.0)
    units = 1.01 if value.dtype == BF16 and device.type == "cpu" else 0.51
    allowed = units * torch.finfo(value.dtype).eps * want.abs() + 1e-5 * scale
    if check.spec.norm:
        allowed = allowed + 4 * max(torch.finfo(check.dtype).eps, 1e-6) * scale
    error = (value.double() - want.to(value.device)).abs() / allowed
    return float(error.max()) if bool(value.isfinite().all()) else float("inf")


@contextlib.contextmanager
def _poisoned() -> Iterator[None]:
    """``torch.empty`` and the like give NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    try:
        assert torch.empty(1).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Random tensors that a check asks for."""

    spec: MixSpec
    sources: list[Tensor]
    weights: Tensor | None
    scores: list[Tensor]
    added: list[Tensor]
    gain: Tensor | None
    bias: Tensor | None
    accumulators: list[Tensor]
    probes: list[Tensor]
    means: Tensor | None
    grads: list[Tensor]
    grad_mixes: list[Tensor]

    @classmethod
    def of(cls, check: Check, device: torch.device) -> Inputs:
        spec, n, o = check.spec, check.spec.sources, check.spec.outputs

        def draw(*shape: int, dtype: torch.dtype = F32) -> Tensor:
            return torch.randn(shape, device=device).to(dtype)

        def states(count: int, dtype: torch.dtype = check.dtype, width: int = check.width) -> list[Tensor]:
            return placed([draw(check.rows, width, dtype=dtype) for _ in range(count)], check.layout)

        shape = (o, n, check.width) if spec.weights == "channel" else (o, n)
        return cls(
            spec,
            sources=states(n),
            weights=None if spec.weights == "none" else placed([draw(*shape)], check.layout)[0],
            scores=states(o * n * spec.scores, F32, 1),
            added=states(o * spec.added),
            gain=draw(check.width, dtype=check.dtype) if spec.norm else None,
            bias=draw(check.width, dtype=check.dtype) if spec.shifted else None,
            accumulators=states(o * spec.accumulate, F32),
            probes=states(o * spec.probe),
            means=draw(n, check.rows) if spec.attended else None,
            grads=states(o),
            grad_mixes=states(o if spec.keep_mix else 0),
        )

    def forward(self) -> launch.Mixed:
        """Backward of a norm needs the mix."""
        spec = dataclasses.replace(self.spec, keep_mix=self.spec.norm is not None)
        terms = (self.sources, self.weights, self.scores, self.added)
        inputs = launch.MixInputs(*terms, self.accumulators, self.probes, self.gain, self.bias, self.means)
        if self.spec.attended:  # one tensor, each number of all rows in one piece
            table = torch.stack(self.scores).squeeze(-1).unflatten(0, (self.spec.outputs, -1))
            inputs = inputs._replace(scores=[table.movedim((0, 1), (-2, -1))])
        return launch.mix_forward(spec, inputs, eps=EPS)

    def backward(self, found: launch.Mixed) -> launch.Gradients:
        norm = (found.mixes, found.rstd, self.grad_mixes, self.gain) if self.spec.norm else ()
        inputs = launch.GradientInputs(self.grads, self.sources, self.weights, self.scores, *norm)
        return launch.mix_backward(dataclasses.replace(self.spec, probe=False, attended=False), inputs)

    def results(self) -> dict[str, list[Tensor]]:
        """Everything that the kernels return, by name."""
        found = self.forward()
        back = self.backward(found)
        names = ("sources", "weights", "scores", "added", "norm_weight", "norm_bias")
        gradients = {f"gradient of {name}": getattr(back, name) for name in names}
        if not self.spec.added or self.spec.outputs > 1:  # then it is the gradient of the result
            del gradients["gradient of added"]
        gradients["gradient of scores"] = _by_pair(back.scores)
        dots = {"weight dots": found.weight_dots, "score dots": _by_pair(found.score_dots)} if self.spec.probe else {}
        everything = {"mix": found.mixes, "norm": found.normed, **dots, **gradients}
        return {name: tensors for name, value in everything.items() if (tensors := _tensors(value))}

    def exact(self) -> dict[str, list[Tensor]]:
        """The same in float64."""

        def leaves(tensors: Sequence[Tensor | None]) -> list[Tensor]:
            return [x.double().requires_grad_() for x in tensors if x is not None]

        sources, scores, added = leaves(self.sources), leaves(self.scores), leaves(self.added)
        weights, gain, bias = leaves([self.weights]), leaves([self.gain]), leaves([self.bias])
        mixes = reference.mixes(self.spec, sources, weights[0] if weights else None, scores, added, self.accumulators)
        shift = bias[0] if bias else None
        normed = [reference.normed(self.spec, y, gain[0], shift, EPS) for y in mixes if gain]
        outputs = [*(normed or mixes), *(mixes if self.grad_mixes else ())]
        torch.autograd.backward(outputs, [g.double() for g in (*self.grads, *self.grad_mixes)])
        dots: dict[str, Any] = {}
        if self.probes:
            given = self.sources, self.probes, self.scores, self.means
            dots["weight dots"], dots["score dots"] = reference.dots(self.spec, *given)
        gradients = {
            "sources": sources, "weights": weights, "scores": scores,
            "added": added[:1] if self.spec.outputs == 1 else [],
            "norm_weight": gain, "norm_bias": bias,
        }  # fmt: skip
        found: dict[str, Any] = {"mix": mixes, "norm": normed, **dots}
        found |= {f"gradient of {name}": [x.grad for x in xs] for name, xs in gradients.items()}
        return {name: [x.detach() for x in tensors] for name, value in found.items() if (tensors := _tensors(value))}


def placed(tensors: Sequence[Tensor], layout: Layout) -> list[Tensor]:
    """The same values in that layout; in "one row for all", an expanded row, they are those of the first."""
    if layout == "in wider rows":  # between them is what must not be read
        return [torch.cat([x.new_full((*x.shape[:-1], 8), torch.nan), x], -1)[..., 8:] for x in tensors]
    if layout == "stacked":
        return list(torch.stack(list(tensors), -2).unbind(-2)) if tensors else []
    if layout == "one row for all":
        return [x[:1].expand_as(x) for x in tensors]
    if layout == "not aligned":  # one element behind where an allocation starts
        return [torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x) for x in tensors]
    if layout == "transposed":
        return [x.mT.contiguous().mT for x in tensors]
    return list(tensors)


def _by_pair(scores: Tensor | None) -> list[Tensor]:
    """[..., outputs, N] as outputs times N of [..., 1]."""
    return [] if scores is None else list(scores.flatten(-2).split(1, -1))


def _tensors(value: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(value) if isinstance(x, Tensor)]
