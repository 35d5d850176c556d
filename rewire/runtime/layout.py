"""What is fixed about a trunk: its topology, and the unit of each residual add."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from rewire.errors import OutOfOrder, UnsupportedCall
from rewire.topologies.base import Dims, Recurrence, States, Topology, as_recurrence
from rewire.torch_internals import memory_of


class Layout:
    """What is fixed about a trunk: its topology, and which unit of the topology each residual add belongs to.

    A *site* is one residual add; a *unit* is what the topology connects: one site each at sublayer granularity, all
    sites of a block at block granularity. A plain class rather than a dataclass: FSDP2 rebuilds every dataclass that
    it meets in a block's inputs, and this object is shared by all streams of a trunk.

    Args:
        trunk: name of the trunk, for error messages.
        topology: the formulas.
        units: unit number (1-based, non-decreasing) of each site.
        width: channels of the hidden states, 0 if unknown.
        attention: units that have separate q/k/v inputs.
        channel_dim: dimension of the hidden states' channels; topologies with weights per channel see it last.
        posts: sites whose sum passes a norm or another operation before it is the new state.
        loops: see `Trunk.loops`.
        overwritten: those of ``posts`` whose result the next residual add writes to in place.

    Attributes:
        posts: those of which the stream has to know: where the topology makes no state of sums, what follows the last
            one is behind the stream.
        channels_are_last: whether the last dimension of hidden states as topologies see them is known to be channels.
        observe: called with what happens to streams, if somebody looks: ``"read"``, the position, and what is read;
            ``"write"``, the site, and its branch outputs; ``"skip"``, a site that did not run, and None; ``"view"``,
            the position, and what gives other dimensions; ``"finish"``, the number of sites, and the output. All as
            the model has hidden states.
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
    ) -> None:
        self.trunk = trunk
        self.topology = topology
        self.units = tuple(units)
        self.posts = frozenset(posts) - ({len(units) - 1} if as_recurrence(topology) is None else set())
        self.loops = tuple(loops)
        self.overwritten = frozenset(overwritten)
        self.dims = Dims(self.units[-1], width, frozenset(attention))
        self.channels_are_last = width > 0 and (channel_dim == -1 or topology.needs_width)
        # weights of one number per state do not care, and moving would change the order of sums in the backward pass
        self.channel_dim = channel_dim if topology.needs_width else -1

    def of(self, topology: Topology, units: Sequence[int] | None = None, attention: Collection[int] = ()) -> Layout:
        """The same trunk with another topology."""
        kept = self.channel_dim, self.posts, self.loops, self.overwritten
        return Layout(self.trunk, topology, units or self.units, self.dims.width, attention, *kept)

    @property
    def recurrence(self) -> Recurrence:
        """The topology, where the model makes states of its sums, or a sum waits for a norm."""
        recurrence = as_recurrence(self.topology)
        assert recurrence is not None
        return recurrence

    @property
    def keeps_branches(self) -> bool:
        """Whether backward keeps what branches return: sums inside a unit are then made again of that."""
        return hasattr(getattr(self.topology, "merge", None), "repeatable")

    def makes_state(self, site: int) -> bool:
        """Whether the operations behind a site make a state of the topology's, rather than what a branch reads next."""
        return self.closes_unit(site) and as_recurrence(self.topology) is not None

    def begins_unit(self, site: int) -> bool:
        return site == 0 or self.units[site - 1] != self.units[site]

    def closes_unit(self, site: int) -> bool:
        return site + 1 == len(self.units) or self.units[site + 1] != self.units[site]

    def reads_qkv(self, site: int) -> bool:
        """Whether the branch of ``site`` begins with an attention that has separate q/k/v inputs."""
        return self.units[site] in self.dims.attention and self.begins_unit(site)

    def check_passes(self, first: int, end: int) -> None:
        """Refuse to leave out these sites if a pass through a loop is among them: each has weights of its own.

        Raises:
            OutOfOrder: one is.
        """
        for start, adds, passes in self.loops:
            left_out = (min(end, start + adds * passes) - max(first, start)) // adds
            if left_out > 0:
                raise self.other_passes(f"{passes - left_out} times", passes)

    def other_passes(self, ran: str = "more often", passes: int = 0) -> OutOfOrder:
        """The error where a loop runs otherwise than when the model was rewired."""
        passes = passes or self.loops[-1][2]
        return OutOfOrder(
            f"trunk '{self.trunk}' goes on through a loop that ran {passes} times when the model was rewired, and runs "
            f"{ran} in this call: each of its {passes} passes has connection weights of its own. Run it as often as "
            f"then.{self.advice}"
        )

    @property
    def advice(self) -> str:
        """What to do about a loop, if the stream goes on through one; a blank comes first."""
        return (
            " With loop='restart', an option of rewire.compile, the stream begins anew in each pass through the loop, "
            "and there may be any number of them, with gradients or without."
        ) * bool(self.loops)

    def token(self, device: torch.device | str) -> Tensor:
        """A hidden state of a single token, whose values mean nothing."""
        sizes = [1] * max(3, -self.channel_dim + 1)
        sizes[self.channel_dim] = self.dims.width or 1
        return torch.zeros(sizes, device=device)

    def channels_last(self, x: Tensor) -> Tensor:
        """A view of a hidden state as topologies see it, [..., D]."""
        return x if self.channel_dim == -1 else x.movedim(self.channel_dim, -1)

    def restored(self, x: Tensor) -> Tensor:
        """A view of [..., D] as the model's blocks see it."""
        return x if self.channel_dim == -1 else x.movedim(-1, self.channel_dim)

    def viewed(self, states: States, view: Callable[[Tensor], Tensor]) -> States:
        """The states in other dimensions: ``view``, which takes hidden states as blocks see them, of each.

        Raises:
            UnsupportedCall: channels are in another dimension then, and the topology keeps values of tokens, too.
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
        """Whether channels are where they were: sizes tell, and where those are the same, strides of a view do."""
        dim, seen = self.channel_dim, view(x)
        if seen.dim() < -dim or seen.shape[dim] != x.shape[dim]:
            return False
        try:
            viewed = not torch.compiler.is_compiling() and memory_of(seen) == memory_of(x)
        except (NotImplementedError, RuntimeError):  # under vmap
            viewed = False
        return not viewed or seen.stride(dim) == x.stride(dim)
