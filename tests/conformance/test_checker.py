"""The checker names mistakes that are planted in correct implementations, and none where all is right."""

from __future__ import annotations

import dataclasses
import doctest
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from conformance import planted
from torch import Tensor, nn

import rewire
from rewire.conformance import check, list_schemes, of_module, reference, write
from rewire.conformance.cases import cases
from rewire.conformance.checker import in_words
from rewire.conformance.known import mistaken, mistakes_of
from rewire.conformance.running import of_reference, run

#: Those that take long: a known mistake of mHC is told from fifty others.
LONG = [pytest.param(*one, marks=pytest.mark.slow if one[0] == "mhc" else ()) for one in planted.PLANTED]


@pytest.mark.parametrize("scheme", planted.IMPLEMENTATIONS)
def test_nothing_is_named_where_nothing_is_wrong(scheme: str) -> None:
    report = check(scheme, planted.IMPLEMENTATIONS[scheme]())
    assert report.agrees, str(report)
    assert report.looks_like == ()
    assert str(report).startswith(f"{scheme}: agrees with {reference(scheme).source}, to ")
    assert str(report).endswith(" in float32 and within rounding in bfloat16.")


@pytest.mark.parametrize(("scheme", "mistake", "says"), LONG)
def test_planted_mistakes_are_found_and_named(scheme: str, mistake: str, says: str) -> None:
    report = check(scheme, planted.IMPLEMENTATIONS[scheme](mistake), dtypes=[torch.float32])
    assert not report.agrees
    assert report.looks_like == (says,), str(report)
    assert f"Looks like: {says} (then " in str(report)
    assert report.then < 1e-3


def test_how_many_are_planted() -> None:
    assert len(planted.PLANTED) >= 20
    assert len({says for _, _, says in planted.PLANTED}) >= 20


def test_where_values_part_is_told_first() -> None:
    report = check("attnres", planted.attnres("no norm"), dtypes=[torch.float32])
    first = next(one for one in report.differences if one.case == "typical")
    assert in_words(first.what) == "what unit 2 reads"  # unit 1 has one source
    assert "what unit 2 reads differs by " in str(report)


def test_what_no_mistake_explains_is_not_named() -> None:
    def odd(x: Tensor, weights: Mapping[str, Tensor], branches: Sequence[Any]) -> Tensor:
        return planted.attnres()(x, weights, branches) + 0.01 * x.detach() ** 2

    report = check("attnres", odd, dtypes=[torch.float32])
    assert not report.agrees and report.looks_like == ()
    assert str(report).endswith("It looks like none of the known mistakes.")


def test_two_mistakes_at_once() -> None:
    def both(x: Tensor, weights: Mapping[str, Tensor], branches: Sequence[Any]) -> Tensor:
        shifted = {
            name: value[[0, *range(len(value) - 1)]] for name, value in weights.items()
        }  # those of the unit before
        return planted.attnres("scaled scores")(x, shifted, branches)

    report = check("attnres", both, dtypes=[torch.float32])
    names = ("scores are divided by the root of the width", "the query of the unit before is used")
    assert report.looks_like == (" And: ".join(names),), str(report)


def test_gradients_that_are_a_multiple_of_what_they_should_be() -> None:
    def twice(x: Tensor, weights: Mapping[str, Tensor], branches: Sequence[Any]) -> Tensor:
        for alpha, branch in zip(weights["alpha"], branches, strict=True):
            x = x + (2 * alpha - alpha.detach()) * branch(x)
        return x

    report = check("rezero", twice, dtypes=[torch.float32])
    assert {in_words(one.what) for one in report.differences} == {"the gradient of alpha"}
    assert "the gradient of alpha differs by 1 in the case 'typical', float32" in str(report)
    assert "it is 2 times what it should be" in str(report)


def test_what_is_missing_is_said() -> None:
    def constant(x: Tensor, weights: Mapping[str, Tensor], branches: Sequence[Any]) -> Tensor:
        for alpha, branch in zip(weights["alpha"].detach(), branches, strict=True):
            x = x + alpha * branch(x)
        return x

    assert "there is none" in str(check("rezero", constant, dtypes=[torch.float32]))


def test_what_shows_in_low_precision_alone() -> None:
    """As where a kernel has another path for it."""

    def other(x: Tensor, weights: Mapping[str, Tensor], branches: Sequence[Any]) -> Tensor:
        return planted.attnres("no norm" if x.dtype == torch.bfloat16 else "")(x, weights, branches)  # type: ignore[no-any-return]

    report = check("attnres", other)
    assert {one.dtype for one in report.differences} == {torch.bfloat16}
    assert report.looks_like == ("keys are not normed",), str(report)


def test_branches_say_what_they_take() -> None:
    def plain(x: Tensor, weights: Mapping[str, Tensor], branches: Sequence[Any]) -> Tensor:
        return sum((branch(x) for branch in branches), x)

    with pytest.raises(
        TypeError, match="this branch takes queries, keys, values, residual, and was called with 1"
    ) as at:
        check("dca", plain)
    assert "in the case 'typical' of a conformance check, float32" in at.value.__notes__[0]


class Rezero(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, branches: Sequence[Any]) -> Tensor:
        for scale, branch in zip(self.scale, branches, strict=True):
            x = x + scale.to(x.dtype) / 2 * branch(x)
        return x


def test_modules() -> None:
    assert check("rezero", of_module(Rezero(), {"scale": lambda weights: 2 * weights["alpha"]})).agrees
    assert not check("rezero", of_module(Rezero(), {"scale": "alpha"})).agrees


@pytest.mark.parametrize("public", [check, of_module, list_schemes, write], ids=lambda one: one.__name__)
def test_examples(public: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (test,) = doctest.DocTestFinder().find(public, globs={"rewire": rewire, "torch": torch})
    assert test.examples and doctest.DocTestRunner().run(test).failed == 0


@pytest.mark.parametrize("name", list_schemes())
def test_mistakes_change_what_stands_in_the_reference(name: str) -> None:
    known = reference(name)
    for mistake in mistakes_of(known.file):
        wrong = mistaken(known, [mistake])
        assert wrong is not None and wrong.text != known.text, mistake.says
        compile(wrong.text, known.file, "exec")


@pytest.mark.slow
@pytest.mark.parametrize("name", list_schemes())
def test_known_mistakes_are_told_apart(name: str) -> None:
    """Each, made in the reference, is found where it changes anything, and named.

    Of the fifty about mHC, whose runs take longest, every third is tried.
    """
    known = reference(name)
    mistakes = mistakes_of(known.file)[:: 3 if name == "mhc" else 1]
    options = known.with_options({})
    case = max(cases(known, {}), key=lambda case: case.depth)
    right = run(of_reference(known, options), case, torch.float64)
    for mistake in mistakes:
        wrong = mistaken(known, [mistake])
        assert wrong is not None
        values = run(of_reference(wrong, options), case, torch.float64)
        if values.keys() == right.keys() and all(torch.allclose(values[what], v) for what, v in right.items()):
            continue  # it is about other options
        report = check(name, of_reference(wrong, options), dtypes=[torch.float32])
        assert report.looks_like == (mistake.says,), str(report)


def test_cases_hold_numbers_that_bfloat16_holds() -> None:
    for case in cases(reference("mhc"), {}):
        for value in (case.x, case.upstream, case.outer, *case.inner, *case.weights.values()):
            assert torch.equal(value.bfloat16().double(), value)
    assert dataclasses.is_dataclass(case)
