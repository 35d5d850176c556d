"""Pass: give blocks their new forward.

A block keeps its identity: its ``__class__`` becomes a generated subclass of the same name. Parameters, children,
hooks, checkpointing and ``isinstance`` stay as they were.

Each block gets a class and a code object of its own. torch.compile counts the versions of one code object, and after
``recompile_limit`` (8) of them runs the rest eagerly, without an error. Streams differ from block to block, so that
each needs a version; eight blocks that share their code would use up the limit. Modules that get no stream share one
class, and one version.
"""

from __future__ import annotations

import functools
import linecache
from types import FunctionType
from typing import Any

import torch
from torch import nn

from rewire.tracing.forwards import plain_forward

#: Attribute of generated classes that holds their forward's source.
SOURCE = "_rewire_source"
_TABLE = "_rewire_table"
_SHARED = "_rewire_shared"


def install(block: nn.Module, source: str, table: dict[str, Any], shared: bool = False) -> None:
    """Make ``source`` the forward of ``block``.

    Args:
        block: changed in place.
        source: one function definition, ``forward``.
        table: the globals that it uses.
        shared: equal modules get the same class: for those that get no stream.
    """
    block.__class__ = _class(type(block), source, tuple(sorted(table.items())), shared)


def uninstall(block: nn.Module) -> None:
    """Give ``block`` its original forward back."""
    block.__class__ = type(block).__mro__[1]


def is_rewritten(module: nn.Module) -> bool:
    """Whether the module's forward was rewritten (by FSDP's subclass of the generated class, too)."""
    return hasattr(type(module), SOURCE)


def source_of(module: nn.Module) -> str:
    source: str = getattr(type(module), SOURCE)
    return source


def _class(base: type, source: str, table: tuple[tuple[str, Any], ...], shared: bool) -> type:
    return generated_class(base, source, table) if shared else own_class(base, source, table)


@functools.cache
def generated_class(base: type, source: str, table: tuple[tuple[str, Any], ...]) -> type:
    """The subclass of ``base`` whose forward is ``source``; the same one for equal arguments."""
    return _subclass(base, source, table, {_SHARED: True})


def own_class(base: type, source: str, table: tuple[tuple[str, Any], ...]) -> type:
    """A new subclass of ``base`` whose forward is ``source``, and whose code torch.compile tells from all others'."""

    def init_subclass(cls: type, **kwargs: Any) -> None:
        super(own, cls).__init_subclass__(**kwargs)
        _own_code(cls)

    own: Any = _subclass(base, source, table, {_SHARED: False, "__init_subclass__": classmethod(init_subclass)})
    _own_code(own)
    return own


def _own_code(cls: type) -> None:
    """Give the forward that ``cls`` defines a code object of its own.

    That may be a wrapper around the generated one: transformers wraps the forward of each subclass of its layers,
    FSDP2's too, and all these wrappers share their code.
    """
    forward = vars(cls).get("forward")
    if isinstance(forward, FunctionType):
        forward.__code__ = forward.__code__.replace()


def _subclass(base: type, source: str, table: tuple[tuple[str, Any], ...], more: dict[str, Any]) -> type:
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
        _TABLE: table,
        **more,
    }
    metaclass: Any = type(base)
    generated: type = metaclass(base.__name__, (base,), members)
    return generated


def _reduce(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
    """Pickle and copy by rebuilding the class: a generated class cannot be imported."""
    cls = next(cls for cls in type(self).__mro__ if SOURCE in vars(cls))
    made = vars(cls)
    names = tuple((name, None if value is torch else value) for name, value in made[_TABLE])
    state = self.__getstate__()  # without what `self.compile()` made: it calls this module, not the copy
    return _rebuild, (cls.__mro__[1], made[SOURCE], names, made[_SHARED]), state


def _rebuild(base: type, source: str, names: tuple[tuple[str, Any], ...], shared: bool) -> nn.Module:
    table = tuple((name, torch if name == "torch" else value) for name, value in names)
    module: nn.Module = object.__new__(_class(base, source, table, shared))
    return module
