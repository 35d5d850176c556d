"""What topologies with groups hold at most: as docs/scale.md says, in hidden states."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

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

#: How much more is kept than by the plain model, in percent of that: with norms of several operations, and of one.
MORE = {
    "ancre-ingoing": (0.0, 0.0),
    "ancre-outgoing": (0.0, 0.0),
    "ancre-none": (0.0, 0.0),
    "ancre-constant": (0.0, 0.0),
    "ancre-cascaded": (-13.8, 0.0),
    "denseformer": (-12.9, 1.0),
    "x0-lambdas": (-13.8, 0.0),
    "unet": (-6.9, 0.0),
    "fixed-scale": (-13.8, 0.0),
    "rezero": (-12.1, 2.0),
    "skipinit": (-12.1, 2.0),
    "layerscale": (-12.1, 2.0),
    "residual-scale": (-13.8, 0.0),
    "variance-gate": (-12.1, 2.0),
    "gpas": (-12.1, 2.0),
    "ddl": (-11.8, 2.3),
    "orthogonal": (-12.0, 2.1),
    "review": (1.8, 18.0),
    "laurel-lr": (-13.6, 0.2),
    "laurel-lr total=2.0": (-11.8, 2.2),
    "laurel-pa": (-13.6, 0.2),
    "laurel-pa total=2.0": (-11.8, 2.2),
    "laurel-rw": (-12.1, 2.0),
    "grn-v1": (-12.9, 1.0),
    "grn-v2": (-12.9, 1.0),
    "ancre-ingoing block=4": (0.0, 0.0),
    "denseformer block=4": (-12.9, 1.0),
    "grn-v1 block=4": (-12.9, 1.0),
    "grn-v3": (-12.8, 1.1),
    "grn-v3 block=4": (-12.9, 1.0),
    "dca": (-19.6, -6.7),
    "dca block=4": (-19.7, -6.8),
    "muddformer": (-19.0, -6.0),
    "muddformer block=4": (-19.4, -6.5),
    "attnres": (-12.3, 1.7),
    "attnres block=4": (-12.6, 1.3),
    "attnres qkv=True": (-18.3, -5.2),
    "muddformer norms=True": (-19.0, -6.0),
    "hc-static": (-8.9, 5.6),
    "hc-dynamic": (-6.3, 8.7),
    "hc-gated": (-7.3, 7.5),
    "mhc": (-6.8, 8.1),
    "frac-hc": (-7.6, 7.2),
    "multi-gate": (-8.7, 5.9),
    "two-lanes": (-11.0, 3.2),
}


@pytest.mark.slow
@pytest.mark.parametrize("layer_norms", [False, True])
def test_what_is_kept_for_backward(script: Any, layer_norms: bool) -> None:
    """Nothing keeps more than it did, nor so much less that these numbers would not show when it keeps more again."""
    before, rows = script.without_checkpointing(LAYERS, layer_norms, WIDE, FEW)
    found = {script.label_of(row): round(100 * row["kept"] / before, 1) for row in rows}
    wanted = {name: more[layer_norms] for name, more in MORE.items()}
    assert {name: (more, wanted[name]) for name, more in found.items() if abs(more - wanted[name]) > 0.3} == {}
    assert found.keys() == wanted.keys()
    assert [name for name, more in found.items() if more > 10] == (["review"] if layer_norms else [])


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kept", "most"), [("hc-static", 4 + 1, 12), ("hc-dynamic", 4, 10), ("two-lanes", 2 + 1, 6)]
)
def test_checkpoints_keep_streams(script: Any, name: str, kept: int, most: int) -> None:
    """And what the next layer reads of them, where that is made with them; little comes on top."""
    extra = script.measure(name, {}, script.peak(script.llama()))["extra peak"]
    assert extra - (kept - 1) * script.LAYERS <= most
