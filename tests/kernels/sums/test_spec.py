from __future__ import annotations

from typing import Any

import pytest

from rewire.kernels.sums.spec import FAN_IN, MAX_PAIRS, MixSpec, Weights


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"sources": 0}, "leaves nothing to sum"),
        ({"sources": 0, "added": 1}, "without sources there is nothing that weights"),
        ({"sources": 2, "weights": "row"}, "weights='row' is none of"),
        ({"sources": 2, "norm": "batch"}, "norm='batch' is none of"),
        ({"sources": 2, "outputs": 9}, "outputs=9 is not between 1 and 8"),
        ({"sources": 2, "added": 5}, "added=5"),
        ({"sources": 2, "outputs": 3, "norm": "rms"}, "a norm follows one output"),
        ({"sources": 2, "outputs": 3, "weights": "none"}, "several outputs need"),
        ({"sources": 2, "norm_bias": False}, "norm_bias is for"),
        ({"sources": 2, "keep_mix": True}, "keep_mix is for mixes with a norm"),
        ({"sources": 2, "probe": True, "norm": "rms"}, "without a norm"),
        ({"sources": 2, "probe": True, "weights": "none"}, "a probe goes with"),
        ({"sources": 2, "dots_only": True}, "dots_only is for probes"),
        ({"sources": 2, "probe": True, "dots_only": True, "added": 1}, "dots_only is for probes"),
    ],
)
def test_combinations_without_a_kernel(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        MixSpec(**options)


def test_a_mix_that_fits_is_one_kernel() -> None:
    spec = MixSpec(FAN_IN, "channel", True, added=2, norm="rms", keep_mix=True)
    assert spec.chunks() == [(slice(0, FAN_IN), spec)]


def test_more_sources_are_chained() -> None:
    spec = MixSpec(129, scores=True, added=1, norm="layer")
    assert spec.chunks() == [
        (slice(0, 64), MixSpec(64, scores=True)),
        (slice(64, 128), MixSpec(64, scores=True, accumulate=True)),
        (slice(128, 129), MixSpec(1, scores=True, added=1, norm="layer", accumulate=True)),
    ]


def test_a_chain_continues_an_accumulator() -> None:
    assert all(step.accumulate for _, step in MixSpec(80, accumulate=True).chunks())


@pytest.mark.parametrize(
    ("weights", "outputs", "fan_in"), [("channel", 1, 16), ("channel", 3, 5), ("scalar", 4, 16), ("scalar", 8, 8)]
)
def test_dot_products_of_many_pairs_are_chained(weights: Weights, outputs: int, fan_in: int) -> None:
    """As long as the sums between the kernels are fewer bytes than the sources."""
    spec = MixSpec(2 * fan_in if outputs in (1, 4) else fan_in, weights, outputs=outputs, probe=True)
    assert {step.sources for _, step in spec.chunks()} == {fan_in}
    assert spec.fan_in(dots=True) == fan_in
    assert spec.fan_in(dots=False) == min(FAN_IN, MAX_PAIRS[weights] // outputs)
    assert all(step.probe and step.mixed for _, step in spec.chunks())


@pytest.mark.parametrize(
    ("weights", "outputs", "sources", "fan_in"),
    [("channel", 4, 20, 16), ("channel", 8, 4, 4), ("channel", 3, 14, 14), ("scalar", 8, 20, 8)],
)
def test_else_they_are_apart(weights: Weights, outputs: int, sources: int, fan_in: int) -> None:
    spec = MixSpec(sources, weights, True, 1, outputs, probe=True)
    (whole, mix), *dots = spec.chunks()
    assert (whole, mix) == (slice(0, sources), MixSpec(sources, weights, True, 1, outputs))
    assert [part.start for part, _ in dots] == list(range(0, sources, fan_in)) and dots[-1][0].stop == sources
    assert all(step.dots_only and step.probe and not step.mixed for _, step in dots)
    assert not any(step.accumulate or step.added for _, step in dots)
