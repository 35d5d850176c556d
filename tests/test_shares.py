"""Which slow cases a share is: of three, each runs a third, another one for each commit."""

from __future__ import annotations

import dataclasses
from typing import Any

from conftest import shared


@dataclasses.dataclass(frozen=True)
class Case:
    nodeid: str
    slow: bool

    def get_closest_marker(self, name: str) -> str | None:
        return name if self.slow and name == "slow" else None


def collected() -> list[Any]:
    many = [Case(f"test_a.py::test_many[{n}]", True) for n in range(7)]
    few = [Case(f"test_a.py::test_few[{n}]", True) for n in range(2)]
    return [*many, *few, *(Case(f"test_b.py::test_fast[{n}]", False) for n in range(4))]


def test_three_shares_are_all_cases() -> None:
    items = collected()
    shares = [shared(items, 3, part) for part in range(3)]
    many = [[item for item in share if "many" in item.nodeid] for share in shares]
    assert [len(cases) for cases in many] == [3, 2, 2]
    assert {item for cases in many for item in cases} == {item for item in items if "many" in item.nodeid}
    assert shares[0] == shared(items, 3, 6)
    for share in shares:
        assert [item for item in share if "fast" in item.nodeid] == items[9:]


def test_of_few_cases_each_share_runs_one() -> None:
    items = collected()
    few = [[item for item in shared(items, 3, part) if "few" in item.nodeid] for part in range(2)]
    assert few == [[items[7]], [items[8]]]


def test_a_share_of_one_is_everything() -> None:
    items = collected()
    assert shared(items, 1, 5) == items
