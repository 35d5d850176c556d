"""What topologies with groups hold at most: as docs/scale.md says, in hidden states."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

import rewire
from rewire.kernels.cpu import plain

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(plain, "WORTHWHILE", 0)
    return importlib.import_module("memory")


def test_the_most_that_lives_at_once(script: Any) -> None:
    """Of 4 kB each: x, and then twice x and the sum, or a view of it; the product is freed."""
    with script.Peak() as counted:
        x = torch.zeros(1000)
        y = (2 * x) + (3 * x)
        del x
        assert (counted.most, counted.bytes) == (16000, 4000)
        z = y[:10]
    assert (counted.most, counted.bytes, len(z)) == (16000, 4000, 10)


LAYERS, WIDE, FEW = 8, 512, 64


@pytest.mark.slow
@pytest.mark.parametrize("layer_norms", [False, True])
def test_what_is_kept_for_backward(script: Any, layer_norms: bool) -> None:
    """Nothing keeps a tenth more than the plain model, whether norms are several operations or one."""

    def net() -> Any:
        return script.llama(LAYERS, WIDE, False, layer_norms)

    before, _ = script.kept(net(), FEW)
    found = {}
    for name, options in script.KEPT:
        rewired = rewire.compile(net(), name, start="paper", validate=False, **options)
        found[f"{name} {options}"] = script.kept(rewired, FEW)[0] / before - 1
    assert {name: more for name, more in found.items() if more > 0.1} == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "most"),
    [
        *((name, 8) for name in ("ancre-ingoing", "ancre-outgoing", "ancre-none", "ancre-constant", "denseformer")),
        *((name, 8) for name in ("grn-v1", "grn-v2")),
        ("grn-v3", 8 + 0.5),  # its weights as the formulas have them are copies of what is stored
        ("attnres", 8 + 7),  # gradients of a group's eight reads wait for each other
        # the layer that is computed again has two more reads, and what its norm keeps of each: 6
        ("muddformer", 8 + 6),
        ("dca", 8 + 6 + 2 + 0.6),  # and gradients of two reads wait; copies of weights as above
    ],
)
def test_groups_of_eight(script: Any, name: str, most: float) -> None:
    row = script.measure(name, {"block": 8}, script.peak(script.llama()), start="paper")
    assert row["extra peak"] <= most
    assert row["boundary"] == 5  # x_0, three groups, and the current one


@pytest.mark.slow
def test_last_makes_few_sums(script: Any) -> None:
    assert script.measure("grn-v3", {"last": 4}, script.peak(script.llama()))["extra peak"] <= 16
