"""What all streams of one forward of a trunk share: its weights, and which tensors the model could write to."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rewire.runtime.writes import is_written, noted
from rewire.torch_internals import in_higher_order, only_inlined, writes_within


class Shared:
    """One of these begins with the stream, and is handed on from each stream to the next.

    It is no pytree: code that casts every tensor in a block's inputs (FSDP2's mixed precision) does not find the
    weights, which have to stay float32.

    Attributes:
        begun_by: the connection, as the function knows it in which the stream began; None on later pipeline stages.
        told_by: of each function in which modules have told which adds run, its `Entry` for the trunk, and its module.
        weights: the effective weights.
        learned: the learned weights behind them, by name: pipelines send these to later stages.
        recorded: whether autograd was on when they were computed.
        ended: whether the trunk has made its output, and no block has run since.
        format: memory format that values have to get, if sums might have another than the model's hidden states: the
            model may take views of them, and random numbers are drawn in memory order.
        input: the trunk's input, if functions may look at it before the first read.
        lent: values of streams that were read between blocks, each with its version counter then.
        known: tensors that the model knows and that may be part of a stream, each with its version counter when it
            gave or got them.
    """

    __slots__ = ("begun_by", "ended", "format", "input", "known", "learned", "lent", "recorded", "told_by", "weights")

    def __init__(self, weights: object, learned: Mapping[str, Tensor] | None = None) -> None:
        self.weights, self.learned, self.recorded = weights, learned or {}, torch.is_grad_enabled()
        self.lent: list[tuple[Tensor, int | None]] = []
        self.known: list[tuple[weakref.ref[Tensor], int | None]] = []
        self.format: torch.memory_format | None = None
        self.input: Tensor | None = None
        self.ended = False
        self.begun_by: object = None
        self.told_by: list[tuple[Any, nn.Module]] = []

    def know(self, value: Tensor) -> int | None:
        """Note a tensor that the model knows and that may be part of a stream; returns what `noted` does."""
        if torch.compiler.is_dynamo_compiling():
            return noted(value, part=True)
        before = writes_within(value)
        self.known.append((weakref.ref(value), before))
        return before

    def lend(self, value: Tensor) -> None:
        """Note a value that code between the blocks gets."""
        if not (torch.compiler.is_compiling() and in_higher_order()):
            self.lent.append((value, noted(value)))

    def changed(self) -> bool:
        """Whether one of the values that were lent since the last call was written to in place."""
        lent = self.lent
        if lent and not (torch.compiler.is_compiling() and in_higher_order()):
            self.lent = []
        return any(is_written(value, before) for value, before in lent)

    def tells(self, entry: Any, owner: nn.Module) -> None:
        """Note a function, of the module ``owner``, in which a module has told which adds run."""
        if not (torch.compiler.is_compiling() and in_higher_order()) and all(entry is not e for e, _ in self.told_by):
            self.told_by.append((entry, owner))

    def has_one_twice(self) -> bool:
        """Whether a module that would tell which adds ran stands in two places."""
        return any(entry.has_one_twice(owner) for entry, owner in self.told_by)

    def end(self) -> None:
        """Note that the trunk has made its output."""
        if not (torch.compiler.is_compiling() and in_higher_order()):
            self.ended = True

    def run_again(self) -> None:
        """Note that a block runs behind the end: a checkpoint runs it once more in backward."""
        if not (torch.compiler.is_compiling() and in_higher_order()):
            self.ended = False


only_inlined(Shared)  # so that writes are counted behind a graph break
