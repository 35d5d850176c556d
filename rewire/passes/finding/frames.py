"""Where in the user's code an operation runs: the function calls around it, from Python's frames."""

from __future__ import annotations

import dis
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FrameType
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn

from rewire.code.functions import forward_of, undecorated
from rewire.code.text import holds
from rewire.passes.finding.flow import Place, Scope, kind_of, places_of

#: Folders whose code is not the user's: torch's and this package's.
_LIBRARY = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep)
_CHECKPOINTS = torch.utils.checkpoint.__file__


def of_library(code: CodeType) -> bool:
    """Whether code is torch's or this package's."""
    return code.co_filename.startswith(_LIBRARY)


def _at(frame: FrameType) -> int:
    """The offset of a frame's present instruction, which for a call is always the same.

    Python 3.11 has two instructions for a call, and skips the second one once it has specialised the first.
    """
    return frame.f_lasti + 4 * (frame.f_lasti in _announced(frame.f_code))


@functools.lru_cache(maxsize=4096)
def _announced(code: CodeType) -> frozenset[int]:
    """Offsets of the instructions that come before a call's own."""
    announces = dis.opmap.get("PRECALL")
    return frozenset(step.offset for step in dis.get_instructions(code) if step.opcode == announces)


class Frames:
    """The calls of functions that forwards make.

    Args:
        values: gives the operations that made the tensors in an argument, which the given call passes on.
        module_of: gives the path and the module of the model that an object is or stands for; None for others.
    """

    def __init__(
        self, values: Callable[[object, Scope], list[Any]], module_of: Callable[[object], tuple[str, nn.Module] | None]
    ) -> None:
        self.values, self.module_of = values, module_of
        self._helpers: dict[tuple[Scope, int], Scope] = {}  # by the id of the frame
        self._kept: list[FrameType] = []  # keeps ids from being reused

    def caller(self, forwards: Sequence[Scope], frame: FrameType | None) -> tuple[Scope, Place | None]:
        """The function call in which ``frame`` was called, and the place in that function.

        Args:
            forwards: the running calls of modules, outermost first.
            frame: the frame to begin at.
        """
        if not forwards:
            return Scope(None, ""), None
        scope = forwards[-1]
        frames: list[FrameType] = []
        again: set[FrameType] = set()  # frames that a checkpoint runs
        while frame is not None and frame.f_code is not scope.code and scope.code is not None:
            if not of_library(frame.f_code) or _is_method(scope, frame.f_code):
                frames.append(frame)
            elif frame.f_code.co_filename == _CHECKPOINTS:
                again.update(frames[-1:])
            frame = frame.f_back
        if frame is None or scope.code is None:  # the forward is no Python function
            return scope, None
        place = frame.f_code, _at(frame)
        checkpoint: Place | None = None
        for inner in reversed(frames):
            if scope.code is None or not holds(scope.code, inner.f_code):  # else a comprehension or closure
                scope, checkpoint = self._helper(scope, place, inner), None
                scope.checkpointed = inner in again
            else:
                checkpoint = checkpoint or (place if inner in again else None)
                if checkpoint is not None:
                    scope.again[inner.f_code] = checkpoint
            place = inner.f_code, _at(inner)
        return scope, place

    def _helper(self, scope: Scope, place: Place, frame: FrameType) -> Scope:
        """The call of a function that a forward calls."""
        key = scope, id(frame)
        if key not in self._helpers:
            self._kept.append(frame)
            path, module, code = scope.path, scope.module, frame.f_code
            first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
            own = self.module_of(first)
            if own is not None and _is_own(own[1], code):  # a method of another module: block.forward(x), block.mix(x)
                path, module = own
            called = module is not None and module is not scope.module and forward_of(module).code is code
            kind = kind_of(module)
            helper = Scope(scope, path, module, kind, code, place, helper=not called, bare=called, key=object())
            helper.namespace = getattr(frame.f_globals, "original", frame.f_globals)  # in a trace: see `follow`
            self._helpers[key] = helper
            given = dict(_parameters(frame))
            helper.arguments = {name: self.values(value, scope) for name, value in given.items()}
            helper.places = {name: places_of(value) for name, value in given.items()}
        return self._helpers[key]

    def clear(self) -> None:
        """Release the frames."""
        self._kept.clear()


def _is_own(module: nn.Module, code: CodeType) -> bool:
    """Whether a function is a method of the module's class."""
    return undecorated(getattr(type(module), code.co_name, None)).code is code


def _is_method(scope: Scope, code: CodeType) -> bool:
    """Whether torch code is a method of the module whose forward calls it (``super().forward``, for example)."""
    if hasattr(nn.Module, code.co_name) and code.co_name != "forward":
        return False
    own = (vars(cls).get(code.co_name) for cls in type(scope.module).__mro__)
    return any(getattr(function, "__code__", None) is code for function in own)


def _parameters(frame: FrameType) -> Iterator[tuple[str, Any]]:
    """The arguments of a function that has just been entered."""
    code, values = frame.f_code, frame.f_locals
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & 0x04) + bool(code.co_flags & 0x08)  # *args and **kwargs
    yield from ((name, values[name]) for name in code.co_varnames[:count] if name in values)
