"""Finding the function behind a module's ``forward``, and what can be said about it without running it."""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import textwrap
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

from rewire.errors import TraceError

#: Wrappers around ``forward`` that a subclass gets again by itself, so that a rewritten forward may leave them out.
_REAPPLIED = ("transformers.modeling_layers",)


def plain_forward(cls: type) -> tuple[FunctionType, list[str]]:
    """The undecorated ``forward`` of ``cls``, and the modules of the decorators that were taken off.

    Raises:
        TraceError: ``forward`` is no Python function.
    """
    function: Any = cls.forward  # type: ignore[attr-defined]
    wrappers = []
    while True:
        inner = getattr(function, "__wrapped__", None) or _closed_over_forward(function)
        if inner is None:
            break
        wrappers.append(getattr(function, "__globals__", {}).get("__name__", "?"))
        function = inner
    if not isinstance(function, FunctionType):
        raise TraceError(f"forward of {cls.__name__} is not a Python function")
    return function, [name for name in wrappers if name not in _REAPPLIED]


def _closed_over_forward(function: Any) -> Any:
    """The ``forward`` that a decorator without ``__wrapped__`` holds in its closure."""
    for cell in getattr(function, "__closure__", None) or ():
        value = cell.cell_contents
        if isinstance(value, FunctionType) and value.__name__ == "forward" and value is not function:
            return value
    return None


@functools.cache
def inspects_keywords(function: FunctionType) -> bool:
    """Whether ``function`` looks into its own ``**kwargs`` instead of only handing them on as ``**kwargs``.

    Tracing passes one opaque marker for all of them, so that a look inside would read the marker.
    """
    keywords = next((p.name for p in inspect.signature(function).parameters.values() if p.kind is p.VAR_KEYWORD), None)
    if keywords is None:
        return False
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError, TypeError):
        return True  # without the source nobody can tell
    handed_on = {
        id(keyword.value)
        for call in ast.walk(tree)
        if isinstance(call, ast.Call)
        for keyword in call.keywords
        if keyword.arg is None
    }
    return any(isinstance(n, ast.Name) and n.id == keywords and id(n) not in handed_on for n in ast.walk(tree))


@functools.cache
def attributes_set_in_calls(cls: type) -> frozenset[str]:
    """Attributes that methods of ``cls`` other than ``__init__`` assign: their values may change between calls."""
    assigned: set[str] = set()
    for base in cls.__mro__:
        if base.__module__.startswith("torch.nn.modules.module"):
            break
        for name, value in vars(base).items():
            if name.startswith("__") or not isinstance(value, FunctionType):
                continue
            assigned.update(_stored(inspect.unwrap(value).__code__))
    return frozenset(assigned)


def _stored(code: CodeType) -> set[str]:
    return {i.argval for i in dis.get_instructions(code) if i.opname == "STORE_ATTR"}


@functools.cache
def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Parameters of a ``forward``, without ``self``."""
    return list(inspect.signature(function).parameters.values())[1:]


@functools.cache
def adds_values(cls: type) -> bool:
    """Whether the forward of ``cls`` has a ``+`` in it: then not being able to trace it may hide a residual add."""
    try:
        code = plain_forward(cls)[0].__code__
    except TraceError:
        return False
    return any(
        i.opname in ("BINARY_ADD", "INPLACE_ADD") or i.argrepr in ("+", "+=") for i in dis.get_instructions(code)
    )
