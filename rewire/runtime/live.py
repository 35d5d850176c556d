"""One residual stream inside one call of an edited forward, and what the function knows of its trunk."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from rewire.attributes import CONNECTIONS
from rewire.placement import check_norm
from rewire.runtime.connection import Connection
from rewire.runtime.stream import Post, Reading, Stream, version, written_since
from rewire.topologies.base import QKVInputs


@dataclasses.dataclass
class Entry:
    """What one function knows of one trunk.

    Attributes:
        trunk: its name.
        connection: of this trunk.
        begins: whether the function stands at the start of the trunk, and the connection begins the stream there.
        adds: for each position of the stream at which the function may be called, the adds that it makes then.
        ordered: whether each of them has one place among these, so that a call may leave some out.
        outside: whether it is also called outside of trunks, with plain tensors.
        read_below: whether what the function calls is the first to read the stream that begins in it.
        cut_at: number of residual adds after which the model was cut (`rewire.pipeline_stage`).
        held: the module that owns the trunk, and the name of the connection there; None where that is not asked.
    """

    trunk: str
    connection: Connection
    begins: bool
    adds: dict[int, int]
    ordered: bool = False
    outside: bool = False
    read_below: bool = False
    cut_at: int | None = None
    held: tuple[nn.Module, str] | None = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def in_use(self) -> Connection:
        """The connection, or what PEFT has put in its place: the weights of an adapter, for as long as it is active."""
        if self.held is None:
            return self.connection
        owner, name = self.held
        found: Connection = getattr(getattr(owner, CONNECTIONS, None), name, self.connection)
        return found

    def adds_none(self, stream: Stream) -> bool:
        """Whether a call has made no add of a trunk that the function holds whole: then it is no call of the trunk.

        A function that calls itself may get the trunk's output last, and hands it back.
        """
        return stream.position == 0 and self.adds.get(0) == len(stream.layout.units)

    def __deepcopy__(self, memo: dict[int, Any]) -> Entry:
        """A copy; in a block that is copied by itself, without the whole trunk, it holds nothing of that."""
        held = self.held
        if held is not None:
            held = (memo[id(held[0])], held[1]) if id(held[0]) in memo else None
        connection = copy.deepcopy(self.connection, memo)
        return dataclasses.replace(self, connection=connection, adds=dict(self.adds), held=held)


class Live:
    """A stream inside a function.

    Attributes:
        stream: after what was read last.
        unread: before that.
        values: tensors that are its value: what was read, and casts of it.
        versions: of each of them, when it was made.
        recorded: whether each of them had gradients then.
        trunk: its name.
        source: what came in: a stream, or the tensor that the trunk starts with.
        norm, normed: a module, and what it makes of the value, if both were computed together.
        entry: what the function knows of the trunk; None if a function that it called began the stream.
        start: position of the stream when it came in.
        first: number of the first add that the function, or what it calls, makes: 0 if the trunk starts in there.
        qkv: what an attention reads, if it has separate q/k/v inputs.
        apart: whether what projects these, or what holds the projections, was given them.
        given: whether a function that was called has the stream now.
        parts: sums of the value and some of the parallel branches of the next residual add, with these branches.
    """

    def __init__(self, stream: Stream, entry: Entry | None, source: Any = None) -> None:
        self.stream = self.unread = stream
        self.entry, self.start, self.first = entry, stream.position, stream.position
        self.trunk, self.source = stream.layout.trunk, source
        self.values: list[Tensor] = []
        self.versions: list[int | None] = []
        self.recorded: list[bool] = []
        self.norm: nn.Module | None = None
        self.normed: Tensor | None = None
        self.qkv: QKVInputs | None = None
        self.apart = False
        self.given = False
        self.parts: list[tuple[Tensor, tuple[Tensor, ...]]] = []

    @property
    def overwritten(self) -> bool:
        """Whether the value was written to in place, or cut off from its gradients, after it was read."""
        for value, had in zip(self.values, self.recorded, strict=True):
            if had and not value.requires_grad:
                return True
        held = self.stream.held
        if isinstance(held, Post):  # a sum that nobody else reads, or one that the next branch was to read
            lent = held.reading is not None and held.sum is held.reading.parts[0]
            return lent and written_since(self.values[0], self.versions[0])
        return any(map(written_since, self.values, self.versions))

    def also(self, value: Tensor) -> None:
        """A cast or a clone of the value is the stream's value, too."""
        self.values.append(value)
        self.versions.append(version(value))
        self.recorded.append(value.requires_grad)

    def normed_by(self, norm: Any, value: Tensor) -> Tensor | None:
        """What ``norm`` makes of the value, if it was computed when that was read."""
        same = self.norm is norm and value is self.values[0] and not written_since(value, self.versions[0])
        return self.normed if same else None

    def read(self, norm: nn.Module | None = None) -> Tensor:
        """The value; with a norm, what that makes of it is computed, too."""
        stream = self.unread = self.stream
        in_post = isinstance(stream.held, Post)
        if not in_post and torch.is_grad_enabled() != stream.weights.recorded:
            stream.check_recorded()  # of a sum by itself a statistic may be made without gradients
        self.norm = self.normed = self.qkv = None
        self.parts = []
        if norm is not None and stream.position == 0 and stream.placement is None:
            check_norm(norm, self.trunk)
        if stream.complete:
            value = stream.finish()
        elif in_post:
            value = stream.value()
        elif self.entry is not None and stream.position == self.entry.cut_at:
            value = stream.unread()
        elif stream.position == 0 and isinstance(self.source, Tensor) and self.entry and self.entry.read_below:
            value = self.source
        elif norm is not None and not stream.layout.reads_qkv(stream.position):
            value, self.normed, self.stream = stream.read_normed(norm)
            self.norm = norm
        else:
            read, self.stream = stream.read()
            self.qkv = read if isinstance(read, QKVInputs) else None
            self.apart = isinstance(stream.held, Reading)  # by the function that handed it on
            value = read.residual if isinstance(read, QKVInputs) else read
        self.values, self.versions, self.recorded = [value], [version(value)], [value.requires_grad]
        return value
