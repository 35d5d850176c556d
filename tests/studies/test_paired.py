from __future__ import annotations

import math
import random
import statistics

import pytest
from scipy import stats

from rewire.studies.paired import difference, holm


def test_what_a_seed_does_cancels() -> None:
    seeds = [1.0, 5.0, 3.0, 9.0, 2.0]
    found = difference(seeds, [loss - gain for loss, gain in zip(seeds, [0.1, 0.2, 0.15, 0.12, 0.18], strict=True)])
    assert found.mean == pytest.approx(0.15)
    assert 0.09 < found.low < 0.12 and 0.18 < found.high < 0.21
    assert found.p == pytest.approx(stats.ttest_1samp(found.values, 0).pvalue)
    apart = stats.ttest_ind(seeds, [loss - 0.15 for loss in seeds]).pvalue
    assert found.p < 0.01 < apart


@pytest.mark.parametrize("values", [[0.3], [0.0, 0.0, 0.0], [0.1, -math.inf]])
def test_what_says_nothing_has_a_p_of_one(values: list[float]) -> None:
    assert difference(values, [0.0] * len(values)).p == 1


def test_holm_counts_those_that_were_dropped() -> None:
    assert holm({"a": 0.01, "b": 0.04, "c": 0.02}, 3) == pytest.approx({"a": 0.03, "c": 0.04, "b": 0.04})
    assert holm({"a": 0.01}, 12) == pytest.approx({"a": 0.12})
    assert holm({"a": 0.5, "b": 0.6}, 4) == {"a": 1.0, "b": 1.0}


def test_false_findings_are_as_rare_as_promised() -> None:
    """Contenders that share the baseline's runs, and of which the search took those that were lucky on other seeds."""
    chance = random.Random(0)
    studies, found = 400, 0
    for _ in range(studies):
        baseline = [chance.gauss(0, 1) for _ in range(5)]
        p = {str(n): difference(baseline, [chance.gauss(0, 1) for _ in range(5)]).p for n in range(4)}
        found += min(holm(p, 12).values()) <= 0.05
    assert found / studies < 0.05
    clear = [difference([chance.gauss(1, 0.3) for _ in range(5)], [0.0] * 5).p < 0.05 for _ in range(100)]
    assert statistics.fmean(clear) > 0.9
