"""Modules as `follow` traces them: with their own attributes, and children whose calls are traced."""

from __future__ import annotations

from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from rewire.attributes import MODULE, TRACER
from rewire.passes.finding.standins import Globals, Tracer, with_globals
from rewire.torch_internals import BUFFERS, CHILDREN, PARAMETERS, children_of


class Views:
    """Stand-ins for modules, one for each. The modules and their classes stay as they are.

    Args:
        tracer: traces the calls.
    """

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer
        self._views: dict[nn.Module, nn.Module] = {}
        self._classes: dict[type, type] = {}
        self._namespaces: dict[int, Globals] = {}
        self._objects: dict[int, tuple[Any, dict[str, Any]]] = {}  # by id: the object, its attributes before

    def of(self, module: nn.Module) -> nn.Module:
        """The stand-in for a module."""
        if module not in self._views:
            view: nn.Module = object.__new__(self._class(type(module)))
            self._views[module] = view
            own = {name: _own(value) for name, value in vars(module).items()}
            vars(view).update({**own, MODULE: module, TRACER: self.tracer})
            for value in vars(module).values():
                if id(value) not in self._objects and _keeps_values(value):  # all modules share a config
                    self._objects[id(value)] = value, dict(vars(value))
            vars(view)[CHILDREN] = {name: child and self.of(child) for name, child in children_of(module).items()}
        return self._views[module]

    def put_back(self) -> None:
        """Restore the objects in modules' attributes: some keep what they compute for the next call."""
        for value, before in self._objects.values():
            now = vars(value)
            if now.keys() != before.keys() or any(now[name] is not before[name] for name in before):
                now.clear()
                now.update(before)

    def _class(self, cls: type) -> type:
        """The class of the stand-ins for modules of a class."""
        if cls not in self._classes:
            members = {**self._methods(cls), "__call__": _called, "__getattr__": _attribute}
            metaclass: Any = type(cls)
            self._classes[cls] = metaclass(cls.__name__, (_Quiet, cls), members)
        return self._classes[cls]

    def _methods(self, cls: type) -> dict[str, Any]:
        """The methods of a user's class, as they are traced."""
        methods: dict[str, Any] = {}
        for base in reversed(cls.__mro__):
            if base.__module__.startswith("torch.") or base is object:
                continue
            for name, value in vars(base).items():
                function = value.__func__ if isinstance(value, staticmethod) else value
                if isinstance(function, FunctionType) and not name.startswith("__"):
                    traced = with_globals(function, self._namespace(function))
                    methods[name] = staticmethod(traced) if isinstance(value, staticmethod) else traced
        return methods

    def _namespace(self, function: FunctionType) -> Globals:
        original = function.__globals__
        if id(original) not in self._namespaces:
            self._namespaces[id(original)] = Globals(original, self.tracer, frozenset())
        return self._namespaces[id(original)]


class _Quiet:
    """Keeps ``__init_subclass__`` of base classes from acting on the classes of views."""

    def __init_subclass__(cls, **kwargs: object) -> None:
        pass


def _called(view: nn.Module, *args: object, **kwargs: object) -> Any:
    return vars(view)[TRACER].call_view(view, args, kwargs)


def _attribute(view: nn.Module, name: str) -> Any:
    """Attribute lookup of a view, which gives parameters and buffers as traced values with known sizes."""
    for table in (PARAMETERS, BUFFERS):
        tensor = view.__dict__.get(table, {}).get(name)
        if tensor is not None:
            return vars(view)[TRACER].weight(tensor)
    return nn.Module.__getattr__(view, name)


def _own(value: Any) -> Any:
    """A copy of a container, so that what a forward appends stays with the view."""
    return value.copy() if type(value) in (list, dict, set) else value


def _keeps_values(value: object) -> bool:
    """Whether an object is of a user's class, and so may keep what a forward computes."""
    if type(value).__module__.partition(".")[0] in ("builtins", "collections", "torch"):
        return False
    return hasattr(value, "__dict__") and not isinstance(
        value, (nn.Module, torch.Tensor, type, ModuleType, FunctionType)
    )
