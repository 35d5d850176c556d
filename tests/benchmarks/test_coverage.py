"""Models written by hand, in the style of well-known repositories, stay connected."""

from __future__ import annotations

from pathlib import Path

import pytest

import rewire

FOLDER = str(Path(__file__).parents[2] / "benchmarks" / "coverage")
#: Those that are not connected: the stream of the first is the attribute of an object, the others have none.
NOT_CONNECTED = {"GraphGPS", "torchscale DeepNorm", "x-transformers cross", "Set Transformer"}


@pytest.mark.slow
def test_models_in_the_wild(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that docs/coverage.md counts as connected came to be refused, and no test noticed."""
    monkeypatch.syspath_prepend(FOLDER)
    from wild import WILD

    reasons: dict[str, str] = {}
    for name, make in WILD.items():
        model, inputs = make()
        try:
            rewire.compile(model.eval(), "ancre-ingoing", example_inputs=inputs)
        except Exception as error:
            reasons[name] = f"{type(error).__name__}: {error}"
    assert reasons.keys() == NOT_CONNECTED, reasons
