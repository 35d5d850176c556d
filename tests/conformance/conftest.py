from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rewire.conformance import checker
from rewire.conformance.cases import Case
from rewire.conformance.schemes import Reference


@pytest.fixture(scope="session", autouse=True)
def computed_once() -> Iterator[None]:
    """What a reference computes, and how far rounding takes it, is computed once: that takes most of a check's time."""

    def once(compute: Callable[..., Any]) -> Callable[..., Any]:
        known: dict[Any, Any] = {}

        def kept(reference: Reference, case: Case, *given: Any) -> Any:
            dtype = given[-1] if given else None
            key = reference.name, reference.text, case.name, repr(case.options), dtype
            if key not in known:
                known[key] = compute(reference, case, *given)
            return dict(known[key])

        return kept

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checker, "exactly", once(checker.exactly))
        patch.setattr(checker, "allowed", once(checker.allowed))
        yield
