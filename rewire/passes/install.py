"""Pass: give blocks their new forward.

A block keeps its identity: its ``__class__`` becomes a generated subclass of the same name, shared by all blocks of
the same class and rewrite. Parameters, children, hooks, checkpointing and ``isinstance`` stay as they were.
"""

from __future__ import annotations

import functools
import linecache
from typing import Any

import torch
from torch import nn

from rewire.tracing.forwards import plain_forward

#: Attribute of generated classes that holds their forward's source.
SOURCE = "_rewire_source"


def install(block: nn.Module, source: str, table: dict[str, Any]) -> None:
    """Make ``source`` the forward of ``block``.

    Args:
        block: changed in place.
        source: one function definition, ``forward``.
        table: the globals that it uses.
    """
    block.__class__ = generated_class(type(block), source, tuple(sorted(table.items())))  # type: ignore[arg-type]


def uninstall(block: nn.Module) -> None:
    """Give ``block`` its original forward back."""
    block.__class__ = type(block).__mro__[1]


def is_rewritten(module: nn.Module) -> bool:
    """Whether the module's forward was rewritten (by FSDP's subclass of the generated class, too)."""
    return hasattr(type(module), SOURCE)


def source_of(module: nn.Module) -> str:
    source: str = getattr(type(module), SOURCE)
    return source


@functools.cache
def generated_class(base: type, source: str, table: tuple[tuple[str, Any], ...]) -> type:
    """The subclass of ``base`` whose forward is ``source``; the same one for equal arguments.

    Equal blocks share it, so that torch.compile compiles one of them for all.
    """
    namespace: dict[str, Any] = dict(table)  # without a module's name, under which torch.compile would look it up
    filename = f"<rewire {base.__module__}.{base.__qualname__} {abs(hash((source, base))):x}>"
    # tracebacks, inspect.getsource and debuggers find the source here
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    exec(compile(source, filename, "exec"), namespace)
    forward = namespace["forward"]
    forward.__doc__ = plain_forward(base)[0].__doc__
    forward.__module__ = base.__module__
    forward.__qualname__ = f"{base.__qualname__}.forward"
    members = {
        "forward": forward,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__reduce_ex__": _reduce,
        SOURCE: source,
        "_rewire_table": table,
    }
    metaclass: Any = type(base)
    generated: type = metaclass(base.__name__, (base,), members)
    return generated


def _reduce(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
    """Pickle and copy by rebuilding the class: a generated class cannot be imported."""
    cls = next(cls for cls in type(self).__mro__ if SOURCE in vars(cls))
    names = tuple((name, None if value is torch else value) for name, value in cls._rewire_table)  # type: ignore[attr-defined]
    return _rebuild, (cls.__mro__[1], vars(cls)[SOURCE], names), self.__dict__


def _rebuild(base: type, source: str, names: tuple[tuple[str, Any], ...]) -> nn.Module:
    table = tuple((name, torch if name == "torch" else value) for name, value in names)
    cls = generated_class(base, source, table)
    module: nn.Module = object.__new__(cls)
    return module
