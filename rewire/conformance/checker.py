"""Whether an implementation computes a scheme; if not, where it parts from the reference, and what that looks like."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rewire.conformance.cases import Case, cases
from rewire.conformance.mistakes import Mistake, mistaken, mistakes_of
from rewire.conformance.running import Implementation, of_reference, run
from rewire.conformance.schemes import Reference, reference

#: For each precision: how many times the error of careful rounding is allowed, and what is always.
_ALLOWED = {torch.float64: (16.0, 1e-12), torch.float32: (16.0, 4e-6), torch.bfloat16: (3.0, 0.008)}
_SMALLEST = 1e-3  # errors are relative to a tensor, or to this share of the largest of its kind
Values = dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class Difference:
    """A value that is not what the reference computes.

    Attributes:
        case: of `rewire.conformance.cases`.
        dtype: of hidden states.
        what: which value.
        error: how far off it is, relative to its size.
        allowed: how far off it may be.
        remark: what else is to be said.
    """

    case: str
    dtype: torch.dtype
    what: str
    error: float
    allowed: float
    remark: str = ""

    def __str__(self) -> str:
        remark = f"; {self.remark}" if self.remark else ""
        return (
            f"{self.what} differs by {self.error:.1g} in the case '{self.case}', {_name(self.dtype)} (rounding explains "
            f"{self.allowed:.1g}){remark}"
        )


@dataclasses.dataclass(frozen=True)
class Report:
    """What a check found.

    Attributes:
        scheme: its name.
        source: the paper.
        options: those that were given.
        errors: for each precision, the largest error of all values.
        differences: values that differ, for each case and precision the first one and then the others.
        looks_like: known mistakes with which the reference computes the same; of several, each does.
        then: the largest error that is left with the first of them.
    """

    scheme: str
    source: str
    options: Mapping[str, Any]
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
            reached = ", ".join(f"to {error:.1g} in {_name(dtype)}" for dtype, error in self.errors.items())
            return f"{title}: agrees with {self.source} {reached}."
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
    **options: Any,
) -> Report:
    """Compare an implementation with the reference of a scheme.

    Args:
        scheme: a name of `list_schemes`.
        implementation: called as ``implementation(x, weights, branches)``: x [.., D] are hidden states; weights are
            tensors by name, as the reference names and lays them out (its page shows them), for all T units;
            ``branches[t - 1](read)`` is what unit t computes. Of units that begin with an attention
            (``branch.attention``), where the scheme makes a difference, it is called with q, k, v and what else reads
            there. Returns the output [.., D].
        dtypes: of hidden states. Weights are float32 (float64 for float64).
        device: where it is run.
        options: of the scheme, if the implementation has others than the paper's.

    Returns:
        What was found; it prints as a few sentences.

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
    tried = cases(known, options)
    results = {dtype: [_tried(implementation, case, dtype, device) for case in tried] for dtype in dtypes}
    errors: dict[torch.dtype, float] = {}
    differences: list[Difference] = []
    for dtype, values in results.items():
        found, errors[dtype] = _judged(known, tried, values, dtype)
        differences += found
    names, then = _named(known, tried, results, differences) if differences else ((), 0.0)
    return Report(scheme, known.source, options, errors, tuple(differences), names, then)


def _tried(implementation: Implementation, case: Case, dtype: torch.dtype, device: str) -> Values:
    try:
        return run(implementation, case, dtype, device)
    except Exception as error:
        error.add_note(f"It was raised in the case '{case.name}' of a conformance check, {_name(dtype)}.")
        raise


def _judged(
    known: Reference, tried: Sequence[Case], results: Sequence[Values], dtype: torch.dtype
) -> tuple[list[Difference], float]:
    """What differs, case by case; and the largest error of all."""
    found, largest = list[Difference](), 0.0
    for case, got in zip(tried, results, strict=True):
        want, allowed = expected(known, case, dtype)
        errors = _errors(want, got)
        largest = max(largest, *errors.values())
        for what, error in errors.items():
            if not error <= allowed[what]:
                found.append(Difference(case.name, dtype, what, error, allowed[what], _remark(want[what], got.get(what))))
    return found, largest


def expected(known: Reference, case: Case, dtype: torch.dtype) -> tuple[Values, dict[str, float]]:
    """What the reference computes in float64, and by how much values may differ that are stored in ``dtype``."""
    want = run(of_reference(known, case.options), case, torch.float64)
    factor, always = _ALLOWED[dtype]
    if dtype == torch.float64:
        return want, dict.fromkeys(want, always)
    rounded = of_reference(known, case.options, lambda state: state.to(dtype).to(state.dtype))
    errors = _errors(want, run(rounded, case, dtype, low=True))
    return want, {what: max(factor * error, always) for what, error in errors.items()}


def _errors(want: Values, got: Values) -> dict[str, float]:
    """How far each value is off; of one that is missing, as if it were zero."""
    sizes = {what: float(value.norm()) for what, value in want.items()}
    largest = {kind: max((s for what, s in sizes.items() if _kind(what) == kind), default=0.0) for kind in (True, False)}
    found = {}
    for what, value in want.items():
        other = got.get(what, torch.zeros_like(value))
        size = max(sizes[what], _SMALLEST * largest[_kind(what)])
        off = float((other - value).norm()) if other.shape == value.shape else float("inf")
        off = off if off == off else float("inf")  # not a number
        found[what] = off / size if size else (0.0 if off == 0 else float("inf"))
    return found


def _kind(what: str) -> bool:
    return what.startswith("the gradient of")


def _remark(want: Tensor, got: Tensor | None) -> str:
    if got is None:
        return "there is none"
    if got.shape != want.shape:
        return f"its shape is {list(got.shape)}, not {list(want.shape)}"
    if not got.isfinite().all():
        return "it is not finite"
    factor = float((got * want).sum() / (want * want).sum())
    if factor and float((got - factor * want).norm()) < 1e-3 * float(got.norm()):
        return f"it is {factor:.3g} times what it should be"
    return ""


# -- names of mistakes -------------------------------------------------------------------------------------------------


def _named(
    known: Reference,
    tried: Sequence[Case],
    results: Mapping[torch.dtype, Sequence[Values]],
    differences: Sequence[Difference],
) -> tuple[tuple[str, ...], float]:
    """The mistakes with which the reference computes the same; alone, or else two at once."""
    dtype = differences[0].dtype
    wrong = {one.case for one in differences if one.dtype == dtype}
    # A case that differs comes first: most mistakes are ruled out by it alone.
    order = sorted(range(len(tried)), key=lambda n: tried[n].name not in wrong)
    ordered, values = [tried[n] for n in order], [results[dtype][n] for n in order]
    possible = mistakes_of(known.file)
    for number in (1, 2):
        names, then = [], 0.0
        for chosen in itertools.combinations(possible, number):
            error = _with(known, chosen, ordered, values, dtype)
            if error is not None:
                then = then or error
                names.append(" And: ".join(mistake.says for mistake in chosen))
        if names:
            return tuple(names), then
    return (), 0.0


def _with(
    known: Reference, chosen: Sequence[Mistake], tried: Sequence[Case], results: Sequence[Values], dtype: torch.dtype
) -> float | None:
    """The largest error that these mistakes leave; None if they do not explain everything."""
    wrong, largest = mistaken(known, chosen), 0.0
    if wrong is None:
        return None
    for case, got in zip(tried, results, strict=True):
        try:
            found, error = _judged(wrong, [case], [got], dtype)
        except (RuntimeError, IndexError, ValueError):  # shapes that the mistake does not fit
            return None
        if found:
            return None
        largest = max(largest, error)
    return largest


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
