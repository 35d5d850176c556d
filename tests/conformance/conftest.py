from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rewire.conformance import checker
from rewire.conformance.cases import Case
from rewire.conformance.schemes import Reference


@pytest.fixture(scope="session", autouse=True)
def expected_once() -> Iterator[None]:
    """What a reference computes, and how far rounding takes it, is computed once: that takes most of a check's time."""
    known: dict[Any, Any] = {}
    compute = checker.expected

    def expected(reference: Reference, case: Case, dtype: torch.dtype) -> Any:
        key = reference.name, reference.text, case.name, repr(case.options), dtype
        if key not in known:
            known[key] = compute(reference, case, dtype)
        want, allowed = known[key]
        return dict(want), dict(allowed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checker, "expected", expected)
        yield
