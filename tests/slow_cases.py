"""Parameters of tests of which the quick suite runs a part."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def one_in(number: int, cases: Iterable[Any]) -> list[ParameterSet]:
    """Each ``number``-th case as it is, the others as slow ones: for long lists of cases that are much alike."""
    listed = [
        ParameterSet.extract_from(case, force_tuple=not isinstance(case, (tuple, ParameterSet))) for case in cases
    ]
    return [
        case if place % number == 0 else pytest.param(*case.values, marks=[*case.marks, pytest.mark.slow], id=case.id)
        for place, case in enumerate(listed)
    ]
