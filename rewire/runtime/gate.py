"""`Gate`: what an edited function knows of its trunks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from rewire.runtime.depth import Depth
from rewire.runtime.live import Entry
from rewire.runtime.nested import mapped, tensors_and_streams
from rewire.runtime.stream import Stream, is_earlier


class Gate:
    """What an edited function knows of its trunks.

    It is a plain attribute of the function's module, neither child nor parameter, and is copied and pickled with it.

    Args:
        block: path of the module, for messages.
        where: file and line of the function, for messages.
        entries: one for each stream that runs through the function.
        function: a helper that is not a method; it is called with the gate as first argument.
        advice: appended to errors about calls that take another path than the one that was seen; starts with a blank.

    Attributes:
        helpers: gates of the module's helpers that are not methods, by name: a helper may call others.
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

    def __call__(self, *args: object, **kwargs: object) -> Any:
        assert self.function is not None
        return self.function(self, *args, **kwargs)

    def on(self, instance: object) -> Callable[..., Any]:
        """The function as a method of an object, in place of ``super().method``."""
        assert self.function is not None
        return functools.partial(self.function, self, instance)

    def enter(self) -> Depth:
        """A new `Depth` for one call of the function."""
        return Depth(self.block, self.where, self.entries, self.advice)

    @property
    def passes_stream(self) -> bool:
        """Whether the function takes or returns a stream in place of hidden states."""
        return any(
            not entry.begins or adds < len(entry.connection.layout.units)
            for entry in self.entries
            for adds in entry.adds.values()
        )

    def reach(self, value: object, to: int, *trunks: int) -> Any:
        """`Depth.reach` for a function whose variables hold streams: streams of trunks that end become their outputs.

        Earlier states that the model has collected stay as they are.

        Args:
            value: a variable's value, or those of several.
            to: -1, the end.
            trunks: numbers of the trunks that end here; default: the first. If the model was cut, their streams go on.

        Raises:
            OutOfOrder: the hidden states were written to.
            UnsupportedCall: gradients were switched on or off since the stream began.
        """
        entries = {entry.trunk: entry for entry in (self.entries[number] for number in trunks or (0,))}
        parts = [part for part in tensors_and_streams(value) if isinstance(part, Stream)]
        going_on = [part for part in parts if part.layout.trunk in entries and not part.shared.ended]
        newest = [part for part in going_on if not is_earlier(part, going_on)]
        # By forward: a stream that is there twice has one output.
        outputs: dict[int, Stream | Tensor] = {}
        for stream in newest:
            if id(stream.shared) not in outputs:
                outputs[id(stream.shared)] = _output(stream, entries[stream.layout.trunk].cut_at)

        def output_of(item: Any) -> Any:
            return outputs[id(item.shared)] if any(item is part for part in newest) else item

        return mapped(value, output_of)

    def __repr__(self) -> str:
        return f"Gate({self.block!r}, {', '.join(entry.trunk for entry in self.entries)})"


def _output(stream: Stream, cut_at: int | None) -> Stream | Tensor:
    """What a trunk makes of a stream after which no more of its blocks run; the stream, where the model was cut."""
    if stream.position == cut_at:
        return stream
    stream.check_recorded()
    stream.check_lent()
    return stream.skipped(len(stream.layout.units)).settled().finish()
