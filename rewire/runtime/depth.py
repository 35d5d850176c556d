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

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rewire.errors import OutOfOrder, UnsupportedCall
from rewire.runtime.live import Entry, Live
from rewire.runtime.nested import mapped, tensors_and_streams, with_item
from rewire.runtime.reentrant import USE, where_reentrant
from rewire.runtime.separate import SeparateInputs
from rewire.runtime.stream import Stream

_CLAMPED = (
    " Some models (T5, Whisper) clamp their states in float16 between the adds, and in no other precision: use "
    "bfloat16 or float32, or rewire the model in float16."
)


class Depth(SeparateInputs):
    """The residual streams of one call of an edited forward.

    Args:
        block, where, entries, advice: of its `Gate`.
    """

    def __init__(self, block: str, where: str, entries: Sequence[Entry], advice: str = "") -> None:
        super().__init__()
        self.block, self.where, self.entries, self.advice = block, where, entries, advice
        self.dicts: list[dict[Any, Any]] = []
        self.left = False

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
            value: a stream; at the start of a trunk a tensor; or a container or dataclass with these in it. A dict
                changes in place, and gets the stream back when the function returns (`leave`).
            norm: what reads the value first, to be computed with it.
            trunk: which of the function's trunks starts here, if one does.
            awaiting: whether the next state is yet to be made (`push`) of what comes in. Otherwise what comes in is it:
                operations that the model skips in this call (without a mask, in evaluation mode) change nothing.
            begin: whether the trunk starts with a tensor that comes in.
            item: if it starts with one of several in a container: with the tensor of this number.

        Raises:
            OutOfOrder: the function is called outside the order of its trunk.
            UnsupportedCall: with gradients switched on or off since the stream began, as re-entrant checkpointing does.
        """
        if not isinstance(value, (Tensor, Stream)):
            parts, number = tensors_and_streams(value), itertools.count()
            begin = begin and (self.entries[trunk].opens or not any(isinstance(part, Stream) for part in parts))
            self.dicts += [value] * isinstance(value, dict)
            return mapped(
                value, lambda part: self.open(part, norm, trunk, awaiting, next(number) == (item or 0) and begin)
            )
        known = next((live for live in self.live if live.source is value), None)
        if known is not None:  # the same argument twice
            return known.values[0]
        if isinstance(value, Tensor) and self._holding(value) is not None:  # of another trunk, opened before
            return value
        if isinstance(value, Stream):
            return self._enter(value if awaiting else value.settled(), norm)
        entry = self.entries[trunk]
        if (entry.outside and not entry.opens) or (awaiting and self._of_trunk(entry.trunk) is not None):
            return value  # in the second case something that was made of the sum
        if isinstance(value, Tensor) and begin and not any(live.entry is entry and live.start for live in self.live):
            return self._begin(value, norm, entry)
        return value

    def _enter(self, stream: Stream, norm: nn.Module | None) -> Tensor:
        """The value of a stream that comes in."""
        stream.check_loans()
        entry = self._entry(stream)
        later = [] if entry is None else [position for position in entry.adds if position >= stream.position]
        if entry is None or not later:
            places = [f"{' or '.join(map(str, e.adds))} of trunk '{e.trunk}'" for e in self.entries]
            raise OutOfOrder(
                f"block '{self.block}' was called out of order: it belongs after residual add "
                f"{' and '.join(places)}, the stream is at {stream.position} of trunk '{stream.layout.trunk}'."
            )
        return self._track(Live(stream.skipped(min(later)), entry, stream), norm)

    def _begin(self, value: Tensor, norm: nn.Module | None, entry: Entry) -> Tensor:
        """The value of a stream that starts here, with a plain tensor."""
        if not entry.opens and value.dtype == torch.float16:
            raise UnsupportedCall(f"block '{self.block}' was given a plain tensor where a stream belongs.{_CLAMPED}")
        if not entry.opens:
            raise OutOfOrder(
                f"block '{self.block}' was given a plain tensor, but it belongs after residual add "
                f"{next(iter(entry.adds))} of trunk '{entry.trunk}' and needs the stream that the block before it "
                "returns. Call the blocks in the model's order and hand on what they return. What changes hidden "
                "states between blocks belongs in a forward hook of a block, or has to happen on the inputs that the "
                "model is rewired with, too; of a model that was cut for pipeline parallelism, call "
                "rewire.pipeline_stage on every stage."
                f"{self.advice}"
            )
        if value.requires_grad and not torch.is_grad_enabled() and not value.is_leaf:
            raise UnsupportedCall(
                f"block '{self.block}' runs with gradients switched off on hidden states that have some. Re-entrant "
                f"activation checkpointing does that, and loses the gradients of the residual stream: {USE}, or leave "
                "the trunk out with trunks=[...]. In place of torch.no_grad(), freeze blocks with "
                f"requires_grad_(False).{where_reentrant()}"
            )
        entry.connection.check_ranks(value)
        # torch.distributed.pipelining.pipeline unflattens exported modules, and no block has this one below it
        begin = entry.connection.forward if torch.compiler.is_exporting() else entry.connection
        return self._track(Live(begin(value), entry, value), norm)

    def _track(self, live: Live, norm: nn.Module | None) -> Tensor:
        self.live.append(live)
        return live.read(norm)

    def through(
        self,
        function: Callable[..., Any],
        norm: nn.Module | None = None,
        awaiting: bool = False,
        kept: Sequence[tuple[int, int]] = (),
        last: bool = False,
        otherwise: str = "",
    ) -> Callable[..., Any]:
        """``function``, for a call that streams may go through: of blocks, of helpers that add, of ``checkpoint``.

        Arguments that are a stream's value go in as the stream, wherever they stand, in containers and dataclasses,
        too; what comes back as a stream is its value again. Where there is none, it is a call like any other.

        Args:
            function: what is called.
            norm, awaiting: as for `open`, of what comes back.
            kept: what is an earlier state, not the stream: number of the trunk, and of the tensor in the result.
            last: whether the result is returned at once: streams stay, for the next block to read.
            otherwise: what a call is that does not return the stream, where a loop calls blocks and others at one
                place: ``"view"``: other dimensions of all states; ``"push"``: what makes the next state of a sum.
        """

        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*mapped(args, self._stream_of), **mapped(kwargs, self._stream_of))
            result = self._handed_on(result) if last else self._taken_up(result, norm, awaiting, kept)
            for live in [live for live in self.live if live.given]:
                if not otherwise or live.stream.weights.ended:
                    self._check_ended(live, function)
                    self.live.remove(live)
                    continue
                live.given = False
                if otherwise == "view":
                    live.stream = live.stream.viewed(lambda x: function(*_with(args, live, x), **kwargs))  # noqa: B023
                else:
                    live.stream = live.stream.push(self._tensor(result))
                result = live.read(norm)
            return result

        return call

    def _check_ended(self, live: Live, function: Callable[..., Any]) -> None:
        """Refuse to go on without a stream that went into a function, did not come back, and did not end there."""
        if not live.stream.weights.ended:
            raise OutOfOrder(
                f"block '{self.block}' ({self.where}) hands the stream of trunk '{live.trunk}' to "
                f"{getattr(function, '__qualname__', type(function).__name__)}, which returns none after "
                f"{live.stream.position} of its {len(live.stream.layout.units)} residual adds: it was put there, or "
                f"ran for the first time, after the model was rewired.{self.advice}"
            )

    def _stream_of(self, value: Any) -> Any:
        live = self._holding(value) if isinstance(value, Tensor) else None
        if live is None or live.stream.complete:
            return value
        self._check_unchanged(live)
        live.given = True
        return live.stream

    def _taken_up(
        self,
        result: Any,
        norm: nn.Module | None = None,
        awaiting: bool = False,
        kept: Sequence[tuple[int, int]] = (),
    ) -> Any:
        """What a function returned, with tensors in place of streams."""
        number = itertools.count()
        earlier = {(self.entries[trunk].trunk, item) for trunk, item in kept}

        def value_of(item: Any) -> Any:
            n = next(number)
            if not isinstance(item, Stream):
                return item
            if (item.layout.trunk, n) in earlier:
                return item.value()
            item = item if awaiting else item.settled()
            live = self._of_trunk(item.layout.trunk)
            if live is None:
                live = Live(item, self._entry(item))
                live.first = 0
                return self._track(live, norm)
            live.stream, live.given = item, False
            return live.read(norm)

        return mapped(result, value_of)

    def _handed_on(self, result: Any) -> Any:
        """What a function returned and this one returns at once, with its streams."""

        def value_of(item: Any) -> Any:
            live = self._of_trunk(item.layout.trunk)
            if live is None or item.complete or item.awaiting:
                return self._taken_up(item)
            live.stream = item
            self.live.remove(live)
            self._check_count(live, True)
            return item

        return mapped(result, lambda item: value_of(item) if isinstance(item, Stream) else item)

    def leave(self, result: Any) -> Any:
        """What the function returns: streams in place of their values.

        Raises:
            OutOfOrder: other residual adds ran than those that were found, or the stream is not returned.
        """
        left: list[Live] = []

        def stream_of(item: Any) -> Any:
            live = self._holding(item) if isinstance(item, Tensor) else None
            if live is None or live.stream.complete:
                return item
            self._check_unchanged(live)
            left.append(live)
            cut = live.entry is not None and live.stream.position == live.entry.cut_at
            return live.unread if cut else live.stream

        result = mapped(result, stream_of)
        mapped(self.dicts, stream_of)
        for live in self.live:
            self._check_count(live, live in left)
        self.left = True
        return result

    def add(
        self,
        shortcut: Tensor,
        *branches: Tensor,
        alpha: float = 1,
        norm: nn.Module | None = None,
        site: int | None = None,
        of: int = 1,
    ) -> Tensor:
        """A residual add, ``shortcut + sum(branches)`` in the original: the stream's new value.

        Where a norm or another operation follows before the state is complete (`push`), that is the sum by itself.

        Args:
            shortcut: the stream's value.
            branches: what is added to it.
            alpha: a factor of the branches.
            norm: what reads the new value first.
            site: how many adds of this call come before it, where some may be left out.
            of: how many parallel branches a loop adds here, one by one; before the last, this is a `part`.

        Raises:
            OutOfOrder: ``shortcut`` is not the value of a stream of this function.
            WidthMismatch: a branch has another shape than the stream.
        """
        if self._is_outside():
            return _plain_sum(shortcut, branches, alpha)
        if of > 1 and len(self._shortcut(shortcut)[1]) + 1 < of:
            return self.part(shortcut, *branches, alpha=alpha)
        live = self._written(shortcut, branches, alpha, site)
        return live.read(norm)

    def write(self, shortcut: Tensor, *branches: Tensor, alpha: float = 1, site: int | None = None) -> Any:
        """`add`, where the function returns the result at once: the stream itself, for the next block to read."""
        if self._is_outside():
            return _plain_sum(shortcut, branches, alpha)
        live = self._written(shortcut, branches, alpha, site)
        if live.stream.complete or live.stream.awaiting:
            return live.read()
        self.live.remove(live)
        self._check_count(live, True)
        return live.stream

    def part(self, shortcut: Tensor, branch: Tensor, alpha: float = 1) -> Tensor:
        """The sum of the shortcut and one of several parallel branches, of which `add` gets another."""
        if self._is_outside():
            return torch.add(shortcut, branch, alpha=alpha)
        live, before = self._shortcut(shortcut)
        (branch,) = _tensors([branch], shortcut)
        total = torch.add(shortcut, branch, alpha=alpha)
        live.parts.append((total, (*before, branch * alpha if alpha != 1 else branch)))
        return total

    def scattered(self, function: Callable[[Tensor], Tensor], shortcut: Tensor, **how: Any) -> Tensor:
        """A residual add that ``function`` makes to some rows of the shortcut: a branch that is zero on the others.

        Args:
            function: ``lambda x: torch.index_add(x, 0, rows, f)``.
            shortcut: the stream's value.
            how: as for `add`.
        """
        branch, live = function(torch.zeros_like(shortcut)), self._holding(shortcut)
        if live is not None and branch.shape != live.values[0].shape:  # rows of a state that was flattened for this
            branch = branch.view_as(live.values[0])
        return self.add(shortcut, branch, **how)

    def _is_outside(self) -> bool:
        """Whether this is one of the calls without a stream; a lost one is missed where the trunk ends."""
        return not self.live and all(entry.outside and not entry.opens for entry in self.entries)

    def _shortcut(self, shortcut: Tensor) -> tuple[Live, tuple[Tensor, ...]]:
        """The stream whose value a shortcut is, and the branches that were added to it already."""
        live = self._holding(shortcut)
        if live is not None:
            return live, ()
        found = ((live, before) for live in self.live for total, before in live.parts if total is shortcut)
        live, before = next(found, (None, ()))
        if live is None and self.left:
            raise UnsupportedCall(
                f"a residual add of block '{self.block}' ({self.where}) runs again after its forward has returned, as "
                "activation checkpointing of a function inside a forward does: checkpoint the branch alone, a method, "
                "or the whole block."
            )
        if live is None:
            raise OutOfOrder(
                f"a residual add of block '{self.block}' ({self.where}) has another shortcut than the value "
                "of its residual stream: something between the adds made a new tensor of it in this call, or the "
                "state came in an object that rewire does not look into. Hand it on as a tensor, or leave the trunk "
                f"out with trunks=[...].{self.advice}"
            )
        return live, before

    def _written(self, shortcut: Tensor, branches: Sequence[Tensor], alpha: float, site: int | None) -> Live:
        """The stream of a shortcut, after the residual add."""
        live, before = self._shortcut(shortcut)
        self._check_unchanged(live)
        if site is not None and live.stream.position != live.first + site:
            raise OutOfOrder(
                f"block '{self.block}' ({self.where}) makes residual add {site} of its own, counted from 0, where the "
                f"stream is at {live.stream.position - live.first}: one before it was left out, or runs again, in a "
                f"way that rewire does not see. Let an `if` around it change the same variable.{self.advice}"
            )
        if live.stream.awaiting:
            raise OutOfOrder(
                f"block '{self.block}' ({self.where}) reads the sum of residual add {live.stream.position} "
                f"of trunk '{live.trunk}' as it is, where other operations followed when the model was "
                f"rewired: this call takes another way through the code.{self.advice}"
            )
        if live.qkv is not None and not live.apart:
            raise self._lost("adds the output of an attention that did not get what was read for it")
        branches = _tensors(branches, shortcut)
        if alpha != 1:
            branches = [branch * alpha for branch in branches]
        if shortcut.dtype != live.values[0].dtype:  # a shortcut in another precision
            branches = [branch.to(torch.promote_types(branch.dtype, shortcut.dtype)) for branch in branches]
        live.stream = live.stream.write(*before, *branches)
        return live

    def carry(self, value: Any, trunk: int = 0, item: int | None = None) -> Any:
        """A value on the way from the sum to `push`: what the stream goes on with, if nothing more is made of it."""
        live = self._awaiting(trunk)

        def carried(part: Any) -> Any:
            assert live is not None
            live.stream = live.stream.carrying(self._tensor(part))
            live.read()
            return part

        return value if live is None else with_item(value, item, carried)

    def push(self, state: Any, norm: nn.Module | None = None, trunk: int = 0, item: int | None = None) -> Any:
        """The state that the operations behind an add have made of its sum; ``item``: which of a tuple's tensors."""
        live = self._awaiting(trunk)

        def pushed(part: Any) -> Tensor:
            assert live is not None
            live.stream = live.stream.push(self._tensor(part))
            return live.read(norm)

        return state if live is None else with_item(state, item, pushed)

    def _tensor(self, state: Any) -> Tensor:
        if not isinstance(state, Tensor):
            raise OutOfOrder(
                f"block '{self.block}' ({self.where}) makes a {type(state).__name__} of a residual add's sum, where a "
                f"tensor was found when it was rewired.{self.advice}"
            )
        return state

    def start(self, value: Any, trunk: int = 0) -> Any:
        """The value at which a trunk starts, behind an ``if`` on one way of which it was made."""
        entry = self.entries[trunk]
        if self._of_trunk(entry.trunk) is not None or not entry.opens or not isinstance(value, Tensor):
            return value
        return self._begin(value, None, entry)

    def settle(self, value: Any, trunk: int = 0) -> Any:
        """The next state, behind an ``if`` on one way of which it was made: on the others it is the sum as it was."""
        live = self._holding(value) if isinstance(value, Tensor) else None
        ours = live is not None and live.trunk == self.entries[trunk].trunk
        return self.push(value, trunk=trunk) if ours else value

    def reach(self, value: Any, site: int) -> Any:
        """The state after that many adds of this call, behind an ``if``: those that did not run add nothing."""
        live = self._holding(value) if isinstance(value, Tensor) else None
        if live is None or live.stream.position >= live.first + site:
            return value
        live.stream = live.stream.skipped(live.first + site)
        return live.read()

    def ended(self, value: Any, *trunks: int) -> Any:
        """What a variable holds behind the calls of the blocks, of which some may not have run: the trunk's output."""
        live = self._holding(value) if isinstance(value, Tensor) else None
        ended = [self.entries[number] for number in trunks or (0,)]
        entry = next((e for e in ended if live is not None and e.trunk == live.trunk), None)
        if live is None or entry is None or live.stream.complete or live.stream.position == entry.cut_at:
            return value
        live.stream = live.stream.skipped(len(live.stream.layout.units)).settled()
        return live.read()

    def copy(self, function: Callable[..., Tensor], *values: Any) -> Tensor:
        """``function(*values)``, a cast or a clone: of a stream's value it is the stream's value, too."""
        result, (live, _) = function(*values), self._held(values)
        if live is not None and self._holding(result) is not live:
            live.stream.check_recorded()
            live.also(result)
        return result

    def unscaled(self, function: Callable[..., Any], *values: Any) -> Any:
        """`copy`, for a product of a stream's value with a factor that was 1 when the model was rewired.

        Raises:
            OutOfOrder: it is another one now.
        """
        live, held = self._held(values)
        if live is not None:
            factor = function(*(1.0 if value is held else value for value in values))
            if isinstance(factor, Tensor) or factor != 1:
                raise OutOfOrder(
                    f"block '{self.block}' ({self.where}) multiplies the residual stream by {factor}, and did by 1 "
                    f"when it was rewired: connections would have to learn the factor.{self.advice}"
                )
        return self.copy(function, *values)

    def view(self, function: Callable[..., Tensor], *values: Any) -> Tensor:
        """``function(*values)``, other dimensions of the numbers of one of them: the stream goes on in these."""
        live, held = self._held(values)
        if live is None:
            return function(*values)
        live.stream = live.stream.viewed(lambda x: function(*(x if value is held else value for value in values)))
        return live.read()

    def data(self, x: Any, *new: Any) -> Any:
        """``x.data``, or ``x.data = new``; of a stream's value what shares its version counter, unlike that."""
        root = _root(x) if isinstance(x, Tensor) else None
        if root is not None and any(_root(value) is root for live in self.live for value in live.values):
            return x.detach().copy_(*new) if new else x.detach()
        if new:
            (x.data,) = new
        return x.data

    def _held(self, values: Sequence[Any]) -> tuple[Live | None, Any]:
        """Of several values the one that is a stream's, and the stream."""
        held = ((self._holding(value), value) for value in values if isinstance(value, Tensor))
        return next((found for found in held if found[0] is not None), (None, None))

    def normed(self, norm: nn.Module, value: Tensor) -> Tensor:
        """``norm(value)``; computed with the value, if that is a stream's and was read for this norm."""
        live = self._holding(value)
        known = None if live is None else live.normed_by(norm, value)
        normed: Tensor = norm(value) if known is None else known
        return normed

    def _holding(self, value: Tensor) -> Live | None:
        """The stream whose value is this very tensor."""
        for live in self.live:
            for known in live.values:
                if known is value:
                    return live
        return None

    def _of_trunk(self, trunk: str) -> Live | None:
        """The stream of a trunk."""
        return next((live for live in self.live if live.trunk == trunk), None)

    def _awaiting(self, trunk: int) -> Live | None:
        """The stream of the trunk of this number, if the next state is yet to be made of a sum."""
        live = self._of_trunk(self.entries[trunk].trunk)
        if live is None or not live.stream.awaiting:
            return None
        self._check_unchanged(live)
        return live

    def _entry(self, stream: Stream) -> Entry | None:
        """What the function knows of a stream's trunk."""
        return next((entry for entry in self.entries if entry.trunk == stream.layout.trunk), None)

    def _check_unchanged(self, live: Live) -> None:
        if live.overwritten:
            raise OutOfOrder(
                f"the value of trunk '{live.trunk}' was written to in place in block "
                f"'{self.block}' ({self.where}), after the stream was read: earlier states that other blocks "
                "read would not change with it. Write `x = x.masked_fill(..)`, without the underscore."
                f"{self.advice}"
            )

    def _check_count(self, live: Live, leaves: bool) -> None:
        entry, stream = live.entry, live.stream
        ran = stream.position - live.start
        expected = ran if entry is None else entry.adds.get(live.start, ran)
        if entry is not None and (ran > expected or (ran < expected and not entry.ordered)):
            raise OutOfOrder(
                f"block '{self.block}' ({self.where}) made {ran} residual adds of trunk '{entry.trunk}' in "
                f"this call, and {expected} when it was rewired. A block that does not run adds nothing, where it is "
                "known which one that was: with the add in the forward of a block, or in an `if` that changes the same "
                f"variable, not in a loop over branches.{self.advice}"
            )
        if not leaves and not stream.complete:
            clamped = _CLAMPED if stream.dtype == torch.float16 else ""
            raise OutOfOrder(
                f"block '{self.block}' ({self.where}) returned without the value of trunk "
                f"'{stream.layout.trunk}' after {stream.position} of its {len(stream.layout.units)} residual adds."
                f"{clamped}{self.advice}"
            )


def _with(args: Sequence[Any], live: Live, x: Tensor) -> list[Any]:
    """Arguments, one of which is a stream's value, with another tensor in its place."""
    return [x if any(value is arg for value in live.values) else arg for arg in args]


def _root(x: Tensor) -> Tensor:
    """What a view is a view of."""
    return x if x._base is None else x._base


def _tensors(branches: Sequence[Any], shortcut: Tensor) -> list[Tensor]:
    """What is added to a shortcut, as tensors: a branch that is skipped may be the number 0."""
    dtype, device = shortcut.dtype, shortcut.device
    return [b if isinstance(b, Tensor) else torch.as_tensor(b, dtype=dtype, device=device) for b in branches]


def _plain_sum(shortcut: Tensor, branches: Sequence[Tensor], alpha: float) -> Tensor:
    """A residual add as the original makes it."""
    for branch in branches:
        shortcut = torch.add(shortcut, branch, alpha=alpha)
    return shortcut
