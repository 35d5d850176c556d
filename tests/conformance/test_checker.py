"""The checker: mistakes that are planted in correct implementations are found and named, and none where nothing is wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from conformance import planted
import pytest
import torch
from torch import Tensor, nn

from rewire.conformance import Report, check, list_schemes, of_module, reference
from rewire.conformance.known import mistaken, mistakes_of
from rewire.conformance.running import of_reference


@pytest.mark.parametrize("scheme", planted.IMPLEMENTATIONS)
def test_nothing_is_named_where_nothing_is_wrong(scheme: str) -> None:
    report = check(scheme, planted.IMPLEMENTATIONS[scheme]())
    assert report.agrees, str(report)
    assert report.looks_like == ()
    assert str(report).startswith(f"{scheme}: agrees with {reference(scheme).source}, to ")


@pytest.mark.parametrize(("scheme", "mistake", "says"), planted.PLANTED)
def test_planted_mistakes_are_found_and_named(scheme: str, mistake: str, says: str) -> None:
    report = check(scheme, planted.IMPLEMENTATIONS[scheme](mistake), dtypes=[torch.float32])
    assert not report.agrees
    assert report.looks_like == (says,), str(report)
    assert f"Looks like: {says} (then " in str(report)
    assert report.then < 1e-3
