"""References to functions for pickles: by module and name, also under decorators, in classes and in other functions.

pickle itself only finds functions that their qualified name leads to, which excludes those that a decorator or a class
method holds, and functions inside others.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Iterator
from importlib import import_module
from types import CodeType, FunctionType, MethodType
from typing import Any

from rewire.code.functions import contents, function_with
from rewire.code.text import codes_in
from rewire.errors import EditError


@dataclasses.dataclass(frozen=True)
class Reference:
    """A function that is pickled as its place. Pickling fails if the function could not be found again there.

    Attributes:
        function: the function; inside another function, perhaps a stand-in with the same code (`function_with`).
    """

    function: FunctionType

    def __deepcopy__(self, memo: dict[int, Any]) -> Reference:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        function, code = self.function, self.function.__code__
        home = function.__globals__.get("__name__", "")
        found = found_again(home, code.co_qualname, code.co_firstlineno) if home in sys.modules else None
        if found is None or found.__code__ != code:
            raise EditError(
                f"the rewired model cannot be pickled: {code.co_qualname} at {code.co_filename}:{code.co_firstlineno} "
                f"adds to the residual stream, and cannot be imported from module '{home}'. Make it a function of "
                "that module, or use rewire.save"
            )
        return _referred, (home, code.co_qualname, code.co_firstlineno)


def _referred(home: str, name: str, line: int) -> Reference:
    """Restore a reference from a pickle.

    Raises:
        EditError: the module has no such function any more.
    """
    found = found_again(home, name, line)
    if found is None:
        raise EditError(f"module '{home}' has no function {name}, which this rewired model was pickled with")
    return Reference(found)


def found_again(home: str, name: str, line: int) -> FunctionType | None:
    """The function of a module with this ``co_qualname``; among several, the one that begins closest to this line."""
    namespace = vars(import_module(home))
    first = name.partition(".")[0]
    ours = [value for value in namespace.values() if getattr(value, "__module__", None) == home]
    found: list[tuple[int, CodeType, FunctionType | None]] = []
    for function in _reached([*([namespace[first]] if first in namespace else []), *ours]):
        for code in (function.__code__, *codes_in(function.__code__)):
            if code.co_qualname == name and function.__globals__ is namespace:
                itself = function if code is function.__code__ else None
                found.append((abs(code.co_firstlineno - line), code, itself))
    if not found:
        return None
    _, code, whole = min(found, key=lambda each: each[0])
    return whole or function_with(code, namespace)


def _reached(roots: list[Any]) -> Iterator[FunctionType]:
    """All functions among the values, in their closures, and in their methods."""
    todo, seen = list(roots), set[int]()
    for value in todo:
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, FunctionType):
            yield value
            held = [*vars(value).values(), *map(contents, value.__closure__ or ())]
        elif isinstance(value, (staticmethod, classmethod, MethodType)):
            held = [value.__func__]
        elif isinstance(value, property):
            held = [value.fget]
        elif isinstance(value, functools.partial):
            held = [value.func]
        elif isinstance(value, type):
            held = [*vars(value).values()]
        else:  # an object that a decorator returned
            held = [each for each in getattr(value, "__dict__", {}).values() if isinstance(each, FunctionType)]
        todo += [each for each in held if not isinstance(each, (str, int, float, dict, list, tuple, type(None)))]
