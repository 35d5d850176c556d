"""Statistics of paired seeds: differences between runs with the same seed, which cancel the seed's effect."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rewire.version import how_to_install

#: Two-sided: by chance, one study in twenty shows a difference that is none.
LEVEL = 0.05
#: With fewer seeds, nothing is called better.
FEWEST = 5


class Difference(NamedTuple):
    """Mean of paired differences; positive if the second is lower.

    Attributes:
        values: the difference for each seed.
        mean: their mean.
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
    if not deviation:  # identical runs
        return Difference(values, mean, mean, mean, 1.0)
    low, high = stats.t.interval(1 - LEVEL, len(values) - 1, mean, deviation)
    p = 2 * stats.t.sf(abs(mean / deviation), len(values) - 1)
    return Difference(values, mean, float(low), float(high), float(p))


def holm(p: Mapping[str, float], entered: int) -> dict[str, float]:
    """Adjusted p-values (Holm 1979): the chance of any false finding among all contenders stays below the level.

    Args:
        p: of the contenders that were compared, by name.
        entered: number of contenders at the beginning. Those that were dropped on the way count with p = 1.
    """
    adjusted, largest = {}, 0.0
    for rank, (name, value) in enumerate(sorted(p.items(), key=lambda item: item[1])):
        largest = max(largest, min(1.0, (entered - rank) * value))
        adjusted[name] = largest
    return adjusted
