"""Finder: variables that are read later, where a tensor is written to in place.

Where the user's ``x += f`` writes to a tensor, the edited forward makes a new one. In the original, a view of the
tensor, another name or a list that holds it would show the change; in the edited forward it would not.
"""

from __future__ import annotations

import dis
import functools
import re
from collections import deque
from collections.abc import Iterator, Mapping
from types import CodeType, FrameType
from typing import Any

from torch import Tensor, nn

from rewire.passes.finding.flow import Holder, Op
from rewire.passes.finding.frames import of_library
from rewire.torch_internals import memory_of

#: Access of an instruction to a local variable; some instructions of Python 3.13 have two.
_ACCESS = re.compile("(LOAD|STORE|DELETE)_(?:FAST|DEREF|CLOSURE)")
_LEAVES = {"RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE"}
_ONE_WAY = {"JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT"}
_DEPTH = 3  # levels of nested containers to look into


def holders(frame: FrameType | None, until: CodeType, known: Mapping[int, Op]) -> Iterator[tuple[int, Holder]]:
    """The tensors in variables of running user functions that are read again, by their memory.

    The functions are those from ``frame`` to the code ``until``; ``known`` maps ids of tensors to their operations.
    """
    while frame is not None and frame.f_code is not until:
        if not of_library(frame.f_code):
            for name, value in frame.f_locals.items():
                tensors = [*_tensors(value)]
                if tensors and reads(frame.f_code, frame.f_lasti, name):
                    yield from ((storage(t), Holder(frame.f_code, name, known.get(id(t)))) for t in tensors)
        frame = frame.f_back


def reads(code: CodeType, at: int, name: str) -> bool:
    """Whether a function may read a variable after an instruction, before it assigns to it."""
    steps, seen = _steps(code), set[int]()
    running = max((offset for offset in steps if offset <= at), default=0)  # its inline caches come after it
    todo = [*steps[running][1]]
    while todo:
        offset = todo.pop()
        if offset in seen or offset not in steps:
            continue
        seen.add(offset)
        accesses, following = steps[offset]
        first = next((kind for kind, variable in accesses if variable == name), "")
        if first == "LOAD":
            return True
        todo += following if not first else ()
    return False


@functools.lru_cache(maxsize=256)
def _steps(code: CodeType) -> dict[int, tuple[list[tuple[str, str]], list[int]]]:
    """For each instruction: its accesses to variables, in order, and the instructions that may follow it."""
    steps = list(dis.get_instructions(code))
    jumps = {dis.opname[op] for op in (*dis.hasjrel, *dis.hasjabs)}
    found = {}
    for step, following in zip(steps, [*(s.offset for s in steps[1:]), -1], strict=True):
        ways = [] if step.opname in _LEAVES | _ONE_WAY else [following]
        ways += [step.argval] if step.opname in jumps else []
        names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
        found[step.offset] = list(zip(_ACCESS.findall(step.opname), names, strict=False)), ways
    return found


def _tensors(value: object, depth: int = 0) -> Iterator[Tensor]:
    """The tensors in an object: in a container, or in the attributes of a module or another object."""
    if isinstance(value, Tensor):
        yield value
    elif depth < _DEPTH:
        items: Any = ()
        if isinstance(value, (list, tuple, set, frozenset, deque)):
            items = value
        elif isinstance(value, dict):
            items = value.values()
        elif hasattr(value, "__dict__") and not isinstance(value, type) and depth == 0:
            own = vars(value)
            items = [v for k, v in own.items() if not (isinstance(value, nn.Module) and k.startswith("_"))]
        for item in items:
            yield from _tensors(item, depth + 1)


def storage(tensor: Tensor) -> int:
    """A number that identifies the memory of a tensor; the tensor's id if it has no memory of its own."""
    try:
        return memory_of(tensor)
    except (NotImplementedError, RuntimeError):
        return id(tensor)
