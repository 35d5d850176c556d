"""Stretches of a text that are written anew, one inside the other."""

from __future__ import annotations

import pytest

from rewire.errors import EditError
from rewire.passes.editing.changes import Change, Render, rendered


def around(start: int, end: int, name: str) -> Change:
    """Puts a stretch, with the changes in it, into a call."""
    return Change(start, end, lambda render: f"{name}({render(start, end)})")


def instead(start: int, end: int, text: str) -> Change:
    return Change(start, end, lambda _: text)


TEXT = "x + f(x)"


def test_nothing_changes() -> None:
    assert rendered(TEXT, []) == TEXT


def test_changes_beside_each_other_keep_what_is_between() -> None:
    assert rendered(TEXT, [instead(6, 7, "z"), instead(0, 1, "y")]) == "y + f(z)"


def test_changes_inside_others() -> None:
    changes = [instead(6, 7, "y"), around(0, 8, "add"), around(4, 8, "g"), instead(0, 1, "z")]
    for order in (changes, changes[::-1]):
        assert rendered(TEXT, order) == "add(z + g(f(y)))"


def test_one_around_another_of_the_same_stretch() -> None:
    """The first is the outer one."""
    assert rendered(TEXT, [around(4, 8, "outer"), around(4, 8, "inner")]) == "x + outer(inner(f(x)))"


def test_what_is_put_in_comes_before_what_is_written_anew_there() -> None:
    changes = [instead(4, 8, "g"), instead(4, 4, "1 + "), instead(4, 4, "2 + ")]
    assert rendered(TEXT, changes) == "x + 1 + 2 + g"


def test_what_is_put_in_at_an_end_is_inside() -> None:
    assert rendered(TEXT, [around(0, 1, "a"), instead(1, 1, "!")]) == "a(x!) + f(x)"


def test_what_is_inside_has_to_be_rendered() -> None:
    with pytest.raises(EditError, match="in two ways that cannot be written together"):
        rendered(TEXT, [instead(4, 8, "g"), instead(6, 7, "y")])


def test_parts_of_a_stretch_are_rendered_where_they_are_written() -> None:
    def swapped(render: Render) -> str:
        return f"{render(4, 8)} + {render(0, 1)}"

    assert rendered(TEXT, [Change(0, 8, swapped), instead(0, 1, "y"), instead(6, 7, "z")]) == "f(z) + y"
