"""Which variables a function reads again."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest

from rewire.passes.finding.holders import reads


def here(*_: Any) -> FrameType:
    return sys._getframe(1)


def in_a_row() -> tuple[FrameType, Any]:
    read, dead, again = 1, 2, 3
    frame = here(dead)
    again = 4
    return frame, (read, again)


def in_a_loop() -> tuple[FrameType, Any]:
    read, anew, again = 1, 2, 3
    for _ in range(2):
        anew = read
        frame = here(anew, again)
    return frame, None


def on_one_way() -> tuple[FrameType, Any]:
    read, again, dead = 1, 2, 3
    frame = here(dead)
    if frame:
        again = 3
        print(end="")
    else:
        again = read
    return frame, again


def in_closures() -> tuple[FrameType, Any]:
    read, again = 1, 2
    frame = here(again)
    again = 3
    return frame, lambda: (read, again)


@pytest.mark.parametrize("function", [in_a_row, in_a_loop, on_one_way, in_closures])
def test_variables_that_are_read_again(function: Any) -> None:
    frame, _ = function()
    code, at = frame.f_code, next(n for n, name in calls(frame.f_code) if name == "here")
    names = {*code.co_varnames, *code.co_cellvars} & {"read", "dead", "again", "anew"}
    expected = {"read", "again"} if function is in_a_loop else {"read"}
    assert {name for name in names if reads(code, at, name)} == expected


def calls(code: Any) -> list[tuple[int, str]]:
    """The instructions that call a function, by its name."""
    import dis

    found, name = [], ""
    for step in dis.get_instructions(code):
        if step.opname == "LOAD_GLOBAL":
            name = step.argval
        elif step.opname == "CALL":
            found.append((step.offset, name))
    return found
