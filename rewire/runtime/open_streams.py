"""`OpenStreams`: the streams that are open inside one call of an edited function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rewire.errors import OutOfOrder
from rewire.runtime.live import Entry, Live
from rewire.runtime.separate import SeparateInputs
from rewire.runtime.stream import Stream
from rewire.runtime.writes import REMEDY, counted
from rewire.torch_internals import only_inlined

#: Advice for errors about other adds in float16.
CLAMPED = (
    " Some models (T5, Whisper) clamp their states in float16 between the adds, and in no other precision: use "
    "bfloat16 or float32, or rewire the model in float16."
)


class OpenStreams:
    """The streams that are open inside one call of an edited function, and the tensors that stand for them.

    Args:
        block, where, entries, advice: as in its `Gate`.
    """

    def __init__(self, block: str, where: str, entries: Sequence[Entry], advice: str = "") -> None:
        self.block, self.where, self.entries, self.advice = block, where, entries, advice
        self.live: list[Live] = []
        self.separate = SeparateInputs(block, where, self.live)
        self.held: list[Any] = []  # containers with streams, or with a tensor with which a trunk starts
        self.put: list[tuple[Any, Any]] = []  # the values that took their places in these, and what was there
        self.outputs: list[tuple[Any, Live]] = []  # outputs of streams that ended in called functions
        self.left = False

    def _track(self, live: Live, norm: nn.Module | None) -> Tensor:
        self.live.append(live)
        return live.read(norm)

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

    def _of_trunk(self, trunk: str) -> Live | None:
        """The open stream of a trunk."""
        return next((live for live in self.live if live.trunk == trunk), None)

    def _entry(self, stream: Stream) -> Entry | None:
        """The function's entry for a stream's trunk."""
        for entry in self.entries:
            if entry.trunk == stream.layout.trunk:
                return entry
        return None

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

    def _overwritten(self, live: Live) -> OutOfOrder:
        return OutOfOrder(
            f"the value of trunk '{live.trunk}' was written to in place in block "
            f"'{self.block}' ({self.where}), after the stream was read: earlier states that other blocks "
            f"read would not change with it. {REMEDY}{self.advice}"
        )

    def _with_all_adds(self, live: Live) -> Stream:
        """The stream to return; with the adds that were left out, if the function is called at several positions.

        Otherwise, the next function that adds knows where it belongs.
        """
        entry = live.entry
        if entry is None or live.source is None or not entry.ordered or len(entry.adds) < 2 or live.unclear:
            return live.stream
        return live.stream.skipped(live.start + entry.adds.get(live.start, 0), known=True)

    def _check_count(self, live: Live, leaves: bool) -> None:
        entry, stream, layout = live.entry, live.stream, live.stream.layout
        ran = stream.position - live.first
        expected = ran if entry is None else entry.adds.get(live.first, ran)
        if not leaves and not stream.complete:
            layout.check_passes(stream.position, len(layout.units))
        told = live.not_started or (entry is not None and entry.ordered and not live.unclear)
        if entry is not None and ((ran > expected and not entry.runs_blocks) or (ran < expected and not told)):
            raise OutOfOrder(
                f"block '{self.block}' ({self.where}) made {ran} residual adds of trunk '{entry.trunk}' in "
                f"this call, and {expected} when it was rewired. A block that does not run adds nothing, where it is "
                "known which one that was: with the add in the forward of a block, in an `if` that changes the same "
                f"variable, or in a `for` loop that calls another module in each iteration.{self.advice}"
            )
        if not leaves and not stream.complete:
            clamped = CLAMPED if stream.dtype == torch.float16 else ""
            raise OutOfOrder(
                f"block '{self.block}' ({self.where}) returned without the value of trunk "
                f"'{layout.trunk}' after {stream.position} of its {len(layout.units)} residual adds: in this call it "
                "makes something else of it, or adds in another way (`f.add_(x)` without gradients, say), than when it "
                f"was rewired.{clamped}{self.advice}"
            )


only_inlined(OpenStreams)  # so that writes are counted behind a graph break
