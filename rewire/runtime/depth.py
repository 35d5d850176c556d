"""`Depth`, the object that an edited forward calls.

The variables of an edited forward hold tensors, as in the original. One `Depth` per call of the forward holds the
streams behind them::

    depth = self._depth.enter()
    hidden_states = depth.open(hidden_states)            # a stream came in; here is its value
    ...
    hidden_states = depth.add(residual, hidden_states)   # was: residual + hidden_states
    ...
    return depth.leave(hidden_states)                    # the stream goes on to the next block

A tensor is recognised as a stream's value by identity, so every add checks that its shortcut is the value of the
stream that was found for it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rewire.attributes import GATE
from rewire.errors import OutOfOrder, UnsupportedCall
from rewire.runtime.live import Entry, Live
from rewire.runtime.nested import Item, at, is_container, mapped, tensors_and_streams, with_item
from rewire.runtime.parts import Parts
from rewire.runtime.reentrant import USE, where_reentrant
from rewire.runtime.separate import SeparateInputs
from rewire.runtime.stream import Post, Reading, Stream
from rewire.runtime.writes import REMEDY, counted, noted, share_memory, uncounted
from rewire.torch_internals import only_inlined, outside_inference_mode, viewed

_CLAMPED = (
    " Some models (T5, Whisper) clamp their states in float16 between the adds, and in no other precision: use "
    "bfloat16 or float32, or rewire the model in float16."
)


class Depth:
    """The streams of one call of an edited forward.

    Args:
        block, where, entries, advice: as in its `Gate`.
    """

    #: ``depth.add(x, depth.at[rows](f))`` for ``x[rows] += f``.
    at = Parts()

    def __init__(self, block: str, where: str, entries: Sequence[Entry], advice: str = "") -> None:
        self.block, self.where, self.entries, self.advice = block, where, entries, advice
        self.live: list[Live] = []
        self.separate = SeparateInputs(block, where, self.live)
        self.held: list[Any] = []
        self.outputs: list[tuple[Any, Live]] = []  # outputs of streams that ended in called functions
        self.left = False

    def open(
        self,
        value: object,
        norm: nn.Module | None = None,
        trunk: int = 0,
        post: bool = False,
        begin: bool = True,
        item: Item | None = None,
        qkv: bool = False,
        width: int | None = None,
        again: bool = False,
        before: Sequence[Any] = (),
    ) -> Any:
        """The value, a tensor, of a stream that an argument or an expression holds.

        Args:
            value: a stream; a tensor with which a trunk starts; or a container or dataclass with these in it, which is
                changed in place, and gets the stream back when the function returns (`leave`).
            norm: the norm that reads the value first, to be computed together with it.
            trunk: number, among the function's, of the trunk that starts here, if one does.
            post: whether the function makes the next state of what comes in (`push`). If not, a sum that comes in is
                the state: operations that the model skips in this call (no mask, evaluation mode) change nothing.
            begin: whether the trunk may start here with a tensor.
            item: the item of a container with which the trunk starts; None: the first that is not a stream's value.
            qkv: whether ``value`` is what a projection of queries, keys or values reads, rather than a stream.
            width: with ``qkv``, the number of channels of each of the three, if known.
            again: whether a loop makes ``value``, in later iterations something else than what the trunk starts with.
            before: of a method that is called several times, what tells which call this is, as in `reach`.

        Raises:
            OutOfOrder: the function is called outside the order of its trunk.
            UnsupportedCall: gradients were switched on or off since the stream began, as by re-entrant checkpointing.
        """
        if qkv:
            return self.separate.open(value, width)
        if not isinstance(value, (Tensor, Stream)):
            parts = tensors_and_streams(value)
            begin = begin and (self.entries[trunk].begins or not any(isinstance(part, Stream) for part in parts))
            new = (part for part in parts if self._holding(part) is None)
            first = next(new, None) if item is None else at(value, item)
            self.held += [value]

            def opened(part: object) -> Any:
                if isinstance(part, Stream) and (self._entry(part) is None or self._is_earlier(part)):
                    return part  # a stream that the function only passes on, or an earlier state
                return self.open(part, norm, trunk, post, begin and part is first, before=before)

            return mapped(value, opened)
        for known in self.live:
            if known.source is value:  # passed as two arguments
                return known.values[0]
        if isinstance(value, Tensor) and self._holding(value) is not None:  # the value of a stream that is open already
            return value
        if isinstance(value, Stream):
            return self._enter(value if post or value.held is None else value.settled(), norm, before)
        entry = self.entries[trunk]
        if (entry.outside and not entry.begins) or (post and self._of_trunk(entry.trunk) is not None):
            return value  # in the second case, an operation's result from the sum
        if isinstance(value, Tensor) and begin and not (before and _looked_up(*before)[1] is None):
            begun = [live for live in self.live if live.entry is entry and (live.start or not live.stream.complete)]
            if not begun:
                return self._begin(value, norm, entry, before)
            if not again:
                self._check_beside(begun[0])
        return value

    def _enter(self, stream: Stream, norm: nn.Module | None, before: Sequence[Any]) -> Tensor:
        """Take in a stream from outside, and return its value."""
        if stream.weights.loans:
            stream.check_loans()
        if not isinstance(stream.held, (Reading, Post)):
            stream.check_recorded()
        entry = self._entry(stream)
        if entry is not None and before:
            position = self._position_of(entry, before, stream.position)
            stream = stream.skipped(position, known=True)
        if entry is not None and stream.position in entry.adds:
            return self._track(Live(stream, entry, stream), norm)
        later = [] if entry is None else [position for position in entry.adds if position >= stream.position]
        if entry is not None and not later and stream.layout.loops:
            raise stream.layout.other_passes()
        if entry is None or not later:
            places = [f"{' or '.join(map(str, e.adds))} of trunk '{e.trunk}'" for e in self.entries]
            raise OutOfOrder(
                f"block '{self.block}' was called out of order: it belongs after residual add "
                f"{' and '.join(places)}, the stream is at {stream.position} of trunk '{stream.layout.trunk}'."
            )
        if entry.branch_given and (*entry.connection.parameters(), *entry.connection.buffers()):
            raise OutOfOrder(
                f"block '{self.block}' ({self.where}) adds to trunk '{entry.trunk}' what was computed from its state "
                f"after {stream.position} residual adds, where it belongs after {min(later)}: those between were left "
                "out, and the topology reads other states behind them. Let the module that adds call the branch, too, "
                "or leave out none (a probability of layer dropping of 0)."
            )
        return self._track(Live(stream.skipped(min(later)), entry, stream), norm)

    def _position_of(self, entry: Entry, before: Sequence[Any], position: int) -> int:
        """The stream's position at a call of a method, which is ``position`` if no calls were left out before it.

        Raises:
            OutOfOrder: it is another call than any that is known.
        """
        owner, module = _looked_up(*before)
        if module is None:  # then this call does not run it
            return position
        known = entry.number_of(entry.calls, owner, module, position)
        if known is None or known < position:
            raise OutOfOrder(
                f"block '{self.block}' ({self.where}) runs a {type(module).__name__} after {position} residual adds of "
                f"trunk '{entry.trunk}', and {'did not run it' if known is None else f'after {known}'} when it was "
                f"rewired: it is called in another order, or again.{self.advice}"
            )
        return known

    def _begin(self, value: Tensor, norm: nn.Module | None, entry: Entry, before: Sequence[Any]) -> Tensor:
        """Begin a stream with a plain tensor, and return its value."""
        if not entry.begins and value.dtype == torch.float16:
            raise UnsupportedCall(f"block '{self.block}' was given a plain tensor where a stream belongs.{_CLAMPED}")
        if not entry.begins and entry.connection.layout.loops:
            raise entry.connection.layout.other_passes()
        after = self._position_of(entry, before, 0) if before else 0 if entry.begins else next(iter(entry.adds))
        if after or not entry.begins:
            giver = "the block before it returns" if after else "its caller had, not a slice of it, say"
            raise OutOfOrder(
                f"block '{self.block}' was given a plain tensor, but it belongs after residual add {after} of trunk "
                f"'{entry.trunk}' and needs the stream that {giver}. Call the blocks in the model's order and hand on "
                "what they return. What changes hidden states between blocks belongs in a forward hook of a block, or "
                "has to happen on the inputs that the model is rewired with, too; of a model that was cut for pipeline "
                "parallelism, call rewire.pipeline_stage on every stage."
                f"{self.advice}"
            )
        cut = value.requires_grad and not torch.is_grad_enabled()
        if cut and (where := where_reentrant()):
            raise UnsupportedCall(
                f"block '{self.block}' runs with gradients switched off on hidden states that have some. Re-entrant "
                f"activation checkpointing does that, and loses the gradients of the residual stream: {USE}, or leave "
                "the trunk out with trunks=[...]. In place of torch.no_grad(), freeze blocks with "
                f"requires_grad_(False).{where}"
            )
        connection = entry.in_use
        connection.check_ranks(value)
        # torch.distributed.pipelining.pipeline unflattens exported modules, and this one is not a child of any block
        begin = connection.forward if torch.compiler.is_exporting() else connection
        return self._track(Live(begin(counted(value)), entry, value), norm)

    def _check_beside(self, live: Live) -> None:
        """Check a tensor in place of the stream, beside it, as keys of a cache are beside queries.

        In a trunk's first block it is made of the trunk's input, the first of its states: the block must read that.
        """
        if live.start == 0 and tensors_and_streams(live.stream.states)[0] is not live.values[0]:
            raise UnsupportedCall(
                f"block '{self.block}' ({self.where}) was given another tensor in one of the arguments that were both "
                "the hidden state when the model was rewired (say, as keys, those of a cache as well). It is made of "
                f"the input of trunk '{live.trunk}', from which what the topology reads first differs. Pass "
                "example_inputs of such a call to rewire.compile: then this argument is the input in every call."
            )

    def _track(self, live: Live, norm: nn.Module | None) -> Tensor:
        self.live.append(live)
        return live.read(norm)

    def through(
        self,
        function: Callable[..., Any],
        norm: nn.Module | None = None,
        post: bool = False,
        kept: Sequence[tuple[int, Item]] = (),
        last: bool = False,
        otherwise: str = "",
        qkv: bool = False,
        read: Sequence[int] = (),
        item: Item | None = None,
    ) -> Callable[..., Any]:
        """Wrap ``function`` for a call that takes streams: a block, a helper with adds, ``checkpoint``.

        The wrapper replaces values of streams in the arguments, including containers and dataclasses, by the streams,
        and streams in the result by their values. A call without either is like any other.

        Args:
            function: the function that is called.
            norm, post: as for `open`, for the result.
            kept: items of the result that are earlier states rather than the stream, each with the number of its trunk.
            last: whether the result is returned at once: its streams stay streams, for the next block to read.
            otherwise: for a loop that calls blocks and other modules at one place, the role of the others:
                ``"view"``: they reshape all states; ``"push"``: they make the next state of a sum.
            qkv: whether the function holds projections of an attention, and takes what these read instead of a stream.
            read: numbers of the trunks whose values are passed as tensors.
            item: for ``"push"``, which item of the result is the state.
        """
        if qkv:
            return self.separate.through(function)
        if isinstance(function, functools.partial):  # its arguments may hold a stream's value
            held, how = function, (norm, post, kept, last, otherwise, qkv, read, item)
            return lambda *args, **kwargs: self.through(held.func, *how)(*held.args, *args, **held.keywords | kwargs)

        alone = [self.entries[number].trunk for number in read]

        def stream_of(value: object) -> Any:
            return self._stream_of(value, alone)

        def call(*args: object, **kwargs: object) -> Any:
            ended = self._ended(args, kwargs)
            result = function(*mapped(args, stream_of), **mapped(kwargs, stream_of))
            self._taken_up([given for given in (*args, *kwargs.values()) if is_container(given)], norm, post, kept)
            for part in tensors_and_streams(result) if ended else ():
                if isinstance(part, Stream) and part.layout.trunk in ended:
                    raise part.layout.other_passes()
            result = self._handed_on(result) if last else self._taken_up(result, norm, post, kept)
            for live in [live for live in self.live if live.given]:
                done = live.stream.weights.ended or (torch.compiler.is_compiling() and _may_end(live, function, *args))
                if not otherwise or done:
                    self._check_ended(live, function, done)
                    self.live.remove(live)
                    self.outputs += [(x, live) for x in tensors_and_streams(result)]
                    continue
                live.given = False
                if otherwise == "view":
                    live.stream = live.stream.viewed(lambda x: function(*_with(args, live, x), **kwargs))  # noqa: B023
                    result = live.read(norm)
                else:
                    result = with_item(result, item, functools.partial(self._pushed, live, norm))
            return result

        return call

    def _goes_on(self, value: object, trunk: int) -> None:
        """Remember what operations after the last add made of a trunk's output: a loop's next pass may get it."""
        ended = [*(live for _, live in self.outputs), *(live for live in self.live if live.stream.complete)]
        for live in [live for live in ended if live.trunk == self.entries[trunk].trunk][-1:]:
            self.outputs += [(x, live) for x in tensors_and_streams(value) if live.stream.layout.loops]

    def _ended(self, *given: object) -> list[str]:
        """The trunks with loops whose outputs are passed to a function."""
        outputs = [*self.outputs, *((x, live) for live in self.live if live.stream.complete for x in live.values)]
        outputs = [(x, live) for x, live in outputs if live.stream.layout.loops]
        parts = tensors_and_streams(given) if outputs else []
        return [live.trunk for x, live in outputs if any(x is part for part in parts)]

    def _check_ended(self, live: Live, function: Callable[..., Any], ended: bool) -> None:
        """Raise OutOfOrder if a stream that went into a function neither came back nor ended there."""
        if not ended:
            raise OutOfOrder(
                f"block '{self.block}' ({self.where}) hands the stream of trunk '{live.trunk}' to "
                f"{getattr(function, '__qualname__', type(function).__name__)}, which returns none after "
                f"{live.stream.position} of its {len(live.stream.layout.units)} residual adds: it makes something else "
                f"of it, or was not there, or did not run, when the model was rewired.{self.advice}"
            )

    def _stream_of(self, value: object, alone: Sequence[str] = ()) -> Any:
        live = self._holding(value) if isinstance(value, Tensor) else None
        if live is None or live.stream.complete or live.trunk in alone:
            return value
        if live.overwritten:
            raise self._overwritten(live)
        live.given = True
        return live.stream

    def _taken_up(
        self,
        result: object,
        norm: nn.Module | None = None,
        post: bool = False,
        kept: Sequence[tuple[int, Item]] = (),
    ) -> Any:
        """A function's result, with values in place of streams."""
        earlier = [(self.entries[trunk].trunk, at(result, item)) for trunk, item in kept]
        values: dict[int, Tensor] = {}  # by a stream's id: if it is returned twice, its value is one tensor

        def value_of(item: object) -> Any:
            if not isinstance(item, Stream):
                return item
            if any(item is state and item.layout.trunk == trunk for trunk, state in earlier):
                return item.value()
            if id(item) not in values:
                values[id(item)] = taken(item if post else item.settled())
            return values[id(item)]

        def taken(stream: Stream) -> Tensor:
            live = self._went_on(stream)
            if live is None:
                live = Live(stream, self._entry(stream))
                live.first = 0
                return self._track(live, norm)
            live.stream, live.given = stream, False
            return live.read(norm)

        return mapped(result, value_of)

    def _handed_on(self, result: Any) -> Any:
        """A function's result that this one returns at once: its streams stay streams."""

        def value_of(item: Any) -> Any:
            live = self._went_on(item)
            if live is None or item.complete or item.in_post:
                return self._taken_up(item)
            live.stream = item
            self.live.remove(live)
            self._check_count(live, True)
            return item

        return mapped(result, lambda item: value_of(item) if isinstance(item, Stream) else item)

    def leave(self, result: object, *changed: dict[Any, Any]) -> Any:
        """The function's result with streams in place of their values, also in dicts that it has ``changed``.

        Raises:
            OutOfOrder: the residual adds that ran are not those that were found, or the stream is not returned.
        """
        if not (self.live or self.held or changed) and isinstance(result, Stream):
            self.left = True
            return result
        left: list[Live] = []

        def stream_of(item: object) -> Any:
            live = self._holding(item) if isinstance(item, Tensor) else None
            if live is None or live.stream.complete:
                return item
            if live.overwritten:
                raise self._overwritten(live)
            left.append(live)
            if isinstance(live.source, Tensor) and live.entry is not None and live.entry.adds_none(live.stream):
                return live.source
            return self._with_all_adds(live)

        result = mapped(result, stream_of)
        dicts, others = ([held for held in self.held if isinstance(held, dict) is of] for of in (True, False))
        mapped((dicts, changed), stream_of)
        handed_on = [*left]  # a function that changes what `others` hold returns these, too
        mapped(others, stream_of)
        for live in [*self.live, *(live for _, live in self.outputs)]:
            if live.unrecorded and not live.called:
                live.stream.check_recorded()
        for live in self.live:
            self._check_count(live, live in handed_on)
        self.left = True
        return result

    def _with_all_adds(self, live: Live) -> Stream:
        """The stream to return; with the adds that were left out, if the function is called at several positions.

        Otherwise, the next function that adds knows where it belongs.
        """
        entry = live.entry
        if entry is None or live.source is None or not entry.ordered or len(entry.adds) < 2 or live.unclear:
            return live.stream
        return live.stream.skipped(live.start + entry.adds.get(live.start, 0), known=True)

    def add(
        self,
        shortcut: Tensor,
        *branches: Tensor | Callable[[Tensor], Tensor],
        alpha: float = 1,
        norm: nn.Module | None = None,
        site: int | None = None,
        more: bool = False,
        last: bool = False,
        of: int = 1,
    ) -> Any:
        """Make a residual add, ``shortcut + sum(branches)`` in the original, and return the stream's new value.

        If a norm or another operation follows before the state is complete (`push`), this is only the sum.

        Args:
            shortcut: the stream's value.
            branches: the branch outputs. If the model adds one only to some rows, a function that adds it,
                ``lambda x: torch.index_add(x, 0, rows, f)``: the branch is zero in the other rows.
            alpha: a factor of the branches.
            norm: the norm that reads the new value first.
            site: number of adds of this call before this one, if some may be skipped.
            more: whether another `add` of a parallel branch follows: then the result is the sum so far, not a state.
            last: whether the function returns the result at once: then it is the stream, for the next block to read.
            of: number of parallel branches that a loop adds here one by one, as if with ``more`` before the last.

        Raises:
            OutOfOrder: ``shortcut`` is not the value of a stream of this function.
            WidthMismatch: a branch has another shape than the stream.
        """
        if uncounted():
            with outside_inference_mode():
                return self.add(shortcut, *branches, alpha=alpha, norm=norm, site=site, more=more, last=last, of=of)
        given: tuple[Any, ...] = branches
        if len(given) != 1 or not isinstance(given[0], Tensor):
            given = tuple([self._branch(branch, shortcut) for branch in branches])
        if not self.live and all(entry.outside and not entry.begins for entry in self.entries):
            return _plain_sum(shortcut, given, alpha)  # a call without streams; had one been lost, its end would tell
        if more or (of > 1 and len(self._shortcut(shortcut)[1]) + len(given) < of):
            return self._added(shortcut, given, alpha)
        live = self._written(shortcut, given, alpha, site)
        if not last or live.stream.complete or live.stream.in_post:
            return live.read(norm)
        self.live.remove(live)
        self._check_count(live, True)
        return live.stream

    def _added(self, shortcut: Tensor, branches: tuple[Tensor, ...], alpha: float) -> Tensor:
        """The sum of a shortcut and some of the parallel branches of a residual add."""
        live, before = self._shortcut(shortcut)
        if live.overwritten:
            raise self._overwritten(live)
        branches = tuple(map(counted, branches))
        total = _plain_sum(shortcut, branches, alpha)
        live.parts.append((total, (*before, *(branches if alpha == 1 else [branch * alpha for branch in branches]))))
        live.parallel += [(part, noted(part)) for part in (total, *branches)]
        return total

    def _branch(self, branch: object, shortcut: Tensor) -> Tensor:
        """The tensor that is added to a shortcut; a skipped branch may be the number 0."""
        if isinstance(branch, Tensor):
            return branch
        if callable(branch):  # it may add rows to a reshaped value of the stream
            live, rows = self._holding(shortcut), branch(torch.zeros_like(shortcut))
            added: Tensor = rows.view_as(shortcut if live is None else live.values[0])
            return added
        return torch.as_tensor(branch, dtype=shortcut.dtype, device=shortcut.device)

    def _shortcut(self, shortcut: Tensor) -> tuple[Live, tuple[Tensor, ...]]:
        """The stream to which a shortcut belongs, and the parallel branches already added to its value."""
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
                "of its residual stream: something between the adds made a new tensor of it in this call; or the "
                "state came in an object that rewire does not look into: hand it on as a tensor; or the add writes in "
                "place to what came in, where operations made a new tensor of that when the model was rewired: write "
                f"`x = x + f`. To leave the trunk out: trunks=[...].{self.advice}"
            )
        return live, before

    def _written(self, shortcut: Tensor, branches: tuple[Tensor, ...], alpha: float, site: int | None) -> Live:
        """Write branches to the stream of a shortcut."""
        live, before = self._shortcut(shortcut)
        if live.overwritten:
            raise self._overwritten(live)
        if torch.is_grad_enabled() != live.stream.weights.recorded and live.switched_on():
            with torch.no_grad():
                return self._written(shortcut, branches, alpha, site)
        if site is not None and live.stream.position != live.first + site:
            raise OutOfOrder(
                f"block '{self.block}' ({self.where}) makes residual add {site} of its own, counted from 0, where the "
                f"stream is at {live.stream.position - live.first}: one before it was left out, or runs again, in a "
                f"way that rewire does not see. Let an `if` around it change the same variable.{self.advice}"
            )
        if isinstance(live.stream.held, Post):
            raise OutOfOrder(
                f"block '{self.block}' ({self.where}) reads the sum of residual add {live.stream.position} "
                f"of trunk '{live.trunk}' as it is, where other operations followed when the model was "
                f"rewired: this call takes another way through the code.{self.advice}"
            )
        if live.qkv is not None and not live.apart:
            raise self.separate.lost("adds the output of an attention that did not get what was read for it")
        if alpha != 1:
            branches = tuple([branch * alpha for branch in branches])
        if shortcut.dtype != live.values[0].dtype:  # a cast of the value: add in its precision
            branches = tuple([branch.to(torch.promote_types(branch.dtype, shortcut.dtype)) for branch in branches])
        live.stream = live.stream.write(*before, *branches)
        return live

    def push(
        self,
        state: object,
        norm: nn.Module | None = None,
        trunk: int | tuple[int, ...] = 0,
        item: Item | None = None,
        more: bool = False,
    ) -> Any:
        """Give the stream the state that the operations after an add, its *post*, made of the sum; return its value.

        Args:
            state: the state, or a tuple with it.
            norm: the norm that reads it first.
            trunk: number of the trunk among the function's; or numbers of several, only one of which waits for a state.
            item: the item of a tuple that is the state; None: its only tensor.
            more: whether other operations may follow; if none runs, this is the state.
        """
        numbers = (trunk,) if isinstance(trunk, int) else trunk
        trunks = [self.entries[number].trunk for number in numbers]
        waiting = [live for live in self.live if live.trunk in trunks and live.stream.in_post]
        if not waiting:
            for number in numbers:
                self._goes_on(state, number)
            return state
        live = waiting[0]
        if len(waiting) > 1:
            raise OutOfOrder(
                f"block '{self.block}' ({self.where}) makes the next state of one of two streams, those of trunks "
                f"{' and '.join(repr(live.trunk) for live in waiting)}, and it is unclear of which.{self.advice}"
            )
        if live.overwritten:
            raise self._overwritten(live)
        return with_item(state, item, functools.partial(self._pushed, live, norm, more=more))

    def _pushed(self, live: Live, norm: nn.Module | None, part: object, more: bool = False) -> Any:
        live.stream = live.stream.push(counted(self._tensor(part)), more)
        value, live.apart = live.read(norm), False  # a new value, from which nothing was projected yet
        return value

    def _tensor(self, state: object) -> Tensor:
        if not isinstance(state, Tensor):
            raise OutOfOrder(
                f"block '{self.block}' ({self.where}) makes a {type(state).__name__} of a residual add's sum, but "
                f"made a tensor of it when it was rewired.{self.advice}"
            )
        return state

    def reach(
        self,
        value: object,
        to: int | None = None,
        *trunks: int,
        before: Sequence[Any] = (),
        trunk: int = 0,
    ) -> Any:
        """The value of a variable after an ``if`` or a loop in which adds, posts or blocks may have been skipped.

        Skipped adds add nothing. If a post was skipped, the sum is the state.

        Args:
            value: the variable's value, perhaps in a container.
            to: number of this call's adds up to here; -1: all adds of the trunk; None: only a post may be skipped.
            trunks: numbers of the function's trunks that this concerns; default: all, or the first if ``to`` is -1.
            before: in a loop's iteration, the function's module, and the one below it that this iteration runs, or a
                container and where in it that is, if it is there: ``to`` then counts the adds of the iteration.
            trunk: number of the trunk to which the loop adds.

        Raises:
            OutOfOrder: iterations run in another order than when the model was rewired.
        """
        if before:
            return self._at_iteration(value, self.entries[trunk], *_looked_up(*before), to or 0)
        newest = value[-1] if isinstance(value, (list, tuple)) and value else value  # of states that the model keeps
        return mapped(value, lambda part: self._reached(part, to, trunks, part is newest))

    def _at_iteration(self, value: object, entry: Entry, owner: nn.Module, module: object, to: int) -> Any:
        live = self._of_trunk(entry.trunk)
        if live is None or module is None:
            return value
        ran = live.stream.position - live.first
        known = entry.number_of(entry.iterations, owner, module, ran - to)
        adds = None if known is None else known + to
        live.unclear |= adds is None
        if adds is None or adds == ran:
            return value
        held = [part for part in tensors_and_streams(value) if isinstance(part, Tensor) and self._holding(part) is live]
        if adds < ran or not held:
            raise OutOfOrder(
                f"block '{self.block}' ({self.where}) has made {ran} residual adds in this call where an iteration of "
                f"a loop begins before which it made {adds} when it was rewired: iterations run in another order or "
                f"again, or something else was made of the stream between them.{self.advice}"
            )
        return mapped(value, lambda part: self._reached(part, adds, [self.entries.index(entry)]))

    def _reached(self, value: object, to: int | None, trunks: Sequence[int], newest: bool = False) -> Any:
        live = self._holding(value) if isinstance(value, Tensor) else None
        entry = None if live is None else self._entry(live.stream)
        if live is None or entry is None or live.stream.complete:
            reached = (live for live in self.live if newest and any(value is before for before in live.replaced))
            return next((live.values[0] for live in reached), value)
        numbers = trunks or ((0,) if to == -1 else range(len(self.entries)))
        if all(entry is not self.entries[number] for number in numbers):
            return value
        if to == -1:
            if live.stream.position == entry.cut_at or live.unclear:
                return value
            if live.overwritten:
                raise self._overwritten(live)
            if isinstance(live.source, Tensor) and entry.adds_none(live.stream):
                self.live.remove(live)
                return live.source
            live.stream = live.stream.skipped(len(live.stream.layout.units)).settled()
        elif to is not None:
            if live.stream.position >= live.first + to or live.unclear:
                return value
            if live.overwritten:
                raise self._overwritten(live)
            live.stream = live.stream.skipped(live.first + to)
        elif live.stream.in_post:
            live.stream = live.stream.push(self._tensor(value))
        else:
            return value
        before = [*live.values, *live.replaced]
        value, live.apart = live.read(), False
        live.replaced = before
        return value

    def view(self, function: Callable[..., Any], *values: object) -> Any:
        """``function(*values)``, which reshapes one of them; if it is a stream's value, all its states are reshaped."""
        live, held = self._held(values)
        whole = function(*values)
        if live is None or live.stream.complete:  # after the last add, only the output is reshaped
            return whole
        if live.overwritten:
            raise self._overwritten(live)

        def view(x: Tensor) -> Tensor:
            (only,) = tensors_and_streams(function(*(x if value is held else value for value in values)))
            return self._tensor(only)

        live.stream = live.stream.viewed(view)
        value = live.read()
        return with_item(whole, None, lambda _: value)

    def copy(self, function: Callable[..., Any], *values: object, factor: bool = False) -> Any:
        """``function(*values)``, a cast or clone: if one of them is a stream's value, so is the result.

        Args:
            function, values: the function and its arguments.
            factor: whether it is a product with a factor that was 1 when the model was rewired.

        Raises:
            OutOfOrder: the factor is not 1 any more.
        """
        if uncounted():
            with outside_inference_mode():
                return self.copy(function, *values, factor=factor)
        live, held = self._held(values)
        # For separate q/k/v inputs, it is computed for each of them.
        result = function(*values) if live is None or live.qkv is None else self.separate.apply(function, *values)
        if live is not None and factor:
            self._check_factor(function(*(1.0 if value is held else value for value in values)))
        if live is not None and self._holding(result) is not live:
            live.switched_on()
            live.also(result)
        return result

    def _check_factor(self, factor: object) -> None:
        if isinstance(factor, Tensor) or factor != 1:
            raise OutOfOrder(
                f"block '{self.block}' ({self.where}) multiplies the residual stream by {factor}, but did so by 1 "
                f"when it was rewired: connections would have to learn the factor.{self.advice}"
            )

    def apply(self, function: Callable[..., Any], *values: object) -> Any:
        """``function(*values)``, between a read and a branch.

        If it is a norm that was computed together with the read, that result is returned. For separate q/k/v inputs,
        it is computed for each of them.
        """
        for live in self.live if len(values) == 1 else ():
            known = live.normed_by(function, *values)
            if known is not None:
                return known
        return self.separate.apply(function, *values)

    def project(self, projection: Callable[..., Any], what: Any) -> Callable[..., Any]:
        """Wrap a projection of an attention, so that it gets the separate input of queries, keys or values.

        ``what`` is ``"q"``, ``"k"`` or ``"v"``; ``"qkv"`` for a torch.nn.MultiheadAttention; groups and sizes (`Fused`)
        of one that makes all three; or a dict of these by projection, if one call is of several projections.
        """
        return self.separate.project(projection, what)

    def data(self, x: Any, *new: object) -> Any:
        """``x.data``, or ``x.data = new``; for a stream's value by `detach`, which shares its version counter."""
        if uncounted():
            with outside_inference_mode():
                return self.data(x, *new)
        root = _root(x) if isinstance(x, Tensor) else None
        known = [value for live in self.live for value in (*live.values, *live.stream.known)]
        if root is not None and any(_root(value) is root or share_memory(value, x) for value in known):
            return x.detach().copy_(*new) if new else x.detach()
        if new:
            (x.data,) = new
        return x.data

    def _held(self, values: Sequence[object]) -> tuple[Live | None, Any]:
        """The stream to which one of several values belongs, and that value; (None, None) if none does."""
        for value in values:
            live = self._holding(value) if isinstance(value, Tensor) else None
            if live is not None:
                return live, value
        return None, None

    def _holding(self, value: Tensor) -> Live | None:
        """The stream whose value is this tensor, by identity."""
        for live in self.live:
            for known in live.values:
                if known is value:
                    return live
        return None

    def _is_earlier(self, stream: Stream) -> bool:
        """Whether ``stream`` is an earlier state of a stream that is open already."""
        return any(live.stream.weights is stream.weights and live.source is not stream for live in self.live)

    def _went_on(self, stream: Stream) -> Live | None:
        """The open stream that comes back as ``stream``; None if a function that was called began it."""
        of_trunk = [live for live in self.live if live.trunk == stream.layout.trunk]
        same = [live for live in of_trunk if live.stream.weights is stream.weights]
        return next(iter(same), None) or next((live for live in of_trunk if live.given or live.stream.complete), None)

    def _of_trunk(self, trunk: str) -> Live | None:
        """The open stream of a trunk."""
        return next((live for live in self.live if live.trunk == trunk), None)

    def _entry(self, stream: Stream) -> Entry | None:
        """The function's entry for a stream's trunk."""
        for entry in self.entries:
            if entry.trunk == stream.layout.trunk:
                return entry
        return None

    def _overwritten(self, live: Live) -> OutOfOrder:
        return OutOfOrder(
            f"the value of trunk '{live.trunk}' was written to in place in block "
            f"'{self.block}' ({self.where}), after the stream was read: earlier states that other blocks "
            f"read would not change with it. {REMEDY}{self.advice}"
        )

    def _check_count(self, live: Live, leaves: bool) -> None:
        entry, stream, layout = live.entry, live.stream, live.stream.layout
        ran = stream.position - live.start
        expected = ran if entry is None else entry.adds.get(live.start, ran)
        if not leaves and not stream.complete:
            layout.check_passes(stream.position, len(layout.units))
        none = entry is not None and isinstance(live.source, Tensor) and entry.adds_none(stream)
        told = none or (entry is not None and entry.ordered and not live.unclear)
        too_many = ran > expected and not (entry is not None and entry.runs_blocks)
        if entry is not None and (too_many or (ran < expected and not told)):
            raise OutOfOrder(
                f"block '{self.block}' ({self.where}) made {ran} residual adds of trunk '{entry.trunk}' in "
                f"this call, and {expected} when it was rewired. A block that does not run adds nothing, where it is "
                "known which one that was: with the add in the forward of a block, in an `if` that changes the same "
                f"variable, or in a `for` loop that calls another module in each iteration.{self.advice}"
            )
        if not leaves and not stream.complete:
            clamped = _CLAMPED if stream.dtype == torch.float16 else ""
            raise OutOfOrder(
                f"block '{self.block}' ({self.where}) returned without the value of trunk "
                f"'{layout.trunk}' after {stream.position} of its {len(layout.units)} residual adds: in this call it "
                "makes something else of it, or adds in another way (`f.add_(x)` without gradients, say), than when it "
                f"was rewired.{clamped}{self.advice}"
            )


only_inlined(Depth)  # so that writes are counted behind a graph break


def _may_end(live: Live, *called: object) -> bool:
    """Whether a call may have ended a stream: it runs blocks of its trunk, or no module that can be seen here.

    Under torch.compile, a stream that ends inside a checkpoint cannot record that.
    """
    functions = [each.func if isinstance(each, functools.partial) else each for each in called]
    owners = [each.__self__ if inspect.ismethod(each) else each for each in functions]
    modules = [child for each in owners if isinstance(each, nn.Module) for child in each.modules()]
    entries = [entry for module in modules if hasattr(module, GATE) for entry in getattr(module, GATE).entries]
    return not modules or any(entry.trunk == live.trunk for entry in entries)


def _looked_up(owner: nn.Module, module: Any, *key: object) -> tuple[nn.Module, object]:
    """A function's module, and the one below it that tells where it is; None if a container has none at that key."""
    if not key:
        return owner, module
    try:
        return owner, module[key[0]]
    except LookupError:
        return owner, None


def _with(args: Sequence[object], live: Live, x: Tensor) -> list[Any]:
    """Arguments with ``x`` in place of the stream's value."""
    return [x if any(value is arg for value in live.values) else arg for arg in args]


def _root(x: Tensor) -> Tensor:
    """The tensor of which ``x`` is a view, or ``x`` itself."""
    base = viewed(x)
    return x if base is None else base


def _plain_sum(shortcut: Tensor, branches: Sequence[Tensor], alpha: float) -> Tensor:
    """A residual add as in the original."""
    for branch in branches:
        shortcut = torch.add(shortcut, branch, alpha=alpha)
    return shortcut
