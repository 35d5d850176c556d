"""Separate q/k/v inputs in an edited forward: one tensor stands for the values of queries, keys and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rewire.mixes.fused_qkv import project_fused
from rewire.runtime.connection import CONNECTIONS, SeparateNorms
from rewire.runtime.live import Live
from rewire.runtime.nested import mapped
from rewire.topologies.base import QKVInputs


class SeparateInputs:
    """What a function reads by `QKVInputs`, behind the tensors that stand for them.

    Attributes:
        live: the streams of the function.
    """

    def __init__(self) -> None:
        self.live: list[Live] = []
        self._known: list[tuple[Tensor, QKVInputs]] = []  # the tensor that stands for them, and they
        self._side_by_side = False  # whether such values came in as one tensor

    def qkv(self, value: Any, width: int | None = None) -> Any:
        """The tensor that stands for the values of queries, keys and values in a function that projects them.

        Args:
            value: what came in: for all three; or the same for all.
            width: channels of each.
        """
        if isinstance(value, Tensor) and width is not None and value.shape[-1] == 3 * width:
            q, k, v = value.chunk(3, -1)
            value, self._side_by_side = QKVInputs(q, k, v, residual=q), True
        if not isinstance(value, QKVInputs):
            return value
        self._known.append((value.q, value))
        return value.q

    def each(self, function: Callable[[Tensor], Any], value: Tensor) -> Any:
        """``function(value)``, computed for queries, keys and values each; a norm may have copies for the latter."""
        qkv = self._qkv(value)
        if qkv is None:
            return function(value)
        apart = getattr(function, CONNECTIONS, None)
        k, v = (apart.k, apart.v) if isinstance(apart, SeparateNorms) else (function, function)
        calls = ((function, qkv.q), (k, qkv.k), (v, qkv.v), (function, qkv.residual))
        made: list[Any] = []
        for number, (norm, x) in enumerate(calls):
            same = next((n for n, (other, y) in enumerate(calls[:number]) if other is norm and y is x), None)
            made.append(norm(x) if same is None else made[same])
        number = 0 if value is qkv.q else 3
        if isinstance(made[0], tuple):
            for items in zip(*made, strict=True):
                if isinstance(items[0], Tensor):
                    self._known.append((items[number], QKVInputs(*items)))
        else:
            self._known.append((made[number], QKVInputs(*made)))
        return made[number]

    def separate(self, value: Any) -> Any:
        """An argument of what holds an attention's projections: the values for all three.

        On the ranks of a mesh as one tensor, side by side: parallel styles gather the arguments of an attention, which
        have to be tensors, and one call then gathers all three.
        """
        side_by_side = self._side_by_side or any(live.stream.on_mesh for live in self.live)

        def apart(part: Any) -> Any:
            qkv = self._qkv(part)
            if qkv is None:
                return part
            return torch.cat([qkv.q, qkv.k, qkv.v], dim=-1) if side_by_side else qkv

        return mapped(value, apart)

    def q(self, value: Tensor) -> Tensor:
        """What queries are projected from."""
        qkv = self._qkv(value)
        return value if qkv is None else qkv.q

    def k(self, value: Tensor) -> Tensor:
        """What keys are projected from."""
        qkv = self._qkv(value)
        return value if qkv is None else qkv.k

    def v(self, value: Tensor) -> Tensor:
        """What values are projected from."""
        qkv = self._qkv(value)
        return value if qkv is None else qkv.v

    def fused(self, projection: nn.Module, groups: int, sizes: tuple[int, int, int], value: Tensor) -> Tensor:
        """``projection(value)``, with the features of each of the three from its own value; layout: see `Fused`."""
        qkv = self._qkv(value)
        if qkv is None:
            projected: Tensor = projection(value)
            return projected
        return project_fused(projection, groups, sizes, qkv.q, qkv.k, qkv.v)

    def _qkv(self, value: Any) -> QKVInputs | None:
        for stands, qkv in self._known:
            if stands is value:
                return qkv
        for live in self.live:
            if live.qkv is not None and live.values[0] is value:
                return live.qkv
        return None
