"""The residual stream as a value.

Between the blocks of a rewired model, the variable that held ``hidden_states`` holds a `Stream`. It carries everything
that the topology needs, and blocks keep no state, so two interleaved forwards, or the recomputation of a checkpoint,
do not disturb each other.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from rewire.errors import OutOfOrder, UnsupportedCall, WidthMismatch
from rewire.kernels.switch import uses_kernels
from rewire.mixes.again import UnitsLeft, norm_again
from rewire.mixes.autograd import passes
from rewire.mixes.history import History
from rewire.mixes.mix import Mix
from rewire.placement import Placement, check_whole
from rewire.runtime.held import Begun, Post, Reading, Unsummed
from rewire.runtime.layout import Layout, Site
from rewire.runtime.reentrant import USE, where_reentrant
from rewire.runtime.shared import Shared
from rewire.runtime.tensorlike import TensorLike
from rewire.runtime.writes import PART, check_parts, counted, uncounted
from rewire.topologies.base import QKVInputs, States, materialize, total
from rewire.torch_internals import (
    memory_within,
    only_inlined,
    outside_inference_mode,
    pytree,
    saved_tensor_hooks,
    unviewed,
    writes_within,
)


@dataclasses.dataclass(eq=False)  # not changed after __init__, but frozen=True would make that three times as slow
class Stream(TensorLike):
    """The residual stream after ``position`` residual adds.

    Attributes:
        states: the tensors of the topology.
        held: what the stream holds besides its states; None if the last unit is written, and the next has not read.
        shared: what all streams of one forward of the trunk share: the effective connection weights above all.
        layout: what is fixed about the trunk.
        position: number of residual adds written so far.
        placement: where the model's hidden states lie on a device mesh; None if unknown. The stream itself holds only
            plain local tensors: it unwraps what it is given, and wraps what it returns.
    """

    states: States
    held: Reading | Unsummed | Post | None
    shared: Shared
    layout: Layout
    position: int = 0
    placement: Placement | None = None

    @classmethod
    def begin(
        cls,
        x: Tensor,
        weights: object,
        layout: Layout,
        placement: Placement | None = None,
        learned: Mapping[str, Tensor] | None = None,
    ) -> Stream:
        """The stream of a trunk with input ``x`` and effective ``weights``, computed from ``learned``.

        Raises:
            WidthMismatch: the topology has weights per channel, and ``x`` has another number of channels.
        """
        width, dim = layout.dims.width, layout.channel_dim
        if x.is_nested:
            raise UnsupportedCall(
                f"the hidden states of trunk '{layout.trunk}' are nested tensors: pad them, or leave the trunk "
                "out with trunks=[...]"
            )
        if x.is_complex() and layout.topology.needs_width:
            raise UnsupportedCall(
                f"the hidden states of trunk '{layout.trunk}' are complex, and the weights per channel of topology "
                f"'{layout.topology.registered_name}' are not. Use a topology with one weight per state, or "
                "trunks=[...] to leave it out."
            )
        if layout.topology.needs_width and x.shape[dim] != width:
            raise WidthMismatch(
                f"trunk '{layout.trunk}' was found to be {width} channels wide (dimension {dim}), but its input has "
                f"shape {tuple(x.shape)}. Use a topology with one weight per state, or trunks=[...] to leave it out."
            )
        states, shared = layout.topology.start(layout.channels_last(x), weights), Shared(weights, learned)
        shared.format = _format(x, layout.channel_dim)
        stream = cls(states, None, shared, layout, placement=placement)
        shared.know(x)
        return stream

    @property
    def complete(self) -> bool:
        """Whether every residual add of the trunk has been written."""
        return self.position == len(self.layout.sites) and not isinstance(self.held, Post)

    @property
    def in_post(self) -> bool:
        """Whether the stream waits for `push`: the model makes the next state of the last add's sum."""
        return isinstance(self.held, Post)

    @property
    def reading(self) -> Reading | None:
        """The last read, if its branch is still running."""
        held = self.held
        return held if isinstance(held, Reading) else held.reading if isinstance(held, Post) else None

    @property
    def template(self) -> Tensor:
        """A tensor with the hidden states' shape, dtype and device, and arbitrary values."""
        template = self.layout.topology.template(self.states)
        return template if self.layout.channel_dim == -1 else self.layout.restored(template)

    @property
    def dtype(self) -> torch.dtype:
        return self.template.dtype

    @property
    def device(self) -> torch.device:
        return self.template.device

    @property
    def shape(self) -> torch.Size:
        return self._out(self.template).shape

    def read(self) -> tuple[Tensor | QKVInputs, Stream]:
        """What the next branch reads, and the stream to `write` to.

        The read is the topology's ``r_t``, or inside a unit the sum so far. An attention may get `QKVInputs`, with
        separate values for its queries, keys and values.
        """
        if isinstance(self.held, Reading) and self.held.qkv is not None:
            return self._out(self.held.qkv), self
        value, states = self._due()
        if not isinstance(value, QKVInputs):
            value = materialize(value)
            value = unviewed(value) if self.position else value  # as the model's sums
            if not self.layout.sites[self.position].reads_qkv:
                return self._out(value), self._read_as(states, value)
            value = QKVInputs(value, value, value, value)
        return self._out(value), self._read_as(states, value.residual, value)

    def read_normed(self, norm: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Stream]:
        """`read` together with the output of ``norm``: in one kernel, if the value is a sum yet to be computed.

        Not for separate q/k/v inputs.
        """
        due, states = self._due()
        assert not isinstance(due, QKVInputs)
        if self.placement is not None and self.wraps:  # the norm takes a DTensor, like the model's other modules
            local = materialize(due)
            value = self._out(local)
            return value, norm(value), self._read_as(states, local)
        again = torch.is_grad_enabled() and self.layout.sites[self.position].norm_again
        alone = functools.partial(norm_again, norm) if again else norm
        value, normed = due.normed(norm, alone) if isinstance(due, Mix) else (due, alone(due))
        value = unviewed(value) if self.position else value
        return value, normed, self._read_as(states, value)

    def _due(self) -> tuple[Tensor | Mix | QKVInputs, States]:
        """What the next branch reads, perhaps a sum yet to be computed, and the states after the read."""
        layout, held = self.layout, self.held
        if isinstance(held, Unsummed):
            self.check_known(all=False)
            return self._merge(layout.sites[self.position - 1], held.branches), self.states
        if isinstance(held, Reading):
            if len(held.parts) == 1:  # read by the caller of this function, or by the block before
                self.check_known(all=False)
                return held.parts[0], self.states
            # Such a topology keeps branch outputs anyway.
            again = hasattr(getattr(layout.topology, "merge", None), "repeatable")
            return Mix(added=held.parts, again=again), self.states
        site = layout.sites[self.position]
        if site.drops:
            self.check_known(all=True)
        read = layout.topology.read(self.states, self.shared.weights, site.unit)
        if not isinstance(read, tuple):
            raise TypeError(f"{type(layout.topology).__name__}.read has to return the value read, and the states.")
        value, states = read
        if isinstance(value, QKVInputs):
            return QKVInputs(*map(self._restored, (value.q, value.k, value.v, value.residual))), states
        as_it_is = layout.channel_dim == -1 and self.shared.format is None
        return value if as_it_is else self._restored(materialize(value)), states

    def _restored(self, x: Tensor) -> Tensor:
        """A tensor [..., D] as the model's blocks see it."""
        x, format = self.layout.restored(x), self.shared.format
        if format is None or x.dim() != _DIMS.get(format, x.dim()):  # the model may have flattened images
            return x
        return x.contiguous(memory_format=format)

    def _read_as(self, states: States, value: Tensor, qkv: QKVInputs | None = None) -> Stream:
        """The stream after reading ``value``, with the states of `_due`."""
        held = self.held
        if isinstance(held, Unsummed):
            stream = self._pushed(value)
            return stream._read_as(stream._due()[1], value, qkv)
        if self.layout.observe is not None:
            self.layout.observe("read", self.position, value)
        reading = Reading((value,), held.branch if isinstance(held, Reading) else None, qkv)
        return Stream(states, reading, self.shared, self.layout, self.position, self.placement)

    def value(self) -> Tensor:
        """The hidden state that the model would have here, for code other than the next block or the trunk's end.

        Gradients of this extra read are left to autograd: rewire's own backward functions expect one read of a state.
        """
        if isinstance(self.held, Post):
            return self._out(self.held.sum)
        if self.position == 0 and self.held is None and self.shared.input is not None:
            return self.shared.input
        lasting = self.layout.topology.lasting(self.states)
        states = tuple([s if isinstance(s, Tensor) else s.viewed(lambda x: x) for s in lasting])
        apart = self._with(states, self.held)
        if apart.complete:
            return apart.finish()
        value, _ = apart.read()
        return value.residual if isinstance(value, QKVInputs) else value

    def unread(self) -> Tensor:
        """A tensor of NaN that stands for the stream at the end of a pipeline stage, where the next stage reads."""
        return self._out(self.template.new_full((), torch.nan).expand(self.template.shape))

    def lent(self) -> Tensor:
        if uncounted():
            with outside_inference_mode():
                return self.lent()
        value = counted(self.value())
        self.shared.lend(value)
        return value

    def check_lent(self) -> None:
        """Check that lent values were not written to in place: the states would not change with them.

        Raises:
            OutOfOrder: one was.
        """
        if self.shared.changed():
            raise self.written_to("through a view")

    @property
    def known(self) -> list[Tensor]:
        """The tensors of the stream that the model knows, and others if torch.compile traces."""
        if torch.compiler.is_dynamo_compiling():
            return self._parts()
        known = (reference() for reference, _ in self.shared.known)
        return [value for value in known if value is not None and self._holds(value)]

    def check_known(self, *, all: bool) -> None:
        """Check that the model has not written to tensors that it knows and that are part of the stream.

        Args:
            all: whether to look at all states, and not only at what the last unit has read and written.

        Raises:
            OutOfOrder: it has.
        """
        if torch.compiler.is_dynamo_compiling():
            check_parts(*self._parts(newest=not all))
            return
        newest = 0 if all else -2 * len(self._held_apart())  # a read and a branch for each tensor of the unit so far
        for reference, before in self.shared.known[newest:]:
            value = reference()
            if value is None or before is None or writes_within(value) == before:
                continue
            if self._holds(value):  # asked last: versions are compared faster than memory
                raise OutOfOrder(
                    f"the input of trunk '{self.layout.trunk}', what one of its branches has returned, or a hidden "
                    f"state was written to in place before residual add {self.position + 1}, after it became part of "
                    f"the residual stream: {PART}"
                )

    def _holds(self, value: Tensor) -> bool:
        """Whether a tensor's memory is part of the stream; if that cannot be told, yes."""
        memory = memory_within(value)
        return memory is None or any(memory == memory_within(part) for part in self._parts())

    def _parts(self, newest: bool = False) -> list[Tensor]:
        """The tensors of the stream; with ``newest`` those that the last unit has read and written."""
        parts = [*self._held_apart()]
        for state in (self.states[0], self.states[-1]) if newest else self.states:
            own = state.parts if isinstance(state, History) else (state,) if isinstance(state, Tensor) else ()
            parts += own[-1:] if newest else own
        return parts

    def _held_apart(self) -> tuple[Tensor, ...]:
        """The tensors of the stream that are not yet part of its states: outputs of branches, and what they read."""
        held = self.held
        if isinstance(held, Reading):
            return held.parts if held.branch is None else (*held.parts, held.branch)
        return held.branches if isinstance(held, Unsummed) else ()

    def shown(self) -> tuple[Tensor, Callable[[Tensor], Stream]]:
        """The hidden state that the model would have here, and a function that replaces it and returns the new stream.

        If the next unit reads the newest state unchanged, that state is replaced. If it reads a mix, what it reads is
        replaced, and the difference is added to what it writes, as if one of its branches had returned it.
        """
        stream = self.summed()
        if isinstance(stream.held, Post):
            return self._out(stream.held.sum), functools.partial(stream.push, more=True)
        places = stream._newest()
        if places:
            return self._out(stream._restored(stream.states[places[-1]])), stream._replaced
        value, opened = stream.read()
        return value.residual if isinstance(value, QKVInputs) else value, opened._changed

    def _newest(self) -> tuple[int, ...]:
        """Indices of the newest state among the states, if the next unit reads it unchanged; else none."""
        if self.held is not None:
            return ()
        return self.layout.topology.newest(self.states, self.shared.weights, self.layout.units[self.position])

    def _replaced(self, state: Tensor) -> Stream:
        """The stream with ``state`` as the newest state."""
        states, state = [*self.states], self.layout.channels_last(self._in(state))
        for place in self._newest():
            states[place] = state
        return self._with(tuple(states))

    def _changed(self, value: Tensor) -> Stream:
        """The stream with ``value`` in place of what was read."""
        assert isinstance(self.held, Reading)
        (read,), branch, qkv = self.held.parts, self.held.branch, self.held.qkv
        (value,) = self._fitted((value,), self.held)
        change = value - read if branch is None else branch + (value - read)
        return self._with(self.states, Reading((value,), change, None if qkv is None else qkv.instead(value)))

    def written_to(self, how: str) -> OutOfOrder:
        return OutOfOrder(
            f"the hidden states of trunk '{self.layout.trunk}' were written to in place ({how}), or their gradients "
            f"asked for, after {self.position} of its {len(self.layout.units)} residual adds, outside its blocks, "
            "where a stream stands for them. Do that in a forward hook of a block, which gets a tensor, or "
            "leave the trunk out with trunks=[...]."
        )

    def check_recorded(self) -> None:
        """Check that autograd was not switched on or off since the stream began.

        Otherwise states for later blocks would silently lose some or all of their gradients.

        Raises:
            UnsupportedCall: it was switched.
        """
        if torch.is_grad_enabled() != self.shared.recorded:
            before, now = ("on", "off") if self.shared.recorded else ("off", "on")
            raise UnsupportedCall(
                f"trunk '{self.layout.trunk}' began with gradients switched {before}, and they are {now} after "
                f"{self.position} of its {len(self.layout.units)} residual adds: its learned connections would get "
                "wrong gradients. Run all of its blocks with gradients or none of them: freeze blocks with "
                "requires_grad_(False) in place of torch.no_grad(). Re-entrant checkpointing switches them off, too: "
                f"{USE}, or leave the trunk out with trunks=[...].{where_reentrant()}{self.layout.advice}"
            )

    def write(self, *branches: Tensor) -> Stream:
        """The stream after one residual add of ``branches`` (several when branches run in parallel).

        Raises:
            OutOfOrder: the trunk has no further residual add.
            WidthMismatch: the shape of a branch is not that of the stream.
        """
        layout, reading = self.layout, self.held
        if not isinstance(reading, Reading):
            if self.complete:
                raise self._once_too_often()
            return self.read()[1].write(*branches)
        site, branches = layout.sites[self.position], self._fitted(branches, reading)
        takes = site.takes or isinstance(self.states[-1], History)  # branch outputs may become part of the stream
        if takes or reading.branch is not None or self.position == 0:  # else `Live` has checked all that is used
            self.check_known(all=site.closes and site.drops)
        if takes:
            branches = tuple(map(counted, branches))
            for branch in branches:
                self.shared.know(branch)
        if layout.observe is not None:
            layout.observe("write", self.position, branches)
        outputs = branches if reading.branch is None else (reading.branch, *branches)
        if site.makes_state:
            merged = self._merge(site, map(layout.channels_last, outputs))
            return self._with(self.states, Post(self._restored(materialize(merged))), adds=1)
        if site.closes:  # the topology adds the branches up, in one pass with its states
            stream = self._written(site, outputs)
        else:
            stream = self._with(self.states, Reading((*reading.parts, *branches), total(outputs)), adds=1)
        return stream._to_be_changed() if site.post else stream

    def _to_be_changed(self) -> Stream:
        """The stream that waits for the post of a sum that the next branch reads."""
        _, stream = self.read()
        assert isinstance(stream.held, Reading)
        return stream._with(stream.states, Post(stream.held.parts[0], stream.held))

    def _written(self, site: Site, branches: tuple[Tensor, ...]) -> Stream:
        """The stream after the last residual add of a unit with these branch outputs."""
        layout, topology, weights = self.layout, self.layout.topology, self.shared.weights
        if layout.channel_dim != -1:
            branches = tuple(map(layout.channels_last, branches))
        if layout.sums_wait and _may_wait(branches[0]):
            return self._with(self.states, Unsummed(branches), adds=1)
        if torch.compiler.is_dynamo_compiling() or not torch.is_grad_enabled():
            states = topology.write(self.states, weights, site.unit, *branches)
        else:
            with UnitsLeft(site.left):
                states = topology.write(self.states, weights, site.unit, *branches)
        return Stream(states, None, self.shared, layout, self.position + 1, self.placement)

    def _merge(self, site: Site, branches: Iterable[Tensor]) -> Tensor | Mix:
        """``x_t`` of a `Recurrence`, before a post."""
        assert self.layout.recurrence is not None
        return self.layout.recurrence.merge(self.states, self.shared.weights, site.unit, *branches)

    def push(self, state: Tensor, more: bool = False) -> Stream:
        """The stream after an add's post made ``state`` of its sum; ``more``: other operations may follow.

        Raises:
            UnsupportedCall: gradients do not pass from ``state`` to the sum; or the next add writes to the sum in
                place, where it wrote to the post's result when the model was rewired.
        """
        assert isinstance(self.held, Post)
        self._check_passes(self.held.sum, state)
        made = isinstance(self.held, Begun) or state is not self.held.sum
        if not made and self.position - 1 in self.layout.overwritten:
            raise UnsupportedCall(
                f"trunk '{self.layout.trunk}': residual add {self.position + 1} writes to the state in place "
                "(`x += f`), and the operations that made a new tensor in front of it when the model was rewired do "
                f"not run in this call: other variables may hold the state of residual add {self.position}. Write "
                "`x = x + f` there."
            )
        if more:
            return self._with(self.states, (Begun if made else Post)(self._in(state), self.reading))
        return self._pushed(state)

    def _pushed(self, state: Tensor) -> Stream:
        if self.reading is not None:
            return self._with(self.states, self.reading)._changed(state)
        layout, recurrence = self.layout, self.layout.recurrence
        assert recurrence is not None
        unit, state = layout.sites[self.position - 1].unit, layout.channels_last(self._in(state))
        self.shared.know(state)
        return self._with(recurrence.push(self.states, self.shared.weights, unit, state))

    def settled(self) -> Stream:
        """The stream, with the sum as its state if it still waits for a post: no operation of it ran."""
        return self.push(self.held.sum) if isinstance(self.held, Post) else self

    def _check_passes(self, before: Tensor, state: Tensor) -> None:
        """Check that gradients pass between two states: a cut would not reach earlier states, which later blocks read.

        Raises:
            UnsupportedCall: they do not.
        """
        if not passes(before, state):
            raise UnsupportedCall(
                f"trunk '{self.layout.trunk}': gradients do not pass from residual add {self.position} to the next "
                "one (`detach`, `.data`, `torch.no_grad()`). Later blocks read earlier states, too, whose gradients "
                "would not be cut. Cut them in front of the trunk or behind it, or leave the trunk out with "
                "trunks=[...]; to freeze blocks, call requires_grad_(False) on them."
            )

    def skipped(self, position: int, known: bool = False) -> Stream:
        """The stream before a later residual add; those between were skipped, and add nothing.

        Args:
            position: the number of residual adds before it.
            known: whether the code around them tells that it was these.

        Raises:
            OutOfOrder: they include a whole pass through a loop; or others may have been skipped.
        """
        self.layout.check_passes(self.position, position)
        self.layout.check_read_later(self.position, position)
        if not known:
            self.layout.check_told(self.position, position)
        if position > self.position and self.shared.has_one_twice():
            raise OutOfOrder(
                f"residual adds of trunk '{self.layout.trunk}' were left out, and the modules that ran should tell "
                "which ones. But since the model was rewired, a module was put in another one's place, too. Give each "
                "place a module of its own (copy.deepcopy), or leave out none."
            )
        stream = self
        while stream.position < position:
            stream._seen("skip")
            template = stream.template
            if isinstance(stream.held, Post):  # the skipped add leaves its sum unchanged
                stream = stream._pushed(stream.held.sum)
            stream = stream.write(stream._out(template.new_zeros(()).expand(template.shape)))
        return self if stream is self else stream.settled()

    def viewed(self, view: Callable[[Tensor], Tensor]) -> Stream:
        """The stream with every tensor that it holds reshaped by ``view``.

        Raises:
            UnsupportedCall: hidden states are DTensors.
        """
        if self.wraps:
            raise UnsupportedCall(
                f"the hidden states of trunk '{self.layout.trunk}' are DTensors, and get other dimensions between its "
                "residual adds. Let the modules around the trunk work on plain tensors, and call rewire.parallelize."
            )
        self._seen("view", view)
        if self.position == 0 and self.shared.input is not None:
            self.shared.input = None  # it has other dimensions: code before the first read gets what that reads
        lasting = self.layout.topology.lasting(self.states) if self.reading is None else self.states
        states = self.layout.viewed(lasting, view)
        return self._with(states, None if self.held is None else pytree.tree_map(view, self.held))

    def finish(self) -> Tensor:
        """The trunk's output.

        Raises:
            OutOfOrder: residual adds are missing.
        """
        layout = self.layout
        if not self.complete:
            raise OutOfOrder(
                f"trunk '{layout.trunk}' ends after {self.position} of its {len(layout.units)} residual adds: "
                "a block was skipped, in a way that rewire does not see."
            )
        if isinstance(self.held, Unsummed):
            return self.summed().finish()
        self.check_known(all=True)
        self._seen("end", self.states)
        output = self._restored(layout.topology.finish(self.states, self.shared.weights, layout.dims))
        self.shared.end()
        self._seen("finish", output)
        return self._out(output)

    def _seen(self, what: str, value: object = None) -> None:
        if self.layout.observe is not None:
            self.layout.observe(what, self.position, value)

    def summed(self) -> Stream:
        """The stream with its last state computed, if it was waiting for a read."""
        if not isinstance(self.held, Unsummed):
            return self
        due, _ = self._due()
        assert not isinstance(due, QKVInputs)
        return self._pushed(materialize(due))

    def _with(self, states: States, held: Reading | Unsummed | Post | None = None, adds: int = 0) -> Stream:
        return Stream(states, held, self.shared, self.layout, self.position + adds, self.placement)

    @property
    def on_mesh(self) -> bool:
        """Whether attentions may get their q/k/v inputs concatenated along the channels, to be split again."""
        return self.placement is not None and self.layout.dims.width > 0 and self.layout.channel_dim == -1

    @property
    def wraps(self) -> bool:
        """Whether the model's hidden states are DTensors."""
        return self.placement is not None and self.placement.placements is not None

    def _in(self, x: Tensor) -> Tensor:
        """The model's tensor as the stream holds it: this rank's part of a DTensor."""
        return x if self.placement is None else self.placement.local(x)

    def _out(self, value: Any) -> Any:
        """A tensor or `QKVInputs` in the model's form, perhaps DTensors; equal inputs stay one tensor."""
        if self.placement is None or not self.wraps:
            return value
        if not isinstance(value, QKVInputs):
            return self.placement.wrapped(value)
        given = (value.q, value.k, value.v, value.residual)
        made = {id(x): self.placement.wrapped(x) for x in given}
        return QKVInputs(*(made[id(x)] for x in given))

    def _once_too_often(self) -> OutOfOrder:
        if self.layout.loops:
            return self.layout.other_passes()
        return OutOfOrder(
            f"trunk '{self.layout.trunk}' is already complete after {len(self.layout.sites)} residual adds: a block "
            f"was called once too often. Layers that are drawn at random: rewire with all of them.{self.layout.advice}"
        )

    def _fitted(self, branches: tuple[Tensor, ...], reading: Reading) -> tuple[Tensor, ...]:
        """``branches``, expanded to the shape of what was read."""
        if self.position == 0 and self.placement is None:
            for branch in branches:
                check_whole(branch, self.layout.channel_dim, self.layout.trunk)
        expected = reading.parts[0].shape
        if self.placement is None and len(branches) == 1 and branches[0].shape == expected:
            return branches
        branches = tuple(map(self._in, branches))
        for branch in branches:
            if branch.shape != expected and not _broadcasts(branch.shape, expected):
                raise WidthMismatch(
                    f"trunk '{self.layout.trunk}', residual add {self.position}: a tensor of shape "
                    f"{tuple(branch.shape)} is given to a stream of shape {tuple(expected)}. States of one trunk are "
                    "mixed and need one shape; pass trunks=[...] to leave this trunk out."
                    + " (Weights per channel need channels in a dimension of their own.)"
                    * self.layout.topology.needs_width
                    + _OF_ONE * (expected[:1] == (1,) != branch.shape[:1])
                )
        return tuple(branch if branch.shape == expected else branch.expand(expected) for branch in branches)


only_inlined(Stream)  # so that writes are counted behind a graph break


def is_earlier(stream: Stream, others: Iterable[Stream]) -> bool:
    """Whether one of ``others`` is a later state of the same forward."""
    return any(other.shared is stream.shared and other.position > stream.position for other in others)


#: For a stream that begins with weights [1, ..]: in an example with a batch of one, they look like any other state.
_OF_ONE = (
    " The stream has a batch of one here, and the model adds a larger one to it: rewire it with a batch of two or more."
)
#: Number of dimensions of tensors in each channels-last memory format.
_DIMS: dict[torch.memory_format, int] = {torch.channels_last: 4, torch.channels_last_3d: 5}


def _format(x: Tensor, channel_dim: int) -> torch.memory_format | None:
    """The memory format of ``x`` that values read from a stream have to get; None if they have it anyway."""
    if x.is_contiguous():
        return None if channel_dim == -1 else torch.contiguous_format
    last = (format for format, dims in _DIMS.items() if dims == x.dim() and x.is_contiguous(memory_format=format))
    return next(last, None)


def _broadcasts(shape: torch.Size, expected: torch.Size) -> bool:
    """Whether a tensor of ``shape`` can be added to one of shape ``expected`` without widening it."""
    if len(shape) > len(expected):
        return False
    return all(a in (1, b) for a, b in zip(reversed(shape), reversed(expected), strict=False))


def _may_wait(x: Tensor) -> bool:
    """Whether the state that a branch output ``x`` leads to may be computed with the next read.

    It pays if a kernel computes it together with a norm, but not under saved-tensor hooks such as those of activation
    checkpointing, which would keep the branch output in addition to the state.
    """
    if not uses_kernels(x):
        return False
    return torch.compiler.is_compiling() or saved_tensor_hooks() is None


def _flatten(stream: Stream) -> tuple[list[Any], Any]:
    held = [] if stream.held is None else [stream.held]
    return [stream.states, *held], (stream.shared, stream.layout, stream.position, stream.placement)


def _unflatten(leaves: Any, context: Any) -> Stream:
    states, *held = leaves
    return Stream(states, held[0] if held else None, *context)


pytree.register_pytree_node(Stream, _flatten, _unflatten, serialized_type_name=f"{__name__}.Stream")
