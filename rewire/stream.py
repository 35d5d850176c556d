"""The residual stream as a value.

Between the blocks of a rewired model, the variable that used to hold ``hidden_states`` holds a `Stream`. It carries
all that the topology needs, so that blocks keep no state: two interleaved forwards, or a checkpoint's replay, cannot
disturb each other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from rewire.errors import OutOfOrder, WidthMismatch

if TYPE_CHECKING:
    from rewire.topologies.base import Topology


class Layout:
    """What is fixed about a trunk: its topology, and which unit of the topology each residual add belongs to.

    A *site* is one residual add; a *unit* is what the topology connects: one site each at sublayer granularity, all
    sites of a block at block granularity. A plain class rather than a dataclass: FSDP2 rebuilds every dataclass that
    it meets in a block's inputs, and this object is shared by all streams of a trunk.

    Args:
        trunk: name of the trunk, for error messages.
        topology: the formulas.
        units: unit number (1-based, non-decreasing) of each site.
    """

    def __init__(self, trunk: str, topology: Topology, units: Sequence[int]) -> None:
        self.trunk = trunk
        self.topology = topology
        self.units = tuple(units)

    @property
    def depth(self) -> int:
        """Number of units, the T of the formulas."""
        return self.units[-1]

    def opens_unit(self, site: int) -> bool:
        return site == 0 or self.units[site - 1] != self.units[site]

    def closes_unit(self, site: int) -> bool:
        return site + 1 == len(self.units) or self.units[site + 1] != self.units[site]


class Weights:
    """A box around the effective connection weights.

    It hides them from code that casts every tensor in a block's inputs (FSDP2's mixed precision): they have to stay
    float32.
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


@dataclasses.dataclass(frozen=True, eq=False)
class Stream:
    """The state of the residual stream after ``position`` residual adds.

    Attributes:
        states: the tensors of the topology, each shaped like the model's hidden states.
        hidden: inside a unit of several sites, the running value ``r + f_1 + ...``; otherwise None.
        branch: inside such a unit, the sum of the branch outputs so far; otherwise None.
        weights: effective connection weights, computed once per forward when the stream was opened.
        layout: what is fixed about the trunk.
        position: number of residual adds written so far.
    """

    states: tuple[Tensor, ...]
    hidden: Tensor | None
    branch: Tensor | None
    weights: Weights
    layout: Layout
    position: int = 0

    @property
    def complete(self) -> bool:
        """Whether every residual add of the trunk has been written."""
        return self.position == len(self.layout.units)

    @property
    def dtype(self) -> torch.dtype:
        return self.states[0].dtype

    @property
    def device(self) -> torch.device:
        return self.states[0].device

    @property
    def shape(self) -> torch.Size:
        return self.states[0].shape

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """Called when a stream is handed to a torch function, which only takes the tensor that a trunk ends in."""
        stream = next(leaf for leaf in pytree.tree_leaves((args, kwargs), is_leaf=_is_stream) if _is_stream(leaf))
        raise OutOfOrder(
            f"{getattr(func, '__name__', func)} was given the residual stream of trunk '{stream.layout.trunk}' after "
            f"{stream.position} of its {len(stream.layout.units)} residual adds. Either a block was skipped (layer "
            "dropping has to be off), or the model uses its hidden states between the blocks: pass trunks=[...] to "
            "leave this trunk out."
        )

    def read(self) -> Tensor:
        """The value that the next branch sees: ``r_t`` of the topology, or the running value inside a unit."""
        if self.hidden is not None:
            return self.hidden
        if self.complete:
            return self.finish()
        layout = self.layout
        return layout.topology.read(self.states, self.weights.value, layout.units[self.position])

    def write(self, *branches: Tensor) -> Stream:
        """The stream after one residual add of ``branches`` (several when branches run in parallel).

        Raises:
            OutOfOrder: the trunk has no further residual add.
            WidthMismatch: a branch's shape is not the stream's.
        """
        layout, site = self.layout, self.position
        self._check_room(branches)
        opens, closes = layout.opens_unit(site), layout.closes_unit(site)
        if opens and closes:
            topology, unit = layout.topology, layout.units[site]
            states = topology.write(self.states, self.weights.value, unit, *branches)
            return self._advanced(states=states)
        branch = _sum(branches) if self.branch is None else _sum((self.branch, *branches))
        if closes:
            states = layout.topology.write(self.states, self.weights.value, layout.units[site], branch)
            return self._advanced(states=states)
        return self._advanced(hidden=_sum((self.read(), *branches)), branch=branch)

    def merge(self, *branches: Tensor) -> Tensor:
        """First half of a write whose result passes a norm or an activation (post-norm blocks): the sum itself.

        To be followed by `push` with the value that becomes the new state.
        """
        self._check_room(branches)
        layout = self.layout
        return layout.topology.merge(self.states, self.weights.value, layout.units[self.position], *branches)

    def push(self, state: Tensor) -> Stream:
        """Second half of a write: append ``state``, what the block made of `merge`'s result."""
        self._check_room(())
        layout = self.layout
        states = layout.topology.push(self.states, self.weights.value, layout.units[self.position], state)
        return self._advanced(states=states)

    def leave(self) -> Tensor | Stream:
        """What a block returns: the stream, or after the trunk's last residual add the plain tensor."""
        return self.finish() if self.complete else self

    def finish(self) -> Tensor:
        """The trunk's output.

        Raises:
            OutOfOrder: residual adds are missing.
        """
        layout = self.layout
        if not self.complete:
            raise OutOfOrder(
                f"trunk '{layout.trunk}' ends after {self.position} of its {len(layout.units)} residual adds: "
                "a block was skipped. Switch layer dropping off, or rewire the model without these blocks."
            )
        return layout.topology.finish(self.states, self.weights.value, layout.depth)

    def _advanced(
        self, states: tuple[Tensor, ...] | None = None, hidden: Tensor | None = None, branch: Tensor | None = None
    ) -> Stream:
        states = self.states if states is None else states
        return Stream(states, hidden, branch, self.weights, self.layout, self.position + 1)

    def _check_room(self, branches: Sequence[Tensor]) -> None:
        if self.complete:
            raise OutOfOrder(f"trunk '{self.layout.trunk}' is already complete: a block was called once too often.")
        expected = self.states[0].shape
        for branch in branches:
            if branch.shape != expected and not _broadcasts(branch.shape, expected):
                raise WidthMismatch(
                    f"trunk '{self.layout.trunk}', residual add {self.position}: the branch returns "
                    f"{tuple(branch.shape)}, the stream holds {tuple(expected)}. States of one trunk are mixed and "
                    "need one shape; pass trunks=[...] to leave this trunk out."
                )


def _is_stream(value: Any) -> bool:
    return isinstance(value, Stream)


def _broadcasts(shape: torch.Size, expected: torch.Size) -> bool:
    """Whether a tensor of ``shape`` can be added to one of shape ``expected`` without widening it."""
    if len(shape) > len(expected):
        return False
    return all(a in (1, b) for a, b in zip(reversed(shape), reversed(expected), strict=False))


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total


def _flatten(stream: Stream) -> tuple[list[Any], Any]:
    leaves = [stream.states, stream.hidden, stream.branch]
    return leaves, (stream.weights, stream.layout, stream.position)


def _unflatten(leaves: Any, context: Any) -> Stream:
    return Stream(*leaves, *context)


pytree.register_pytree_node(Stream, _flatten, _unflatten, serialized_type_name="rewire.Stream")
