"""Statistics of paired seeds: differences of two rows of runs that share seeds, so that what a seed does cancels."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rewire.version import how_to_install

#: Two-sided: what is called shown happens by chance once in twenty studies.
LEVEL = 0.05
#: Seeds below which nothing is called better.
FEWEST = 5


class Difference(NamedTuple):
    """Mean of paired differences; positive: the second is lower.

    Attributes:
        values: of each seed.
        mean: of these.
        low, high: a 95 % t interval of the mean; nan for one seed.
        p: of the two-sided paired t test; 1 where it says nothing.
    """

    values: list[float]
    mean: float
    low: float
    high: float
    p: float


def difference(first: Sequence[float], second: Sequence[float]) -> Difference:
    """How far the losses ``second`` are below ``first``, seed by seed.

    Raises:
        ImportError: SciPy is missing.
    """
    try:
        from scipy import stats
    except ImportError as error:
        raise ImportError(f"studies need SciPy: {how_to_install('study')}.") from error
    values = [a - b for a, b in zip(first, second, strict=True)]
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return Difference(values, statistics.fmean(values), math.nan, math.nan, 1.0)
    mean, deviation = statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))
    if not deviation:  # the same runs
        return Difference(values, mean, mean, mean, 1.0)
    low, high = stats.t.interval(1 - LEVEL, len(values) - 1, mean, deviation)
    p = 2 * stats.t.sf(abs(mean / deviation), len(values) - 1)
    return Difference(values, mean, float(low), float(high), float(p))


def holm(p: Mapping[str, float], entered: int) -> dict[str, float]:
    """Adjusted p-values (Holm 1979): the chance of one false finding among all that entered stays below the level.

    Args:
        p: of those that were compared, by name.
        entered: contenders that entered, those among them that were dropped on the way: these count with p = 1.
    """
    adjusted, largest = {}, 0.0
    for rank, (name, value) in enumerate(sorted(p.items(), key=lambda item: item[1])):
        largest = max(largest, min(1.0, (entered - rank) * value))
        adjusted[name] = largest
    return adjusted
