"""What an edited forward talks to.

The variables of an edited forward hold tensors, as in the original. The residual streams behind them are held by one
`Depth`, made anew for each call of the forward::

    depth = self._depth.enter()
    hidden_states = depth.open(hidden_states)            # a stream came in; here is its value
    ...
    hidden_states = depth.add(residual, hidden_states)   # was: residual + hidden_states
    ...
    return depth.leave(hidden_states)                    # the stream goes on to the next block

A tensor is known to be a stream's value by being the same object, so that every add checks that its shortcut is the
stream that it was found to be.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rewire.connection import CONNECTIONS, Connection, SeparateNorms
from rewire.errors import OutOfOrder, UnsupportedCall
from rewire.kernels.fused_qkv import project_fused
from rewire.stream import Stream
from rewire.topologies.base import QKVInputs


@dataclasses.dataclass
class Entry:
    """What one function knows of one trunk.

    Attributes:
        trunk: its name.
        connection: of this trunk.
        opens: whether the function stands at the start of the trunk, and the connection opens the stream there.
        adds: for each position of the stream at which the function may be called, the adds that it makes then.
        outside: whether it is also called outside of trunks, with plain tensors.
        cut_at: number of residual adds after which the model was cut (`rewire.pipeline_stage`).
    """

    trunk: str
    connection: Connection
    opens: bool
    adds: dict[int, int]
    outside: bool = False
    cut_at: int | None = None


class Live:
    """A stream inside a function.

    Attributes:
        stream: after what was read last.
        unread: before that.
        values: tensors that are its value: what was read, and casts of it.
        versions: of each of them, when it was made.
        source: what came in: a stream, or the tensor that the trunk starts with.
        norm, normed: a module, and what it makes of the value, if both were computed together.
        entry: what the function knows of the trunk; None if a function that it called opened the stream.
        start: position of the stream when it came in.
        qkv: what an attention reads, if it has separate q/k/v inputs.
        given: whether a function that was called has the stream now.
        parts: sums of the value and some of the parallel branches of the next residual add, with these branches.
    """

    def __init__(self, stream: Stream, entry: Entry | None, source: Any = None) -> None:
        self.stream = self.unread = stream
        self.entry, self.start = entry, stream.position
        self.source = source
        self.values: list[Tensor] = []
        self.versions: list[int] = []
        self.norm: nn.Module | None = None
        self.normed: Tensor | None = None
        self.qkv: QKVInputs | None = None
        self.given = False
        self.parts: list[tuple[Tensor, tuple[Tensor, ...]]] = []

    def read(self, norm: nn.Module | None) -> Tensor:
        """The value; with a norm, what that makes of it is computed, too."""
        stream = self.unread = self.stream
        self.norm = self.normed = self.qkv = None
        self.parts = []
        if stream.complete:
            value = stream.finish()
        elif stream.awaiting:
            value = stream.value()
        elif norm is not None and not stream.layout.reads_qkv(stream.position):
            value, self.normed, self.stream = stream.read_normed(norm)
            self.norm = norm
        else:
            read, self.stream = stream.read()
            if isinstance(read, QKVInputs):
                self.qkv = read
            value = read.residual if isinstance(read, QKVInputs) else read
        self.values, self.versions = [value], [_version(value)]
        return value


class Depth:
    """The residual streams of one call of an edited forward."""

    def __init__(self, block: str, where: str, entries: Sequence[Entry]) -> None:
        self.block, self.where, self.entries = block, where, entries
        self.live: list[Live] = []
        self.separate_values: list[tuple[Tensor, QKVInputs]] = []  # the tensor that stands for them, and they
        self.side_by_side = False  # whether such values came in as one tensor

    # -- in and out ----------------------------------------------------------------------------------------------------

    def open(
        self,
        value: Any,
        norm: nn.Module | None = None,
        trunk: int = 0,
        awaiting: bool = False,
        begin: bool = True,
        item: int | None = None,
    ) -> Any:
        """The tensor behind an argument, or behind what an expression made.

        Args:
            value: a stream; at the start of a trunk a tensor; or a list or tuple of these.
            norm: what reads the value first, to be computed with it.
            trunk: which of the function's trunks starts here, if one does.
            awaiting: whether the next state is yet to be made (`push`) of what comes in. Otherwise what comes in is it:
                operations that the model skips in this call (without a mask, in evaluation mode) change nothing.
            begin: whether the trunk starts with a tensor that comes in.
            item: if it starts with one of several in a list or tuple: with the tensor of this number.

        Raises:
            OutOfOrder: the function is called outside the order of its trunk.
            UnsupportedCall: under re-entrant activation checkpointing, which loses the stream's gradients.
        """
        if isinstance(value, (list, tuple)):
            opened, tensors = [], 0
            may_start = self.entries[trunk].opens
            may_start = may_start or not any(isinstance(part, Stream) for part in value)
            for part in value:
                starts = begin and may_start and tensors == (item or 0)
                opened.append(self.open(part, norm, trunk, awaiting, starts))
                tensors += isinstance(part, (Tensor, Stream))
            return type(value)(opened)
        known = next((live for live in self.live if live.source is value), None)
        if known is not None:  # the same argument twice
            return known.values[0]
        if isinstance(value, Tensor) and self._find(value) is not None:  # of another trunk, opened before
            return value
        if isinstance(value, Stream):
            return self._came(value if awaiting else value.settled(), norm)
        entry = self.entries[trunk]
        if entry.outside and not entry.opens:
            return value
        if isinstance(value, Tensor) and begin and not any(live.entry is entry and live.start for live in self.live):
            return self._began(value, norm, entry)
        return value

    def _came(self, stream: Stream, norm: nn.Module | None) -> Tensor:
        entry = next((entry for entry in self.entries if entry.trunk == stream.layout.trunk), None)
        if entry is None or stream.position not in entry.adds:
            places = [f"{' or '.join(map(str, e.adds))} of trunk '{e.trunk}'" for e in self.entries]
            raise OutOfOrder(
                f"block '{self.block}' was called out of order: it belongs after residual add "
                f"{' and '.join(places)}, the stream is at {stream.position} of trunk '{stream.layout.trunk}'."
            )
        return self._added(Live(stream, entry, stream), norm)

    def _began(self, value: Tensor, norm: nn.Module | None, entry: Entry) -> Tensor:
        if not entry.opens and value.dtype == torch.float16:
            raise UnsupportedCall(
                f"block '{self.block}' was given a plain tensor where a stream belongs. Some models (T5, BART) "
                "clamp their states in float16 between the adds: use bfloat16 or float32."
            )
        if not entry.opens:
            raise OutOfOrder(
                f"block '{self.block}' was given a plain tensor, but it belongs after residual add "
                f"{next(iter(entry.adds))} of trunk '{entry.trunk}' and needs the stream that the block before it "
                "returns. Call the blocks in the model's order and hand on what they return; of a model that was cut "
                "for pipeline parallelism, call rewire.pipeline_stage on every stage."
            )
        if value.requires_grad and not torch.is_grad_enabled() and not value.is_leaf:
            raise UnsupportedCall(
                f"block '{self.block}' runs under re-entrant activation checkpointing, which loses the gradients "
                "of the residual stream. Use torch.utils.checkpoint(..., use_reentrant=False)."
            )
        # torch.distributed.pipelining.pipeline unflattens exported modules, and no block has this one below it
        begin = entry.connection.forward if torch.compiler.is_exporting() else entry.connection
        return self._added(Live(begin(value), entry, value), norm)

    def _added(self, live: Live, norm: nn.Module | None) -> Tensor:
        self.live.append(live)
        return live.read(norm)

    def give(self, value: Any) -> Any:
        """An argument for a function that the stream goes through: the stream, where ``value`` is its value."""
        return mapped(value, self._stream_of)

    def _stream_of(self, value: Any) -> Any:
        live = self._find(value) if isinstance(value, Tensor) else None
        if live is None or live.stream.complete:
            return value
        self._check_unchanged(live)
        live.given = True
        return live.stream

    def take(
        self,
        result: Any,
        norm: nn.Module | None = None,
        awaiting: bool = False,
        kept: Sequence[tuple[int, int]] = (),
    ) -> Any:
        """What such a function returned, with tensors in place of streams; arguments as for `open`.

        Args:
            kept: what is an earlier state, not the stream: number of the trunk, and of the tensor in ``result``.
        """
        number = itertools.count()
        earlier = {(self.entries[trunk].trunk, item) for trunk, item in kept}

        def value_of(item: Any) -> Any:
            n = next(number)
            if not isinstance(item, Stream):
                return item
            if (item.layout.trunk, n) in earlier:
                return item.value()
            item = item if awaiting else item.settled()
            live = next((live for live in self.live if live.stream.layout.trunk == item.layout.trunk), None)
            if live is None:
                entry = next((entry for entry in self.entries if entry.trunk == item.layout.trunk), None)
                return self._added(Live(item, entry), norm)
            live.stream, live.given = item, False
            return live.read(norm)

        result = mapped(result, value_of)
        self._forget_ended()
        return result

    def _forget_ended(self) -> None:
        """Of streams that functions were given those that did not come back have ended there."""
        self.live = [live for live in self.live if not live.given]

    def hand_on(self, result: Any) -> Any:
        """`take`, where the function returns the result at once: streams stay, for the next block to read."""

        def value_of(item: Any) -> Any:
            live = next((live for live in self.live if live.stream.layout.trunk == item.layout.trunk), None)
            if live is None or item.complete or item.awaiting:
                return self.take(item)
            live.stream = item
            self.live.remove(live)
            self._check_count(live, True)
            return item

        result = mapped(result, lambda item: value_of(item) if isinstance(item, Stream) else item)
        self._forget_ended()
        return result

    def leave(self, result: Any) -> Any:
        """What the function returns: streams in place of their values.

        Raises:
            OutOfOrder: other residual adds ran than those that were found, or the stream is not returned.
        """
        left: list[Live] = []

        def stream_of(item: Any) -> Any:
            live = self._find(item) if isinstance(item, Tensor) else None
            if live is None or live.stream.complete:
                return item
            self._check_unchanged(live)
            left.append(live)
            cut = live.entry is not None and live.stream.position == live.entry.cut_at
            return live.unread if cut else live.stream

        result = mapped(result, stream_of)
        for live in self.live:
            self._check_count(live, live in left)
        return result

    # -- adds ----------------------------------------------------------------------------------------------------------

    def add(self, shortcut: Tensor, *branches: Tensor, alpha: float = 1, norm: nn.Module | None = None) -> Tensor:
        """A residual add, ``shortcut + sum(branches)`` in the original: the stream's new value.

        Where a norm or another operation follows before the state is complete (`push`), that is the sum by itself.

        Raises:
            OutOfOrder: ``shortcut`` is not the value of a stream of this function.
            WidthMismatch: a branch has another shape than the stream.
        """
        if self._is_outside():
            return _added(shortcut, branches, alpha)
        live = self._written(shortcut, branches, alpha)
        return live.read(norm)

    def write(self, shortcut: Tensor, *branches: Tensor, alpha: float = 1) -> Any:
        """`add`, where the function returns the result at once: the stream itself, for the next block to read."""
        if self._is_outside():
            return _added(shortcut, branches, alpha)
        live = self._written(shortcut, branches, alpha)
        if live.stream.complete or live.stream.awaiting:
            return live.read(None)
        self.live.remove(live)
        self._check_count(live, True)
        return live.stream

    def part(self, shortcut: Tensor, branch: Tensor, alpha: float = 1) -> Tensor:
        """The sum of the shortcut and one of several parallel branches, of which `add` gets another."""
        if self._is_outside():
            return torch.add(shortcut, branch, alpha=alpha)
        live, before = self._shortcut(shortcut)
        total = torch.add(shortcut, branch, alpha=alpha)
        live.parts.append((total, (*before, branch * alpha if alpha != 1 else branch)))
        return total

    def _is_outside(self) -> bool:
        """Whether this is one of the calls without a stream; a lost one is missed where the trunk ends."""
        return not self.live and all(entry.outside and not entry.opens for entry in self.entries)

    def _shortcut(self, shortcut: Tensor) -> tuple[Live, tuple[Tensor, ...]]:
        """The stream whose value a shortcut is, and the branches that were added to it already."""
        live = self._find(shortcut)
        if live is not None:
            return live, ()
        found = ((live, before) for live in self.live for total, before in live.parts if total is shortcut)
        live, before = next(found, (None, ()))
        if live is None:
            raise OutOfOrder(
                f"a residual add of block '{self.block}' ({self.where}) has another shortcut than the value "
                "of its residual stream: something between the adds made a new tensor of it when the model was called "
                "with these arguments. Pass example_inputs that take the same way through the model, or leave the "
                "trunk out with trunks=[...]."
            )
        return live, before

    def _written(self, shortcut: Tensor, branches: Sequence[Tensor], alpha: float) -> Live:
        live, before = self._shortcut(shortcut)
        self._check_unchanged(live)
        if live.stream.awaiting:
            raise OutOfOrder(
                f"block '{self.block}' ({self.where}) reads the sum of residual add {live.stream.position} "
                f"of trunk '{live.stream.layout.trunk}' as it is, where other operations followed when the model was "
                "rewired: this call takes another way through the code. example_inputs have to take the way that "
                "training does."
            )
        if alpha != 1:
            branches = [branch * alpha for branch in branches]
        if shortcut.dtype != live.values[0].dtype:  # a shortcut in another precision
            branches = [branch.to(torch.promote_types(branch.dtype, shortcut.dtype)) for branch in branches]
        live.stream = live.stream.write(*before, *branches)
        return live

    def carry(self, value: Any, trunk: int = 0, item: int | None = None) -> Any:
        """A value on the way from the sum to `push`: what the stream goes on with, if nothing more is made of it."""
        if item is not None and isinstance(value, (tuple, list)):
            return _with_item(value, item, lambda part: self.carry(part, trunk))
        name = self.entries[trunk].trunk
        live = next((live for live in self.live if live.stream.layout.trunk == name), None)
        if live is not None and live.stream.awaiting:
            live.stream = live.stream.carrying(value)
            live.read(None)
        return value

    def push(self, state: Any, norm: nn.Module | None = None, trunk: int = 0, item: int | None = None) -> Any:
        """The state that the operations behind an add have made of its sum; ``item``: which of a tuple's tensors."""
        if item is not None and isinstance(state, (tuple, list)):
            return _with_item(state, item, lambda part: self.push(part, norm, trunk))
        name = self.entries[trunk].trunk
        live = next((live for live in self.live if live.stream.layout.trunk == name), None)
        if live is None or not live.stream.awaiting:
            return state
        live.stream = live.stream.push(state)
        return live.read(norm)

    def start(self, value: Any, trunk: int = 0) -> Any:
        """The value at which a trunk starts, behind an ``if`` on one way of which it was made."""
        entry = self.entries[trunk]
        begun = any(live.stream.layout.trunk == entry.trunk for live in self.live)
        if begun or not entry.opens or not isinstance(value, Tensor):
            return value
        return self._began(value, None, entry)

    def settle(self, value: Any, trunk: int = 0) -> Any:
        """The next state, behind an ``if`` on one way of which it was made: on the others it is the sum as it was."""
        name = self.entries[trunk].trunk
        live = self._find(value) if isinstance(value, Tensor) else None
        return self.push(value, trunk=trunk) if live is not None and live.stream.layout.trunk == name else value

    def copy(self, function: Callable[[Tensor], Tensor], value: Tensor) -> Tensor:
        """``function(value)``, a cast or a clone: of a stream's value it is the stream's value, too."""
        result = function(value)
        live = self._find(value)
        if live is not None and result is not value:
            live.values.append(result)
            live.versions.append(_version(result))
        return result

    def view(self, function: Callable[[Tensor], Tensor], value: Tensor) -> Tensor:
        """``function(value)``, other dimensions of the same numbers: the stream goes on in these."""
        live = self._find(value)
        if live is None:
            return function(value)
        live.stream = live.stream.viewed(function)
        return live.read(None)

    def normed(self, norm: nn.Module, value: Tensor) -> Tensor:
        """``norm(value)``; computed with the value, if that is a stream's and was read for this norm."""
        live = self._find(value)
        if live is not None and live.normed is not None and live.norm is norm and _version(value) == live.versions[0]:
            return live.normed
        normed: Tensor = norm(value)
        return normed

    # -- separate q/k/v inputs -----------------------------------------------------------------------------------------

    def qkv(self, value: Any, width: int | None = None) -> Any:
        """The tensor that stands for the values of queries, keys and values in a function that projects them.

        Args:
            value: what came in: for all three; or the same for all.
            width: channels of each.
        """
        if isinstance(value, Tensor) and width is not None and value.shape[-1] == 3 * width:
            q, k, v = value.chunk(3, -1)
            value, self.side_by_side = QKVInputs(q, k, v, residual=q), True
        if not isinstance(value, QKVInputs):
            return value
        self.separate_values.append((value.q, value))
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
                    self.separate_values.append((items[number], QKVInputs(*items)))
        else:
            self.separate_values.append((made[number], QKVInputs(*made)))
        return made[number]

    def separate(self, value: Any) -> Any:
        """An argument of what holds an attention's projections: the values for all three.

        On the ranks of a mesh as one tensor, side by side: parallel styles gather the arguments of an attention, which
        have to be tensors, and one call then gathers all three.
        """
        side_by_side = self.side_by_side or any(live.stream.on_mesh for live in self.live)

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
        for stands, qkv in self.separate_values:
            if stands is value:
                return qkv
        for live in self.live:
            if live.qkv is not None and live.values[0] is value:
                return live.qkv
        return None

    # -- checks --------------------------------------------------------------------------------------------------------

    def _find(self, value: Tensor) -> Live | None:
        """The stream whose value is this very tensor."""
        for live in self.live:
            for known in live.values:
                if known is value:
                    return live
        return None

    def _check_unchanged(self, live: Live) -> None:
        if not live.stream.awaiting and [*map(_version, live.values)] != live.versions:
            raise OutOfOrder(
                f"the value of trunk '{live.stream.layout.trunk}' was written to in place in block "
                f"'{self.block}' ({self.where}), after the stream was read: earlier states that other blocks "
                "read would not change with it. Write `x = x.masked_fill(..)`, without the underscore, or pass "
                "example_inputs for which this happens."
            )

    def _check_count(self, live: Live, leaves: bool) -> None:
        entry, stream = live.entry, live.stream
        ran = stream.position - live.start
        if entry is not None and ran != entry.adds.get(live.start, ran):
            raise OutOfOrder(
                f"block '{self.block}' ({self.where}) made {ran} residual adds of trunk '{entry.trunk}' in "
                f"this call, and {entry.adds[live.start]} when it was rewired: a branch was skipped, or the call takes "
                "another way through its code. Layer dropping has to be off; example_inputs have to take the way that "
                "training does."
            )
        if not leaves and not stream.complete:
            raise OutOfOrder(
                f"block '{self.block}' ({self.where}) returned without the value of trunk "
                f"'{stream.layout.trunk}' after {stream.position} of its {len(stream.layout.units)} residual adds."
            )


def _added(shortcut: Tensor, branches: Sequence[Tensor], alpha: float) -> Tensor:
    for branch in branches:
        shortcut = torch.add(shortcut, branch, alpha=alpha)
    return shortcut


def _with_item(values: Any, item: int, change: Callable[[Any], Any]) -> Any:
    """A tuple or list with one of the tensors in it changed: that with the number ``item``."""
    parts = list(values)
    number = [n for n, part in enumerate(parts) if isinstance(part, Tensor)][item]
    parts[number] = change(parts[number])
    return type(values)(*parts) if hasattr(values, "_fields") else type(values)(parts)


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """``value`` with tensors and streams in it changed; the same object if none is."""
    if isinstance(value, (Tensor, Stream)):
        return change(value)
    if isinstance(value, (tuple, list)):
        items = [mapped(item, change) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        for key in list(value):
            new = mapped(value[key], change)
            if new is not value[key]:
                value[key] = new
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        held = vars(value) if hasattr(value, "__dict__") else {}
        fields = {
            field.name: held[field.name] for field in dataclasses.fields(value) if field.init and field.name in held
        }
        changed = {name: mapped(item, change) for name, item in fields.items()}
        changed = {name: new for name, new in changed.items() if new is not fields[name]}
        return dataclasses.replace(value, **changed) if changed else value
    return value


def _version(value: Tensor) -> int:
    """How often a tensor was written to; always 0 where nobody counts."""
    if torch.compiler.is_compiling() or value.is_inference():
        return 0
    return value._version
