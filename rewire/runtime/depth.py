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
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from rewire.errors import OutOfOrder, UnsupportedCall
from rewire.runtime.calls import Calls
from rewire.runtime.held import Post, Reading
from rewire.runtime.left_out import LeftOut, looked_up
from rewire.runtime.live import Entry, Live
from rewire.runtime.nested import Item, at, mapped, tensors_and_streams, with_item
from rewire.runtime.open_streams import CLAMPED
from rewire.runtime.parts import Parts
from rewire.runtime.reentrant import USE, where_reentrant
from rewire.runtime.stream import Stream
from rewire.runtime.writes import counted, noted, share_memory, uncounted
from rewire.torch_internals import only_inlined, outside_inference_mode, viewed


class Depth(Calls, LeftOut):
    """The streams of one call of an edited forward.

    Args:
        block, where, entries, advice: as in its `Gate`.
    """

    #: ``depth.add(x, depth.at[rows](f))`` for ``x[rows] += f``.
    at = Parts()

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
                changed in place. When the function returns (`leave`), it gets the stream back in place of its value,
                and what was there before in place of values that the function has left alone.
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
            if isinstance(value, fx.Proxy):
                raise UnsupportedCall(
                    f"torch.fx traces block '{self.block}' with stand-ins for tensors: use torch.export"
                )
            parts = tensors_and_streams(value)
            begin = begin and (self.entries[trunk].begins or not any(isinstance(part, Stream) for part in parts))
            new = (part for part in parts if self._holding(part) is None)
            first = next(new, None) if item is None else at(value, item)
            self.held += [value]

            def opened(part: object) -> Any:
                if isinstance(part, Stream) and (self._entry(part) is None or self._is_earlier(part)):
                    return part  # a stream that the function only passes on, or an earlier state
                own = self.open(part, norm, trunk, post, begin and part is first, before=before)
                if own is not part:
                    self.put.append((own, part))
                return own

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
        if isinstance(value, Tensor) and begin and not (before and looked_up(*before)[1] is None):
            begun = [live for live in self.live if live.entry is entry and (live.start or not live.stream.complete)]
            if not begun:
                return self._begin(value, norm, entry, before)
            if not again:
                self._check_beside(begun[0])
        return value

    def _enter(self, stream: Stream, norm: nn.Module | None, before: Sequence[Any]) -> Tensor:
        """Take in a stream from outside, and return its value."""
        if stream.shared.lent:
            stream.check_lent()
        if not isinstance(stream.held, (Reading, Post)):
            stream.check_recorded()
        if stream.shared.ended and not stream.complete:
            stream.shared.run_again()
        entry = self._entry(stream)
        if entry is not None and stream.shared.begun_by not in (None, entry.connection):
            raise self._of_another_model(entry)
        if entry is not None and before:
            owner, module = looked_up(*before)
            if module is None:  # it is none of the calls that add
                aside = Live(stream, None, stream)
                aside.unclear = True
                return self._track(aside, norm)
            stream.shared.tells(entry, owner)
            stream = stream.skipped(self._position_of(entry, owner, module, stream.position), known=True)
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

    def _of_another_model(self, entry: Entry) -> OutOfOrder:
        return OutOfOrder(
            f"block '{self.block}' ({self.where}) and the block that began the stream of trunk '{entry.trunk}' were "
            "rewired in two models, and each brings the connections of its own. Copy the weights instead, as in "
            "`model.blocks[0].load_state_dict(other.blocks[0].state_dict())`, or put the blocks together first and "
            "rewire the model then: rewire.restore gives the plain models."
        )

    def _begin(self, value: Tensor, norm: nn.Module | None, entry: Entry, before: Sequence[Any]) -> Tensor:
        """Begin a stream with a plain tensor, and return its value."""
        if not entry.begins and value.dtype == torch.float16:
            raise UnsupportedCall(f"block '{self.block}' was given a plain tensor where a stream belongs.{CLAMPED}")
        if not entry.begins and entry.connection.layout.loops:
            raise entry.connection.layout.other_passes()
        if not entry.begins:
            after = self._position_of(entry, *looked_up(*before), 0) if before else next(iter(entry.adds))
            giver = "the block before it returns" if after else "its caller had, not a slice of it, say"
            raise OutOfOrder(
                f"block '{self.block}' was given a plain tensor, but it belongs after residual add {after} of trunk "
                f"'{entry.trunk}' and needs the stream that {giver}. Call the blocks in the model's order and hand on "
                "what they return. What changes hidden states between blocks belongs in a forward hook of a block, or "
                "has to happen on the inputs that the model is rewired with, too; of a model that was cut for pipeline "
                "parallelism, call rewire.pipeline_stage on every stage. If the trunk's first block was deleted or "
                f"replaced, rewire the changed model.{self.advice}"
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
        stream = begin(counted(value))
        stream.shared.begun_by = entry.connection
        if entry.read_below:
            stream.shared.input = value
        return self._track(Live(stream, entry, value), norm)

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
            if live.not_started:
                return live.source
            return self._with_all_adds(live)

        def given_back(item: object) -> Any:
            stream = stream_of(item)
            if stream is not item:
                return stream
            return next((before for own, before in self.put if own is item), item)  # the function has left it alone

        result = mapped(result, stream_of)
        dicts, others = ([held for held in self.held if isinstance(held, dict) is of] for of in (True, False))
        mapped((dicts, changed), given_back)
        handed_on = [*left]  # a function that changes what `others` hold returns these, too
        mapped(others, given_back)
        for live in [*self.live, *(live for _, live in self.outputs)]:
            if live.unrecorded and not live.called:
                live.stream.check_recorded()
        for live in self.live:
            self._check_count(live, live in handed_on)
        self.left = True
        return result

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
        if torch.is_grad_enabled() != live.stream.shared.recorded and live.switched_on():
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
            by = f"a tensor of shape {[*factor.shape]}" if isinstance(factor, Tensor) else factor
            raise OutOfOrder(
                f"block '{self.block}' ({self.where}) multiplies the residual stream by {by}, but did so by 1 when it "
                f"was rewired: connections would have to learn the factor.{self.advice}"
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

    def _is_earlier(self, stream: Stream) -> bool:
        """Whether ``stream`` is an earlier state of a stream that is open already."""
        return any(live.stream.shared is stream.shared and live.source is not stream for live in self.live)


only_inlined(Depth)  # so that writes are counted behind a graph break


def _root(x: Tensor) -> Tensor:
    """The tensor of which ``x`` is a view, or ``x`` itself."""
    base = viewed(x)
    return x if base is None else base


def _plain_sum(shortcut: Tensor, branches: Sequence[Tensor], alpha: float) -> Tensor:
    """A residual add as in the original."""
    for branch in branches:
        shortcut = torch.add(shortcut, branch, alpha=alpha)
    return shortcut
