"""What an edited function knows of its trunks: it stays on its module, as a plain attribute."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from rewire.runtime.depth import Depth
from rewire.runtime.live import Entry
from rewire.runtime.nested import mapped
from rewire.runtime.stream import Stream


class Gate:
    """What an edited function knows of its trunks.

    A plain attribute of its module: no child, no parameters; copied and pickled along with it.

    Args:
        block: path of the module, for messages.
        where: file and line of the function, for messages.
        entries: one for each stream that runs through the function.
        function: a helper that is no method; it is called with the gate first.
        advice: what more to say where a call takes another way than the one that was seen; a blank comes first.

    Attributes:
        helpers: gates of the module's functions that are no methods, by name: a helper may call others.
    """

    def __init__(
        self,
        block: str,
        where: str,
        entries: Sequence[Entry],
        function: Callable[..., Any] | None = None,
        advice: str = "",
    ) -> None:
        self.block, self.where, self.entries, self.advice = block, where, list(entries), advice
        self.function = function
        self.helpers: dict[str, Gate] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        assert self.function is not None
        return self.function(self, *args, **kwargs)

    def on(self, instance: Any) -> Callable[..., Any]:
        """The function as a method of an object: what takes the place of ``super().method``."""
        assert self.function is not None
        return functools.partial(self.function, self, instance)

    def enter(self) -> Depth:
        """What one call of the function talks to."""
        return Depth(self.block, self.where, self.entries, self.advice)

    @property
    def passes_stream(self) -> bool:
        """Whether a stream comes in or goes out in place of hidden states."""
        return any(
            not entry.begins or adds < len(entry.connection.layout.units)
            for entry in self.entries
            for adds in entry.adds.values()
        )

    def reach(self, value: Any, to: int, *trunks: int) -> Any:
        """`Depth.reach`, of a function that holds streams, not their values: the output of the trunks that end there.

        Args:
            value: of a variable.
            to: -1, the end.
            trunks: which of the function's trunks end here; else the first. Where the model was cut, streams go on.

        Raises:
            OutOfOrder: the hidden states were written to.
            UnsupportedCall: gradients were on when it began and are off now, or the other way around.
        """
        ended = {entry.trunk: entry for entry in (self.entries[number] for number in trunks or (0,))}

        def output_of(item: Any) -> Any:
            if not isinstance(item, Stream) or item.layout.trunk not in ended:
                return item
            if item.position == ended[item.layout.trunk].cut_at:
                return item
            item.check_recorded()
            item.check_loans()
            return item.skipped(len(item.layout.units)).settled().finish()

        return mapped(value, output_of)

    def __repr__(self) -> str:
        return f"Gate({self.block!r}, {', '.join(entry.trunk for entry in self.entries)})"
