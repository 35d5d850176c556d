"""The second step of sums over programs, in Triton's interpreter."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from interpreter import INTERPRETED, interpret, starts_interpreter

from rewire.kernels.handwritten import totals
from rewire.kernels.handwritten.totals import Sums
from rewire.kernels.kernel import Part


@pytest.mark.slow
@starts_interpreter
def test_in_the_interpreter(tmp_path: Path) -> None:
    interpret(f"{__file__}::TestTotals", tmp_path)


class TestTotals:
    __test__ = INTERPRETED

    @pytest.mark.parametrize(
        "shapes",
        [[(1, 1)], [(7, 3), (1024, 16)], [(1, 300), (64, 2000), (5, 129)], [(33, 1), (16, 4096), (2, 17), (1000, 128)]],
    )
    def test_all_are_added_up(self, shapes: list[tuple[int, int]]) -> None:
        partials = [torch.randn(*shape) for shape in shapes]
        results = [torch.full((size + 1,), torch.nan) for _, size in shapes]
        sums = [Sums(n, len(shapes) + n, *shape, shape[1], 0) for n, shape in enumerate(shapes)]
        totals.kernel(sums, torch.device("cpu"))([*partials, *results])
        for given, found in zip(partials, results, strict=True):
            assert torch.allclose(found[:-1].double(), given.double().sum(0), atol=1e-5 * len(given) ** 0.5)
            assert found[-1].isnan()

    def test_side_by_side(self) -> None:
        """What three kernels leave of 5, 4 and 1 sources, in two rows."""
        counts = [5, 4, 1]
        starts = [0, *itertools.accumulate(counts)]
        partials, result = [torch.randn(6, 2, n) for n in counts], torch.full((2, 10), torch.nan)
        ends = [Part(3, 4 * start, lambda x, start=start: x.flatten()[start:]) for start in starts]  # type: ignore[misc]
        sums = [Sums(k, ends[k], 6, 2 * n, n, 10) for k, n in enumerate(counts)]
        totals.kernel(sums, torch.device("cpu"))([*partials, result])
        assert torch.allclose(result, torch.cat([x.sum(0) for x in partials], -1), atol=1e-5)

    def test_the_order_does_not_depend_on_what_else_is_added_up(self) -> None:
        one, other = torch.randn(900, 40), torch.randn(3, 5000)
        alone, together = torch.empty(40), torch.empty(40)
        totals.kernel([Sums(0, 1, 900, 40, 40, 0)], torch.device("cpu"))([one, alone])
        both = [Sums(0, 2, 3, 5000, 5000, 0), Sums(1, 3, 900, 40, 40, 0)]
        totals.kernel(both, torch.device("cpu"))([other, one, torch.empty(5000), together])
        assert torch.equal(alone, together)
