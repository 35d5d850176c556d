"""`Layout`: what is fixed about a trunk."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rewire.errors import OutOfOrder, UnsupportedCall
from rewire.topologies.base import Dims, Recurrence, Start, States, Topology
from rewire.torch_internals import memory_of

_MADE = {torch.empty, torch.eye, torch.full, torch.linspace, torch.ones, torch.rand, torch.randn, torch.zeros}


class Site(NamedTuple):
    """One residual add of a trunk.

    Attributes:
        unit: number of its unit, from 1.
        closes: whether it is the last add of its unit.
        reads_qkv: whether its branch begins with an attention that has separate q/k/v inputs.
        post: whether an operation of the model follows its sum before the next branch reads it.
        makes_state: whether that operation makes a state of the topology, rather than what the next branch reads.
        norm_again: whether backward recomputes the norm of what its branch reads.
        drops: whether its unit is one of `Topology.drops`.
        takes: whether its branch outputs may become part of the stream, rather than be added up.
        left: number of units after its own.
    """

    unit: int
    closes: bool
    reads_qkv: bool
    post: bool
    makes_state: bool
    norm_again: bool
    drops: bool
    takes: bool
    left: int


class Layout:
    """What is fixed about a trunk: its topology, and the unit of each residual add.

    A *site* is one residual add; a *unit* is what the topology connects: one site at sublayer granularity, all sites of
    a block at block granularity. A plain class rather than a dataclass: FSDP2 rebuilds every dataclass that it meets in
    a block's inputs, and all streams of a trunk share this object.

    Args:
        trunk: name of the trunk, for error messages.
        topology: the formulas.
        units: unit number (1-based, non-decreasing) of each site.
        width: number of channels of the hidden states, 0 if unknown.
        attention: units that have separate q/k/v inputs.
        channel_dim: dimension of the hidden states' channels; it is moved last for topologies with weights per channel.
        posts: sites whose sum passes through a norm or another operation before it is the new state.
        loops: see `Trunk.loops`.
        overwritten: those of ``posts`` whose result the next residual add writes to in place.
        repeated: sites -> the first one that the same code makes, where nothing tells which of them runs.
        read_later: sites that write in place -> see `Site.read_later`.

    Attributes:
        sites: the residual adds, in order.
        recurrence: the topology, if it is a `Recurrence`; else None.
        sums_wait: whether sums may wait for the next read: then one kernel computes them together with its norm.
        posts: the argument, without the last site if the topology does not store sums as states: the stream then ends
            before that site's post.
        channels_are_last: whether the last dimension that topologies see is known to be the channels.
        observe: called with each event of a stream, if set: ``"read"``, position, value; ``"write"``, site, branch
            outputs; ``"skip"``, a site that did not run, None; ``"view"``, position, the reshaping function;
            ``"finish"``, number of sites, output. All tensors are in the model's shape.
    """

    observe: Callable[[str, int, Any], None] | None = None

    def __init__(
        self,
        trunk: str,
        topology: Topology,
        units: Sequence[int],
        width: int = 0,
        attention: Collection[int] = (),
        channel_dim: int = -1,
        posts: Collection[int] = (),
        loops: Sequence[tuple[int, int, int]] = (),
        overwritten: Collection[int] = (),
        repeated: Mapping[int, int] = MappingProxyType({}),
        read_later: Mapping[int, Collection[int]] = MappingProxyType({}),
    ) -> None:
        self.trunk = trunk
        self.topology = topology
        self.units = tuple(units)
        self.recurrence = topology if isinstance(topology, Recurrence) else None
        self.sums_wait = self.recurrence is not None and self.recurrence.reads_newest
        self.posts = frozenset(posts) - ({len(units) - 1} if self.recurrence is None else set())
        self.loops = tuple(loops)
        self.overwritten, self.repeated = frozenset(overwritten), dict(repeated)
        self.read_later = dict(read_later)
        self.dims = Dims(self.units[-1], width, frozenset(attention))
        self.channels_are_last = width > 0 and (channel_dim == -1 or topology.needs_width)
        # other topologies work on any shape, and moving channels would change the order of sums in the backward pass
        self.channel_dim = channel_dim if topology.needs_width else -1
        again, drops, sites = topology.norms_again(self.dims), topology.drops(self.dims), list[Site]()
        neighbours = zip((0, *self.units[:-1]), self.units, (*self.units[1:], 0), strict=True)
        for number, (before, unit, following) in enumerate(neighbours):
            closes, reads_qkv = unit != following, unit != before and unit in self.dims.attention
            post, left = number in self.posts, self.dims.depth - unit
            makes_state = post and closes and self.recurrence is not None
            takes = not closes or unit in drops
            sites.append(Site(unit, closes, reads_qkv, post, makes_state, unit in again, unit in drops, takes, left))
        self.sites = tuple(sites)

    def of(self, topology: Topology, units: Sequence[int] | None = None, attention: Collection[int] = ()) -> Layout:
        """The same trunk with another topology."""
        known = self.channel_dim, self.posts, self.loops, self.overwritten, self.repeated, self.read_later
        return Layout(self.trunk, topology, units or self.units, self.dims.width, attention, *known)

    def parameters(self, start: Start) -> dict[str, Tensor]:
        """The topology's weights at a start, made in float32 where the default dtype is another one."""
        with _InFloat32():
            return self.topology.parameters(self.dims, start)

    def check_told(self, first: int, end: int) -> None:
        """Check that these sites are those that were left out, and not others that the same code makes.

        Raises:
            OutOfOrder: it may have been others.
        """
        for site in range(first, end):
            if self.repeated.get(site, site) < first:
                raise OutOfOrder(
                    f"a residual add of trunk '{self.trunk}' was left out in this call, perhaps number {site}, counted "
                    f"from 0. It may as well have been number {self.repeated[site]}, as the same function or module "
                    "makes both, and nothing tells which of its calls is which. Leave none out; or let each add have a "
                    f"module of its own, or a call in an `if` of its own.{self.advice}"
                )

    def check_read_later(self, first: int, end: int) -> None:
        """Check that the next add writes to no state that other variables hold, if these sites were left out.

        Raises:
            UnsupportedCall: it does.
        """
        if first in self.read_later.get(end, ()):
            raise UnsupportedCall(
                f"trunk '{self.trunk}': residual add {end}, counted from 0, writes to the state in place (`x += f`), "
                f"and in this call the adds from {first} on were left out before it: that is a state that another "
                f"variable holds, and that the model reads later. Write `x = x + f` there.{self.advice}"
            )

    def check_passes(self, first: int, end: int) -> None:
        """Check that no whole pass through a loop is skipped with these sites: each pass has its own weights.

        Raises:
            OutOfOrder: a pass is skipped.
        """
        for start, adds, passes in self.loops:
            left_out = (min(end, start + adds * passes) - max(first, start)) // adds
            if left_out > 0:
                raise self.other_passes(f"{passes - left_out} times", passes)

    def other_passes(self, ran: str = "more often", passes: int = 0) -> OutOfOrder:
        """The error for a loop that does not run as often as when the model was rewired."""
        passes = passes or self.loops[-1][2]
        return OutOfOrder(
            f"trunk '{self.trunk}' goes on through a loop that ran {passes} times when the model was rewired, and runs "
            f"{ran} in this call: each of its {passes} passes has connection weights of its own. Run it as often as "
            f"then.{self.advice}"
        )

    @property
    def advice(self) -> str:
        """Advice for error messages, if the trunk has a loop; starts with a blank."""
        return (
            " With loop='restart', an option of rewire.compile, the stream begins anew in each pass through the loop, "
            "and there may be any number of them, with gradients or without."
        ) * bool(self.loops)

    def token(self, device: torch.device | str) -> Tensor:
        """A hidden state of a single token, of zeros."""
        sizes = [1] * max(3, -self.channel_dim + 1)
        sizes[self.channel_dim] = self.dims.width or 1
        return torch.zeros(sizes, device=device)

    def channels_last(self, x: Tensor) -> Tensor:
        """A hidden state as topologies see it, [..., D]: a view."""
        return x if self.channel_dim == -1 else x.movedim(self.channel_dim, -1)

    def restored(self, x: Tensor) -> Tensor:
        """A tensor [..., D] as the model's blocks see it: a view."""
        return x if self.channel_dim == -1 else x.movedim(-1, self.channel_dim)

    def viewed(self, states: States, view: Callable[[Tensor], Tensor]) -> States:
        """All states, reshaped by ``view``, which takes hidden states as blocks see them.

        Raises:
            UnsupportedCall: the channels move to another dimension, and the topology also keeps values of tokens.
        """
        if self.channel_dim == -1:
            return self.topology.viewed(states, view)
        if self.topology.by_token and not self._stay(view, self.restored(self.topology.template(states))):
            raise UnsupportedCall(
                f"trunk '{self.trunk}': between two residual adds the hidden states get dimensions in which dimension "
                f"{self.channel_dim} is not that of their {self.dims.width} channels, and topology "
                f"'{self.topology.registered_name}' has values of tokens, too, which cannot go along. Use a topology "
                "with one weight per state ('ancre-ingoing', 'denseformer'), or keep channels in their place."
            )
        return self.topology.viewed(states, lambda x: self.channels_last(view(self.restored(x))))

    def _stay(self, view: Callable[[Tensor], Tensor], x: Tensor) -> bool:
        """Whether channels stay in their dimension: compares sizes, and for a view of equal size also strides."""
        dim, seen = self.channel_dim, view(x)
        if seen.dim() < -dim or seen.shape[dim] != x.shape[dim]:
            return False
        try:
            viewed = not torch.compiler.is_compiling() and memory_of(seen) == memory_of(x)
        except (NotImplementedError, RuntimeError):  # under vmap
            viewed = False
        return not viewed or seen.stride(dim) == x.stride(dim)


class _InFloat32(TorchFunctionMode):
    """Makes tensors in float32 unless another dtype is asked for; a default dtype would be that of all threads."""

    def __torch_function__(self, function: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **({"dtype": torch.float32} if function in _MADE else {}) | (kwargs or {}))
