"""The Python functions behind a module's forward, and the decorators around them."""

from __future__ import annotations

import dataclasses
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

from rewire.errors import EditError


@dataclasses.dataclass(frozen=True)
class Decorated:
    """A function and its decorators.

    Attributes:
        function: the innermost function; None if that is not a Python function.
        wrappers: the wrappers around it, outermost first.
    """

    function: FunctionType | None
    wrappers: tuple[Any, ...] = ()

    @property
    def code(self) -> CodeType | None:
        return None if self.function is None else self.function.__code__


def forward_of(module: nn.Module) -> Decorated:
    """The forward that runs when ``module`` is called: that of its class, or one that was set on this module alone."""
    own = vars(module).get("forward")
    if own is None:
        own = getattr(type(module), "forward", None)  # None for TorchScript's modules
    return undecorated(getattr(own, "__func__", own))


#: Stand-ins by the ids of their code and globals, which they keep alive; by id, as code of two files may be equal.
_CLOSURES: dict[tuple[int, int], FunctionType] = {}


def function_with(code: CodeType, namespace: dict[str, Any]) -> FunctionType:
    """The function with this code; for a closure, a stand-in with empty cells.

    Args:
        code: code of a function.
        namespace: its globals.
    """
    name, *attributes = code.co_qualname.split(".")
    found: Any = undecorated(namespace.get(name)).function if not attributes else namespace.get(name)
    for attribute in attributes:
        found = getattr(found, attribute, None)
    if isinstance(found, FunctionType) and found.__code__ is code:
        return found
    key = id(code), id(namespace)
    if key not in _CLOSURES:  # always the same object, as callers compare functions
        cells = tuple(CellType() for _ in code.co_freevars)
        _CLOSURES[key] = FunctionType(code, namespace, closure=cells)
        _CLOSURES[key].__qualname__ = code.co_qualname
    return _CLOSURES[key]


def function_of(value: object) -> tuple[FunctionType | None, tuple[Any, ...]]:
    """The Python function that runs when ``value`` is called, and the arguments bound in front, such as ``self``."""
    if isinstance(value, FunctionType):
        return value, ()
    if isinstance(value, MethodType):
        return (value.__func__, (value.__self__,)) if isinstance(value.__func__, FunctionType) else (None, ())
    called = getattr(type(value), "__call__", None)  # noqa: B004 - which, not whether
    return (called, (value,)) if isinstance(called, FunctionType) else (None, ())


def define(module: nn.Module, function: FunctionType) -> None:
    """Make ``function`` the forward of this module alone."""
    vars(module)["forward"] = MethodType(function, module)


def undecorated(function: object) -> Decorated:
    """Split ``function`` into the innermost function and its decorators."""
    wrappers: list[Any] = []
    while True:
        inner = getattr(function, "__wrapped__", None) or _closed_over(function)
        if inner is None:
            return Decorated(function if isinstance(function, FunctionType) else None, tuple(wrappers))
        wrappers.append(function)
        function = inner


def _closed_over(function: object) -> Any:
    """The forward that a decorator without ``__wrapped__`` holds in its closure."""
    for cell in getattr(function, "__closure__", None) or ():
        value = contents(cell)
        if isinstance(value, FunctionType) and value.__name__ == "forward" and value is not function:
            return value
    return None


def redecorated(decorated: Decorated, function: FunctionType) -> FunctionType:
    """``function`` with copies of the decorators, each with a new code object.

    Raises:
        EditError: a decorator holds its function in a place that cannot be changed in a copy.
    """
    old: Any = decorated.function
    new = function
    for wrapper in reversed(decorated.wrappers):
        cells = getattr(wrapper, "__closure__", None) or ()
        if not isinstance(wrapper, FunctionType) or not any(contents(cell) is old for cell in cells):
            name = f"{getattr(wrapper, '__module__', '?')}.{getattr(wrapper, '__qualname__', type(wrapper).__name__)}"
            raise EditError(f"its decorator ({name}) hides the decorated function")
        itself = CellType()  # transformers' layers ask whether they are the outermost wrapper
        copies = tuple(
            CellType(new) if contents(cell) is old else itself if contents(cell) is wrapper else cell for cell in cells
        )
        copy = clone(wrapper, wrapper.__code__.replace(), copies)
        itself.cell_contents = copy
        # ``__wrapped__``, and the function that torch.compile calls instead of the wrapper while it traces.
        vars(copy).update({name: new for name, value in vars(copy).items() if value is old})
        old, new = wrapper, copy
    return new


def clone(function: FunctionType, code: CodeType, closure: tuple[CellType, ...]) -> FunctionType:
    """``function`` with other code: the same globals, defaults and attributes."""
    copy = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
    vars(copy).update(vars(function))
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__doc__, copy.__module__ = function.__doc__, function.__module__
    copy.__qualname__, copy.__annotations__ = function.__qualname__, function.__annotations__
    return copy


def contents(cell: CellType) -> Any:
    """The contents of a closure's cell; None if it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return None
