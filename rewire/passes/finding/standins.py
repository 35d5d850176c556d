"""Stand-ins for tensors and globals in a forward that `follow` traces. For modules see `views`.

Tensors are torch.fx proxies. Globals are a table that looks names up in the user's own, and returns functions that see
the same table. Nothing of the user's is changed.
"""

from __future__ import annotations

import dis
import operator
import sys
from collections.abc import Callable, Iterator
from types import FrameType, FunctionType, SimpleNamespace
from typing import Any, Protocol

import torch
from torch import fx, nn

from rewire.errors import TraceError
from rewire.passes.finding.flow import Args, Kwargs

#: Creation functions: the only torch functions that ignore a proxy among their arguments.
_CREATION = frozenset(["arange", "empty", "finfo", "full", "linspace", "ones", "rand", "randint", "randn"])
_CREATION |= {"tensor", "zeros"}
#: Attributes of a weight that are no tensors.
SIZES = {"shape", "dtype", "device", "ndim", "size", "dim", "numel", "is_cuda", "requires_grad", "is_meta", "__len__"}
#: Operations that split a tensor into parts, whose number is among the arguments.
_PARTS = {"chunk", "split"}


class Tracer(Protocol):
    """What stand-ins need from the tracer."""

    def create_proxy(self, kind: str, target: object, args: Args, kwargs: Kwargs) -> fx.Proxy: ...

    def nodes(self, value: object) -> list[Any]: ...

    def call_view(self, view: nn.Module, args: Args, kwargs: Kwargs) -> Any: ...

    def weight(self, tensor: torch.Tensor) -> fx.Proxy: ...


class Proxy(fx.Proxy):
    """A traced tensor; or a tuple of tensors, which can be unpacked where the code says how many there are."""

    def __iter__(self) -> Iterator[Any]:
        itself: Any = self
        frame = sys._getframe(1)
        operation, number = _instruction(frame)
        if operation == "UNPACK_SEQUENCE":
            return iter([itself[index] for index in range(number)])
        count = self._count()
        if operation in ("LIST_EXTEND", "CALL_FUNCTION_EX"):
            return iter([self])  # (*shape, -1): the number of sizes does not matter here
        if not count:
            raise TraceError("it loops over a traced value")
        return iter([itself[index] for index in range(count)])

    def __radd__(self, other: object) -> Any:
        if isinstance(other, (tuple, list)):  # (x,) + more: the traced value stands for all further ones
            return type(other)([*other, self])
        return self.tracer.create_proxy("call_function", operator.add, (other, self), {})

    def _count(self) -> int:
        node = self.node
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        if name not in _PARTS or len(node.args) < 2:
            return 0
        parts = node.args[1]
        if isinstance(parts, (list, tuple)):
            return len(parts)
        return parts if name == "chunk" and isinstance(parts, int) else 0

    def __len__(self) -> int:
        raise TypeError("the length of a traced value is not known")


class Weight(Proxy):
    """A parameter or buffer."""

    def __init__(self, node: fx.Node, tracer: fx.Tracer, tensor: torch.Tensor) -> None:
        super().__init__(node, tracer)
        self._tensor = tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensor, name) if name in SIZES else super().__getattr__(name)

    def __len__(self) -> int:
        return len(self._tensor)


def _instruction(frame: FrameType) -> tuple[str, int]:
    """The present instruction of a frame, and its argument (under 256)."""
    code = frame.f_code.co_code
    return dis.opname[code[frame.f_lasti]], code[frame.f_lasti + 1]


class Globals(dict[str, Any]):
    """The globals of a forward as its trace sees them; the user's module is not changed."""

    def __init__(self, original: dict[str, Any], tracer: Tracer, opaque: frozenset[str]) -> None:
        super().__init__()
        self.original, self.tracer, self.opaque = original, tracer, opaque

    def __missing__(self, name: str) -> Any:
        if name == "isinstance" and name not in self.original:
            value: Any = _isinstance
        else:
            value = self._traced(name, self.original[name])
        self[name] = value
        return value

    def _traced(self, name: str, value: Any) -> Any:
        if value is torch:
            return _Torch(self.tracer)
        if name == "ALL_ATTENTION_FUNCTIONS":  # a table of transformers: each function in it is one operation
            return SimpleNamespace(get_interface=lambda _name, function: _recorded(self.tracer, function))
        if name in self.opaque or (
            getattr(value, "__name__", "") in _CREATION and getattr(torch, value.__name__, None) is value
        ):
            return _recorded(self.tracer, value)
        if isinstance(value, FunctionType) and value.__globals__ is self.original:
            return with_globals(value, self)
        return value


def with_globals(function: FunctionType, namespace: dict[str, Any]) -> FunctionType:
    copy = FunctionType(function.__code__, namespace, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


class _Torch:
    """The module ``torch``, except that creation functions are recorded."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        if name == "is_tensor":
            return lambda x: isinstance(x, (fx.Proxy, torch.Tensor))
        return _recorded(self._tracer, value) if name in _CREATION else value


def _recorded(tracer: Tracer, function: Callable[..., Any]) -> Callable[..., Any]:
    def record(*args: object, **kwargs: object) -> Any:
        if tracer.nodes((args, kwargs)):
            return tracer.create_proxy("call_function", function, args, kwargs)
        return function(*args, **kwargs)

    return record


def _isinstance(value: object, classes: Any) -> bool:
    """``isinstance`` that takes a traced value for a tensor."""
    if isinstance(value, fx.Proxy):
        return torch.Tensor in (classes if isinstance(classes, tuple) else (classes,))
    return isinstance(value, classes)
