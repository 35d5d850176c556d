"""Models written by hand, in the style of well-known repositories, stay connected."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import rewire

ROOT = Path(__file__).parents[2]


def without_a_stream() -> set[str]:
    """The models written by hand that docs/coverage.md says have no stream to connect."""
    page = (ROOT / "docs" / "coverage.md").read_text()
    named = re.search(r"## wild\n+Not counted, no stream \(\d+\): (.+)\.", page)
    assert named
    return set(named[1].split(", "))


@pytest.mark.slow
def test_models_in_the_wild(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that docs/coverage.md counts as connected came to be refused, and no test noticed."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "coverage"))
    from wild import WILD

    reasons: dict[str, str] = {}
    for name, make in WILD.items():
        model, inputs = make()
        try:
            rewire.compile(model.eval(), "ancre-ingoing", example_inputs=inputs)
        except Exception as error:
            reasons[name] = f"{type(error).__name__}: {error}"
    assert reasons.keys() == without_a_stream(), reasons
