"""`Calls`: the part of `Depth` that hands streams to other functions, and takes them back."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rewire.attributes import GATE
from rewire.errors import OutOfOrder
from rewire.runtime.live import Live
from rewire.runtime.nested import Item, at, is_container, mapped, tensors_and_streams, with_item
from rewire.runtime.open_streams import OpenStreams
from rewire.runtime.stream import Stream, is_earlier
from rewire.torch_internals import only_inlined


class Calls(OpenStreams):
    """Calls of functions that streams go through."""

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
                done = live.stream.shared.ended or (torch.compiler.is_compiling() and _may_end(live, function, *args))
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

    def _ended(self, *given: object) -> list[str]:
        """The trunks with loops whose outputs are passed to a function."""
        outputs = [*self.outputs, *((x, live) for live in self.live if live.stream.complete for x in live.values)]
        outputs = [(x, live) for x, live in outputs if live.stream.layout.loops]
        parts = tensors_and_streams(given) if outputs else []
        return [live.trunk for x, live in outputs if any(x is part for part in parts)]

    def _goes_on(self, value: object, trunk: int) -> None:
        """Remember what operations after the last add made of a trunk's output: a loop's next pass may get it."""
        ended = [*(live for _, live in self.outputs), *(live for live in self.live if live.stream.complete)]
        for live in [live for live in ended if live.trunk == self.entries[trunk].trunk][-1:]:
            self.outputs += [(x, live) for x in tensors_and_streams(value) if live.stream.layout.loops]

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
        alone = isinstance(result, (Tensor, Stream))
        streams = [] if alone else [part for part in tensors_and_streams(result) if isinstance(part, Stream)]
        values: dict[int, Tensor] = {}  # by a stream's id: if it is returned twice, its value is one tensor

        def value_of(item: object) -> Any:
            if not isinstance(item, Stream):
                return item
            if any(item is state and item.layout.trunk == trunk for trunk, state in earlier):
                return item.value()
            if item.shared.ended or is_earlier(item, streams):
                return item.value()  # the model has collected it
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
            stream = self._with_all_adds(live)
            return stream.finish() if stream.complete else stream

        return mapped(result, lambda item: value_of(item) if isinstance(item, Stream) else item)

    def _went_on(self, stream: Stream) -> Live | None:
        """The open stream that comes back as ``stream``; None if a function that was called began it."""
        of_trunk = [live for live in self.live if live.trunk == stream.layout.trunk]
        same = [live for live in of_trunk if live.stream.shared is stream.shared]
        return next(iter(same), None) or next((live for live in of_trunk if live.given or live.stream.complete), None)


only_inlined(Calls)  # so that writes are counted behind a graph break


def _may_end(live: Live, *called: object) -> bool:
    """Whether a call may have ended a stream: it runs blocks of its trunk, or no module that can be seen here.

    Under torch.compile, a stream that ends inside a checkpoint cannot record that.
    """
    functions = [each.func if isinstance(each, functools.partial) else each for each in called]
    owners = [each.__self__ if inspect.ismethod(each) else each for each in functions]
    modules = [child for each in owners if isinstance(each, nn.Module) for child in each.modules()]
    entries = [entry for module in modules if hasattr(module, GATE) for entry in getattr(module, GATE).entries]
    return not modules or any(entry.trunk == live.trunk for entry in entries)


def _with(args: Sequence[object], live: Live, x: Tensor) -> list[Any]:
    """Arguments with ``x`` in place of the stream's value."""
    return [x if any(value is arg for value in live.values) else arg for arg in args]
