"""The gate of a helper that is no method. It is called in the helper's place, and can rebuild its edited function."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import FunctionType
from typing import Any

from rewire.code.functions import clone, function_of
from rewire.code.references import Reference
from rewire.passes.editing.install import edited_function
from rewire.runtime.gate import Gate
from rewire.runtime.live import Entry
from rewire.torch_internals import uncompiled


class HelperGate(Gate):
    """The gate of a helper that is no method.

    Args:
        block, where, entries: as for `Gate`.
        original: the helper.
        source: its new text.
        advice: as for `Gate`.
    """

    def __init__(
        self, block: str, where: str, entries: Sequence[Entry], original: FunctionType, source: str, advice: str = ""
    ) -> None:
        self.edited = edited_function(original, source)
        super().__init__(block, where, entries, self.edited, advice)
        self.original, self.source = original, source

    def __reduce__(self) -> tuple[Any, ...]:
        """Let copies and pickles rebuild the edited function, which cannot be imported."""
        made_of = self.block, self.where, self.entries, Reference(self.original), self.source, self.advice
        return _made_again, made_of, {"helpers": self.helpers}

    def of(self, called: object) -> Any:
        """The replacement for a closure, a partial or an object with a ``__call__``, if it still is the helper."""
        if isinstance(called, functools.partial):
            return functools.partial(self.of(called.func), *called.args, **called.keywords)
        function, bound = function_of(uncompiled(called))
        same = function is not None and function.__code__ == self.original.__code__
        if function is None or not same or function.__globals__ is not self.original.__globals__:
            return called  # it is another function now: the stream will miss its residual adds and say so
        edited = self.edited
        if function is not self.original:  # the original is a stand-in: take cells and defaults from what is called
            cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
            edited = clone(function, edited.__code__, tuple(cells[name] for name in edited.__code__.co_freevars))
        return functools.partial(edited, self, *bound)


def _made_again(
    block: str, where: str, entries: Sequence[Entry], original: Reference, source: str, advice: str
) -> HelperGate:
    return HelperGate(block, where, entries, original.function, source, advice)
