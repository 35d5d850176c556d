"""`LeftOut`: the part of `Depth` for calls that leave out adds, blocks, or operations that make states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from rewire.errors import OutOfOrder
from rewire.runtime.live import Entry
from rewire.runtime.nested import mapped, tensors_and_streams
from rewire.runtime.open_streams import OpenStreams
from rewire.torch_internals import only_inlined


class LeftOut(OpenStreams):
    """What was left out adds nothing, where it is known what that was."""

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
            return self._at_iteration(value, self.entries[trunk], *looked_up(*before), to or 0)
        newest = value[-1] if isinstance(value, (list, tuple)) and value else value  # of states that the model keeps
        return mapped(value, lambda part: self._reached(part, to, trunks, part is newest))

    def _at_iteration(self, value: object, entry: Entry, owner: nn.Module, module: object, to: int) -> Any:
        live = self._of_trunk(entry.trunk)
        if live is None or module is None:
            return value
        live.stream.shared.tells(entry, owner)
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
        ends = to in (-1, len(live.stream.layout.units))
        if ends and live.not_started and entry.cut_at != 0 and not live.unclear and not live.overwritten:
            self.live.remove(live)
            return live.source
        if to == -1:
            if live.stream.position == entry.cut_at or live.unclear:
                return value
            if live.overwritten:
                raise self._overwritten(live)
            live.stream = live.stream.skipped(len(live.stream.layout.units)).settled()
        elif to is not None:
            if live.stream.position >= live.first + to or live.unclear:
                return value
            if live.overwritten:
                raise self._overwritten(live)
            live.skipped += live.first + to - live.stream.position
            live.stream = live.stream.skipped(live.first + to)
        elif live.stream.in_post:
            live.stream = live.stream.push(self._tensor(value))
        else:
            return value
        before = [*live.values, *live.replaced]
        value, live.apart = live.read(), False
        live.replaced = before
        return value

    def _position_of(self, entry: Entry, owner: nn.Module, module: object, position: int) -> int:
        """The stream's position at the call of a method that runs ``module``; ``position`` if none was left out before.

        Raises:
            OutOfOrder: it is another call than any that is known.
        """
        known = entry.number_of(entry.calls, owner, module, position)
        if known is None or known < position:
            raise OutOfOrder(
                f"block '{self.block}' ({self.where}) runs a {type(module).__name__} after {position} residual adds of "
                f"trunk '{entry.trunk}', and {'did not run it' if known is None else f'after {known}'} when it was "
                f"rewired: it is called in another order, or again.{self.advice}"
            )
        return known


only_inlined(LeftOut)  # so that writes are counted behind a graph break


def looked_up(owner: nn.Module, module: Any, *key: object) -> tuple[nn.Module, object]:
    """A function's module, and the one below it that tells where it is; None if a container has none at that key."""
    if not key:
        return owner, module
    try:
        return owner, module[key[0]]
    except (LookupError, TypeError):  # TypeError: the key is None
        return owner, None
