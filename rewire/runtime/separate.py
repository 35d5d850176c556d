"""Separate q/k/v inputs in an edited forward, where one tensor stands for all three."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rewire.attributes import CONNECTIONS
from rewire.errors import OutOfOrder
from rewire.mixes.again import norm_again, sparing
from rewire.mixes.fused_qkv import Fused, fused_linear, project_fused
from rewire.runtime.connection import SeparateNorms
from rewire.runtime.live import Live
from rewire.runtime.nested import like, mapped
from rewire.topologies.base import QKVInputs

_WAYS = ("q", "k", "v", "residual")
_Args: TypeAlias = tuple[Any, ...]
_Kwargs: TypeAlias = dict[str, Any]


class SeparateInputs:
    """The `QKVInputs` of one call of a function, each with the tensor that stands for it in the function's variables.

    Args:
        block, where: as in the function's `Gate`, for messages.
        live: the open streams of the call.
    """

    def __init__(self, block: str, where: str, live: list[Live]) -> None:
        self.block, self.where, self.live = block, where, live
        self._known: list[tuple[Tensor, QKVInputs]] = []  # each with the tensor that stands for it
        self._side_by_side = False  # whether such inputs came in concatenated

    def open(self, value: object, width: int | None) -> Any:
        """`Depth.open` for an argument that holds all three inputs: the tensor that stands for them."""
        if isinstance(value, Tensor) and width is not None and value.shape[-1] == 3 * width:
            q, k, v = value.chunk(3, -1)
            value, self._side_by_side = QKVInputs(q, k, v, residual=q), True
        if not isinstance(value, QKVInputs):
            return value
        self._known.append((value.residual, value))
        return value.residual

    def apply(self, function: Callable[..., Any], *values: object) -> Any:
        """`Depth.apply`: ``function(*values)`` for queries, keys and values each; a norm may have a copy for each.

        Raises:
            OutOfOrder: there is no tensor among the values.
        """
        values = tuple(self.open(value, None) for value in values)  # arguments of a function inside a forward
        known = next(filter(None, map(self._qkv, _tensors(values))), None)
        if known is None:
            if next(_tensors(values), None) is None:
                raise self.lost(f"computes the input of an attention from {_told(values)}, not from a tensor")
            return function(*values)
        apart = getattr(function, CONNECTIONS, None)
        k, v = (apart.k, apart.v) if isinstance(apart, SeparateNorms) else (function, function)
        calls = [(f, self._of_way(values, way)) for f, way in zip((function, k, v, function), _WAYS, strict=True)]
        made: list[Any] = []
        for number, (f, given) in enumerate(calls):
            same = (n for n, (g, others) in enumerate(calls[:number]) if g is f and _identical(given, others))
            first = next(same, None)
            made.append(_called(f, given) if first is None else made[first])
        if isinstance(made[0], (tuple, list)):
            for items in zip(*made, strict=True):
                if isinstance(items[0], Tensor):
                    self._known.append((items[3], QKVInputs(*items)))
        else:
            self._known.append((made[3], QKVInputs(*made)))
        return made[3]

    def _of_way(self, value: object, way: str) -> Any:
        """``value``, with the input of queries, keys or values in place of the tensor that stands for all."""
        if isinstance(value, (tuple, list)):
            items = [self._of_way(item, way) for item in value]
            return value if _identical(items, value) else like(value, items)
        qkv = self._qkv(value) if isinstance(value, Tensor) else None
        return value if qkv is None else getattr(qkv, way)

    def through(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`Depth.through` for a module that holds projections: it gets the `QKVInputs`.

        On a device mesh it gets them concatenated: parallel styles gather the arguments of an attention, which have to
        be tensors, and this takes one call instead of three.
        """
        side_by_side = self._side_by_side or any(live.stream.on_mesh for live in self.live)

        def apart(part: object) -> Any:
            qkv = self._taken(part)
            if qkv is None:
                return part
            return torch.cat([qkv.q, qkv.k, qkv.v], dim=-1) if side_by_side else qkv

        return lambda *args, **kwargs: function(*mapped(args, apart, fresh=True), **mapped(kwargs, apart, fresh=True))

    def project(
        self, projection: Callable[..., Any], what: str | tuple[int, Any] | Mapping[Any, str | tuple[int, Any]]
    ) -> Callable[..., Any]:
        """`Depth.project`."""
        if isinstance(what, Mapping):
            if projection not in what:
                return projection
            what = what[projection]
        if isinstance(what, tuple):
            return lambda *args, **kwargs: self._fused(projection, Fused(*what), args, kwargs)

        def call(*args: object, **kwargs: object) -> Any:
            if what == "qkv":
                args, kwargs = self._each(args, kwargs)
            else:
                qkv = self._projected(*args, *kwargs.values())
                args, kwargs = (args, kwargs) if qkv is None else self._given(qkv, getattr(qkv, what), args, kwargs)
            like = next(_tensors([*args, *kwargs.values()]), None)
            with contextlib.nullcontext() if like is None else sparing(like):
                return projection(*args, **kwargs)

        return call

    def _each(self, args: _Args, kwargs: _Kwargs) -> tuple[_Args, _Kwargs]:
        """The arguments of a torch.nn.MultiheadAttention, with the separate input for each of the three."""
        names = {"query": "q", "key": "k", "value": "v"}
        given = [self._input(value, way) for value, way in zip(args, "qkv", strict=False)]
        named = {name: self._input(kwargs[name], names[name]) for name in kwargs.keys() & names.keys()}
        return (*given, *args[len(given) :]), {**kwargs, **named}

    def _input(self, value: object, way: str) -> Any:
        """The separate input of queries, keys or values, if ``value`` stands for one."""
        qkv = self._projected(value)
        return value if qkv is None else getattr(qkv, way)

    def _given(self, qkv: QKVInputs, x: Tensor, args: _Args, kwargs: _Kwargs) -> tuple[_Args, _Kwargs]:
        """Arguments with ``x`` in place of the tensor that stands for the three."""
        own = lambda value: x if value is qkv or self._qkv(value) is qkv else value  # noqa: E731
        return tuple(map(own, args)), {name: own(value) for name, value in kwargs.items()}

    def _fused(self, projection: Callable[..., Any], layout: Fused, args: _Args, kwargs: _Kwargs) -> Any:
        """``projection(*args, **kwargs)``, where queries, keys and values are each projected from their own input."""
        qkv = self._projected(*args, *kwargs.values())
        if qkv is None:
            return projection(*args, **kwargs)

        def product(x: Tensor) -> Tensor:
            given, named = self._given(qkv, x, args, kwargs)
            return projection(*given, **named)

        with sparing(qkv.q):
            if projection is F.linear:
                return fused_linear(*_weights(*args, **kwargs), layout.groups, layout.sizes, qkv.q, qkv.k, qkv.v)
            whole = projection if isinstance(projection, nn.Module) else product
            return project_fused(whole, layout.groups, layout.sizes, qkv.q, qkv.k, qkv.v)

    def _projected(self, *values: object) -> QKVInputs | None:
        """The separate inputs for a projection with these arguments; None if this call has none.

        Raises:
            OutOfOrder: there are separate inputs, but none of the arguments stands for them.
        """
        for value in values:
            qkv = self._taken(self.open(value, None))  # the argument of a function inside a forward
            if qkv is not None:
                return qkv
        if self._known or any(live.qkv is not None for live in self.live):
            raise self.lost("projects queries, keys or values from a tensor that was not made of what it read for them")
        return None

    def _taken(self, value: object) -> QKVInputs | None:
        """`_qkv` for a projection, or a module that holds projections: marks the inputs as used."""
        qkv = self._qkv(value)
        for live in self.live if qkv is not None else ():
            live.apart = True
        return qkv

    def lost(self, what: str) -> OutOfOrder:
        return OutOfOrder(
            f"block '{self.block}' ({self.where}) {what}: the separate inputs of its queries, keys and values are lost "
            "on this way through its code. Pass example_inputs that take the same way, or use a topology that reads "
            "one value."
        )

    def _qkv(self, value: object) -> QKVInputs | None:
        for stands, qkv in self._known:
            if stands is value:
                return qkv
        for live in self.live:
            if live.qkv is not None and live.values[0] is value:
                return live.qkv
        return None


def _weights(input: object, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Weight and bias among the arguments of `torch.nn.functional.linear`."""
    return weight, bias


def _called(function: Callable[..., Any], given: Sequence[object]) -> Any:
    if len(given) == 1 and isinstance(given[0], Tensor):
        return norm_again(function, given[0])
    return function(*given)


def _tensors(values: Any) -> Iterator[Tensor]:
    """The tensors among values, including those in nested tuples and lists."""
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _tensors(value)
        elif isinstance(value, Tensor):
            yield value


def _identical(values: Sequence[object], others: Sequence[object]) -> bool:
    return all(value is other for value, other in zip(values, others, strict=True))


def _told(values: Sequence[object]) -> str:
    return " and ".join(f"'{type(value).__name__}'" for value in values)
