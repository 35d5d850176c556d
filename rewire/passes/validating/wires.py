"""One pass of a stream through a trunk by the formulas of its topology, in float64 and plain torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rewire.mixes.autograd import plainly
from rewire.mixes.tokens import outside_autocast
from rewire.runtime.layout import Layout
from rewire.topologies.base import QKVInputs, materialize, total


class Wires:
    """One pass of a stream through a trunk.

    Args:
        layout: topology and units.
        weights: effective connection weights.

    Attributes:
        value: what the model's next operations read.
        qkv: values for queries, keys and values, if the next branch is an attention that reads them separately.
        site: number of residual adds so far.
    """

    def __init__(self, layout: Layout, weights: object) -> None:
        self.layout, self.weights, self.topology = layout, weights, layout.topology
        self.site = 0
        self.value: Tensor | None = None
        self.qkv: dict[str, Tensor] | None = None
        self._states: tuple[Any, ...] = ()
        self._exact: Any = None  # the value in float64, in the model's dimensions
        self._branches: list[Tensor] = []  # of the present unit, likewise

    @property
    def complete(self) -> bool:
        return self.site == len(self.layout.units)

    def start(self, x: Tensor) -> Tensor:
        """The read from the trunk's input."""
        with plainly(), outside_autocast(x.device):
            self._states = self.topology.start(self._last(_exact(x)), self.weights)
            return self._read(x)

    def add(self, branches: Sequence[Tensor], plain: Tensor) -> Tensor:
        """The value after a residual add of ``branches``, which is ``plain`` in the original.

        After the last add of a unit it is the next read. Inside a unit, and if further operations make the next state
        (`push`), it is the sum.
        """
        layout, site = self.layout, self.layout.sites[self.site]
        new = [_exact(branch.expand_as(plain)) for branch in branches]
        self._branches, self.site, self.qkv = [*self._branches, *new], self.site + 1, None
        with plainly(), outside_autocast(plain.device):
            if not site.closes:
                self._exact = total((self._exact, *new))
                return self._rounded(plain)  # `push` may change it
            f, self._branches = self._last(total(tuple(self._branches))), []
            if site.makes_state and layout.recurrence is not None:
                merged = layout.recurrence.merge(self._states, self.weights, site.unit, f)
                self._exact = layout.restored(materialize(merged))
                return self._rounded(plain)
            self._states = self.topology.write(self._states, self.weights, site.unit, f)
            return self._read(plain)

    def push(self, state: Tensor) -> Tensor:
        """The read after operations that follow an add have made ``state`` from its sum."""
        site, recurrence, exact = self.layout.sites[self.site - 1], self.layout.recurrence, _exact(state)
        if recurrence is None or not site.makes_state:
            change = exact - self._exact
            self._branches, self._exact = [*self._branches, change], exact
            self.qkv = self.qkv and {way: (x + change).to(x.dtype) for way, x in self.qkv.items()}
            return self._rounded(state)
        with plainly(), outside_autocast(state.device):
            if _is_cut(self.value, state):  # the earlier states lose their gradients from here on, too
                self._states = self.topology.viewed(self._states, Tensor.detach)
            self._states = recurrence.push(self._states, self.weights, site.unit, self._last(exact))
            return self._read(state)

    def view(self, function: Callable[[Tensor], Tensor], value: Tensor) -> None:
        """Change the stream's dimensions: ``value`` is ``function`` applied to what was read."""
        with plainly():
            self._states = self.layout.viewed(self._states, function)
        self._branches, self._exact = [*map(function, self._branches)], function(self._exact)
        self.qkv = None if self.qkv is None else {way: function(x) for way, x in self.qkv.items()}
        self.value = value

    def _read(self, like: Tensor) -> Tensor:
        layout = self.layout
        if self.complete:
            self._exact = layout.restored(self.topology.finish(self._states, self.weights, layout.dims))
            return self._rounded(like)
        read, self._states = self.topology.read(self._states, self.weights, layout.units[self.site])
        if isinstance(read, QKVInputs):
            ways = {way: layout.restored(getattr(read, way)) for way in ("q", "k", "v", "residual")}
            self._exact = ways.pop("residual")
            self.qkv = {way: x.to(like.dtype) for way, x in ways.items()}
        else:
            self._exact = layout.restored(materialize(read))
        return self._rounded(like)

    def _rounded(self, like: Tensor) -> Tensor:
        self.value = self._exact.to(like.dtype)
        if like.is_contiguous():
            self.value = self.value.contiguous()
        return self.value

    def _last(self, x: Tensor) -> Tensor:
        return self.layout.channels_last(x)


def _exact(x: Tensor) -> Tensor:
    """``x`` in double precision in its own memory, as the model may write to ``x``."""
    return x.to(torch.promote_types(x.dtype, torch.float64), copy=True)


def _is_cut(x: Tensor | None, state: Tensor) -> bool:
    """Whether no gradient of ``state``, which was made of ``x``, reaches ``x``."""
    if x is None or not x.requires_grad or not torch.is_grad_enabled():
        return False
    if not state.requires_grad:
        return True
    if state is x:
        return False
    drawn = torch.Generator().manual_seed(0)  # the model's own random numbers follow
    seen = torch.rand(state.shape, generator=drawn, dtype=torch.float64, device="cpu").to(state)
    (grad,) = torch.autograd.grad(state, x, seen, retain_graph=True, allow_unused=True)
    return grad is None or not bool(grad.any())
