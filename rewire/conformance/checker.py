"""The checker: whether an implementation computes a scheme; if not, where it differs, and by which mistake."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rewire.conformance.cases import KINDS, Case, cases
from rewire.conformance.known import Mistake, mistaken, mistakes_of
from rewire.conformance.running import Implementation, Rounding, of_reference, run
from rewire.conformance.schemes import Options, Reference, reference


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """How much values may differ in a precision.

    Attributes:
        own: times the error of careful rounding in the value itself.
        kind: times the largest such error of the outputs, or of the gradients.
        always: error that is always allowed in outputs, and in gradients.
        draws: number of attempts at rounding, each in another way.
        smallest: errors are relative to the value, or to this share of the largest of its kind.
        named: error that a value may have beside the reference with a named mistake.
        better: that mistake's errors are at most this share of those without it.
    """

    own: float
    kind: float
    always: tuple[float, float]
    draws: int
    smallest: float
    named: float
    better: float


TOLERANCES = {
    torch.float64: Tolerance(own=0, kind=0, always=(1e-11, 1e-11), draws=0, smallest=1e-3, named=32, better=0.1),
    torch.float32: Tolerance(own=16, kind=1, always=(1e-5, 1e-5), draws=1, smallest=1e-3, named=32, better=0.1),
    torch.bfloat16: Tolerance(own=4, kind=2, always=(0.012, 0.05), draws=3, smallest=0.2, named=1.5, better=0.5),
}
_ZERO = 1e-6  # values below this share of the largest are measured by the largest
_PARTLY = 4  # candidates for pairs of mistakes
_ALIKE = 10.0  # mistakes are reported if they leave at most this many times the error of the best one
Values = dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class Difference:
    """A value that is not what the reference computes.

    Attributes:
        case: of `rewire.conformance.cases`.
        dtype: of hidden states.
        what: the value's name, as in `rewire.conformance.running.run`.
        error: its error, relative to its size.
        allowed: the largest error that is allowed.
        remark: further remarks.
    """

    case: str
    dtype: torch.dtype
    what: str
    error: float
    allowed: float
    remark: str = ""

    def __str__(self) -> str:
        where = f"in the case '{self.case}', {_name(self.dtype)}"
        remark = f"; {self.remark}" if self.remark else ""
        return (
            f"{in_words(self.what)} differs by {self.error:.1g} {where} (rounding explains {self.allowed:.1g}){remark}"
        )


@dataclasses.dataclass(frozen=True)
class Report:
    """The result of a check.

    Attributes:
        scheme: its name.
        source: the paper.
        options: the given options.
        errors: for each precision, the largest error of all values.
        differences: values that differ: the first one of each case and precision, and then the others.
        looks_like: known mistakes with which the reference computes the same; of several, each does.
        then: the largest error that is left with the first of them.
    """

    scheme: str
    source: str
    options: Options
    errors: Mapping[torch.dtype, float]
    differences: Sequence[Difference] = ()
    looks_like: Sequence[str] = ()
    then: float = 0.0

    @property
    def agrees(self) -> bool:
        return not self.differences

    def __str__(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self.options.items())
        title = f"{self.scheme}{options}"
        if self.agrees:
            reached = " and ".join(_reached(dtype, error) for dtype, error in self.errors.items())
            return f"{title}: agrees with {self.source}, {reached}."
        lines = [f"{title}: differs from {self.source}."]
        firsts = {(one.dtype, one.case): one for one in reversed(self.differences)}
        lines += [f"  {one}" for one in reversed(firsts.values())]
        if self.looks_like:
            lines.append(f"Looks like: {' Or: '.join(self.looks_like)} (then {self.then:.1g}).")
        else:
            lines.append("It looks like none of the known mistakes.")
        return "\n".join(lines)


def check(
    scheme: str,
    implementation: Implementation,
    *,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
    device: str = "cpu",
    **options: object,
) -> Report:
    """Compare an implementation with the reference of a scheme.

    Args:
        scheme: a name of `list_schemes`.
        implementation: called as ``implementation(x, weights, branches)``: x [.., D] are hidden states; weights are
            tensors by name, as the reference names and lays them out (its page shows them), for all T units;
            ``branches[t - 1](read)`` is what unit t computes. If the scheme treats units that begin with an attention
            differently (``branch.attention``), these branches are called with q, k, v and the residual's read. Returns
            the output [.., D].
        dtypes: of hidden states. Weights are float32 (float64 for float64).
        device: where to run it.
        options: of the scheme, if the implementation has others than the paper's.

    Returns:
        A report, which prints as a few sentences.

    Raises:
        UnknownName: there is no such scheme, or no such option.

    Example:
        >>> def rezero(x, weights, branches):
        ...     for alpha, branch in zip(weights["alpha"], branches):
        ...         x = x + alpha.to(x.dtype) * branch(x)
        ...     return x
        >>> rewire.conformance.check("rezero", rezero).agrees
        True
    """
    known = reference(scheme)
    errors: dict[torch.dtype, float] = {}
    differences, names, then = list[Difference](), tuple[str, ...](), 0.0
    exact = {case: exactly(known, case) for case in cases(known, options)}
    for dtype in dtypes:
        trials = [
            Trial(case, want, allowed(known, case, want, dtype), _tried(implementation, case, dtype, device))
            for case, want in exact.items()
            if KINDS[case.name].low or dtype != torch.bfloat16
        ]
        found = [one for trial in trials for one in trial.differences(dtype)]
        errors[dtype] = max(error for trial in trials for error in _errors(trial.want, trial.got, dtype).values())
        differences += found
        if found and not names:
            names, then = _named(known, trials, dtype)
    return Report(scheme, known.source, options, errors, tuple(differences), names, then)


@dataclasses.dataclass(frozen=True, eq=False)
class Trial:
    """An implementation on one case.

    Attributes:
        case: the case.
        want: the reference's values.
        allowed: how much values may differ.
        got: the implementation's values.
    """

    case: Case
    want: Values
    allowed: Mapping[str, float]
    got: Values

    def excess(self, errors: Mapping[str, float]) -> float:
        """The largest error, as a multiple of what is allowed."""
        return max(error / self.allowed[what] for what, error in errors.items())

    def differences(self, dtype: torch.dtype) -> list[Difference]:
        errors = _errors(self.want, self.got, dtype).items()
        return [
            Difference(
                *(self.case.name, dtype, what, error, self.allowed[what]),
                _remark(self.want[what], self.got.get(what)),
            )
            for what, error in errors
            if not error <= self.allowed[what]
        ]


def _tried(implementation: Implementation, case: Case, dtype: torch.dtype, device: str) -> Values:
    try:
        return run(implementation, case, dtype, device)
    except Exception as error:
        error.add_note(
            f"It was raised in the case '{case.name}' of a conformance check, {_name(dtype)}. It calls implementations "
            "as f(x, weights, branches)."
        )
        raise


def exactly(known: Reference, case: Case) -> Values:
    """The reference's values in float64."""
    return run(of_reference(known, case.options), case, torch.float64)


def allowed(known: Reference, case: Case, want: Values, dtype: torch.dtype) -> dict[str, float]:
    """How much values that are stored in ``dtype`` may differ."""
    errors, tolerance = dict.fromkeys(want, 0.0), TOLERANCES[dtype]
    for seed in range(tolerance.draws):  # one attempt says little about a small tensor
        rounded = Rounding(dtype, seed)
        found = _errors(want, run(of_reference(known, case.options, rounded), case, dtype, rounded=rounded), dtype)
        errors = {what: max(error, found[what]) for what, error in errors.items()}
    most = _largest(errors)
    return {
        what: max(tolerance.own * error, tolerance.kind * most[_kind(what)], tolerance.always[_kind(what)])
        for what, error in errors.items()
    }


def _errors(want: Values, got: Values, dtype: torch.dtype) -> dict[str, float]:
    """The error of each value; a missing value counts as zero."""
    sizes = {what: float(value.norm()) for what, value in want.items()}
    largest, found = _largest(sizes), {}
    for what, value in want.items():
        other, most = got.get(what, torch.zeros_like(value)), largest[_kind(what)]
        size = most if sizes[what] <= _ZERO * most else max(sizes[what], TOLERANCES[dtype].smallest * most)
        off = float((other - value).norm()) if other.shape == value.shape else math.inf
        off = math.inf if math.isnan(off) else off
        found[what] = off / size if size else (math.inf if off else 0.0)
    return found


def _largest(numbers: Mapping[str, float]) -> dict[bool, float]:
    """The largest number of gradients (True), and of all others."""
    return {
        kind: max((number for what, number in numbers.items() if _kind(what) == kind), default=0.0)
        for kind in (True, False)
    }


def _kind(what: str) -> bool:
    return what.startswith("gradient.")


def _remark(want: Tensor, got: Tensor | None) -> str:
    if got is None:
        return "there is none"
    if got.shape != want.shape:
        return f"its shape is {list(got.shape)}, not {list(want.shape)}"
    if not got.isfinite().all():
        return "it is not finite"
    factor = float((got * want).sum() / (want * want).sum())
    if abs(factor) > 1e-3 and abs(factor - 1) > 1e-2 and float((got - factor * want).norm()) < 1e-3 * float(got.norm()):
        return f"it is {factor:.3g} times what it should be"
    return ""


def _named(known: Reference, trials: Sequence[Trial], dtype: torch.dtype) -> tuple[tuple[str, ...], float]:
    """The mistakes with which the reference computes the same, and the largest error that the best one leaves."""
    # Cases that differ come first, the smallest in front: most mistakes are ruled out by one of them.
    ordered = sorted(trials, key=lambda trial: (not trial.differences(dtype), trial.case.x.numel() * trial.case.depth))
    possible = mistakes_of(known.file)
    found = _explaining(known, [(one,) for one in possible], ordered, dtype)
    if not found:
        # Pairs of mistakes that contain one of those that explain most by themselves.
        parts = {one: _explained(known, one, ordered[0], dtype) for one in possible}
        partly = sorted((one for one in possible if parts[one] > 0), key=parts.__getitem__)[-_PARTLY:]
        pairs = {frozenset((one, other)): (one, other) for one in partly for other in possible if one != other}
        found = _explaining(known, list(pairs.values()), ordered, dtype)
    if not found:
        return (), 0.0
    best = min(found.values())
    return tuple(says for says in sorted(found, key=found.__getitem__) if found[says] <= _ALIKE * best), best


def _explaining(
    known: Reference, candidates: Sequence[Sequence[Mistake]], trials: Sequence[Trial], dtype: torch.dtype
) -> dict[str, float]:
    """The mistakes that explain all differences, in words -> the largest error that is left."""
    before = max(trial.excess(_errors(trial.want, trial.got, dtype)) for trial in trials)
    limit = min(TOLERANCES[dtype].named, TOLERANCES[dtype].better * before)
    found = {}
    for chosen in candidates:
        wrong, left = mistaken(known, chosen), 0.0
        for trial in trials:
            errors = _with(wrong, trial, dtype)
            if errors is None or trial.excess(errors) > limit:
                break
            left = max(left, *errors.values())
        else:
            found[" And: ".join(one.says for one in chosen)] = left
    return found


def _explained(known: Reference, mistake: Mistake, trial: Trial, dtype: torch.dtype) -> int:
    """The number of values that agree only with this mistake."""
    errors = _with(mistaken(known, [mistake]), trial, dtype)
    if errors is None:
        return 0
    agreeing = sum(error <= TOLERANCES[dtype].named * trial.allowed[what] for what, error in errors.items())
    return agreeing - len(trial.want) + len(trial.differences(dtype))


def _with(wrong: Reference | None, trial: Trial, dtype: torch.dtype) -> dict[str, float] | None:
    """Errors beside the values of a mistaken reference; None if it does not run."""
    if wrong is None:
        return None
    try:
        want = run(of_reference(wrong, trial.case.options), trial.case, torch.float64)
    except (RuntimeError, LookupError, ValueError):  # shapes and weights do not fit the mistake
        return None
    # Values that a mistake leaves without a gradient have a gradient of zero.
    want = {what: want.get(what, torch.zeros_like(value)) for what, value in trial.want.items()}
    return _errors(want, trial.got, dtype)


def in_words(what: str) -> str:
    """The name of a value, for people."""
    kind, _, name = what.rpartition("again.")[2].partition(".")
    if kind == "gradient":
        return f"the gradient of {name}"
    if kind == "output":
        return "the output"
    unit, _, way = name.partition(".")
    again = ", called once more," if what.startswith("again.") else ""
    return f"what unit {unit}{again} reads" + (f" for the {way}" if way else "")


def _reached(dtype: torch.dtype, error: float) -> str:
    return "within rounding in bfloat16" if dtype == torch.bfloat16 else f"to {error:.1g} in {_name(dtype)}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
