"""`Live`: a stream inside one call of an edited forward; `Entry`: what the function knows of its trunk."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rewire.attributes import CONNECTIONS, COPIED, WAITING
from rewire.placement import check_norm
from rewire.runtime.connection import Connection
from rewire.runtime.held import Post, Reading
from rewire.runtime.stream import Stream
from rewire.runtime.writes import counted, is_written, noted, uncounted
from rewire.topologies.base import QKVInputs
from rewire.torch_internals import module_at, only_inlined, outside_inference_mode


@dataclasses.dataclass
class Entry:
    """What one function knows of one trunk.

    Attributes:
        trunk: name of the trunk.
        connection: the trunk's connection.
        begins: whether the trunk starts in the function, so that its connection begins the stream there.
        adds: number of adds that a call makes, for each stream position at which the function may be called.
        ordered: whether each add has a fixed number among these, so that a call may skip some.
        outside: whether the function is also called outside of trunks, with plain tensors.
        read_below: whether a function that it calls reads the stream first: until then, it is the trunk's input.
        branch_given: whether callers compute the first branch that the function adds, from the value that they read.
        runs_blocks: whether functions that it calls make all these adds, and know which ones they make: then
            a call may also pass those of blocks that were left out before it.
        iterations: modules, by path below the function's, each of which a loop calls in one of its iterations -> number
            of the function's adds before that iteration.
        calls: modules, by path below the function's, each of which one call of the function runs -> number of the
            trunk's adds before that call.
        told_apart: the modules of both, by the same paths: they may be elsewhere later. Empty in copies without them.
        cut_at: number of residual adds after which the model was cut (`rewire.pipeline_stage`).
        held: the module that owns the trunk, and the connection's name there; None if it need not be looked up.
    """

    trunk: str
    connection: Connection
    begins: bool
    adds: dict[int, int]
    ordered: bool = False
    outside: bool = False
    read_below: bool = False
    branch_given: bool = False
    runs_blocks: bool = False
    iterations: dict[str, int] = dataclasses.field(default_factory=dict)
    calls: dict[str, int] = dataclasses.field(default_factory=dict)
    told_apart: dict[str, nn.Module] = dataclasses.field(default_factory=dict, repr=False, compare=False)
    cut_at: int | None = None
    held: tuple[nn.Module, str] | None = dataclasses.field(default=None, repr=False, compare=False)

    def number_of(self, numbers: Mapping[str, int], owner: nn.Module, module: object, likely: int) -> int | None:
        """The number, in `iterations` or `calls`, of what runs ``module``, of the function's module ``owner``.

        It is mostly ``likely``. None if nothing is known to run ``module``. If that was put in another one's place,
        too, it is the next of both (`has_one_twice`).
        """
        if any(number == likely and self.told_apart.get(path) is module for path, number in numbers.items()):
            return likely
        known = {path for path in numbers if self.told_apart.get(path) is module}
        now = {path for path in numbers if module_at(owner, path) is module}  # in place of another, as an adapter is
        moved = known and not known & now
        found = sorted(numbers[path] for path in (known if moved else now))
        return next((number for number in found if number >= likely), found[0] if found else None)

    def has_one_twice(self, owner: nn.Module) -> bool:
        """Whether a module stands in another one's place, too, and does not tell which iteration or call it is."""
        now = {path: module_at(owner, path) for path in self.told_apart}
        kept = {id(module) for path, module in now.items() if self.told_apart[path] is module}
        return any(id(module) in kept for path, module in now.items() if self.told_apart[path] is not module)

    @property
    def in_use(self) -> Connection:
        """The connection, or the copy with an adapter's weights with which PEFT replaces it while that is active."""
        if self.held is None:
            return self.connection
        owner, name = self.held
        found: Connection = getattr(getattr(owner, CONNECTIONS, None), name, self.connection)
        return found

    def __deepcopy__(self, memo: dict[Any, Any]) -> Entry:
        """A copy, which refers to the copies of the trunk's owner and connection; to themselves where they stay."""
        held, connection = self.held, self.connection
        if held is not None and (id(held[0]) in memo or id(held[0]) in memo.get(COPIED, ())):
            held = (memo[id(held[0])], held[1]) if id(held[0]) in memo else None
        told_apart = {path: memo[id(module)] for path, module in self.told_apart.items() if id(module) in memo}
        made = dataclasses.replace(self, adds=dict(self.adds), told_apart=told_apart, held=held)
        made.connection = memo.get(id(connection), connection)
        if made.connection is connection:  # a block alone is copied; or the connection will be, later
            memo.setdefault((WAITING, id(connection)), []).append(made)
        return made


class Live:
    """A stream that is open inside one call of a function.

    Attributes:
        stream: the stream after the last read.
        values: tensors that stand for the stream's value: the value that was read, and casts of it.
        before: of each of the values when it was made, the version counter, and whether it required gradients.
        trunk: name of the trunk.
        source: the stream that came in, or the tensor with which the trunk starts.
        norm, normed: a norm and its output for the value, if both were computed together.
        entry: what the function knows of the trunk; None if a function that it called began the stream.
        start: position of the stream when it came in.
        first: position before the first add of the function or its callees: 0 if the trunk starts in there.
        qkv: the separate q/k/v inputs of an attention, if it has these.
        apart: whether these inputs have been passed to the projections, or to the module that holds them.
        given: whether a called function has the stream now.
        called: whether the function was called with a value that its caller had read.
        unrecorded: whether a read or an add ran with autograd on, though it was off when the stream began.
        unclear: whether an iteration of a loop ran of which it is not known which one it is.
        parts: sums of the value and some parallel branches of the next residual add, with these branches.
        parallel: these sums and branches, each with its version counter when the sum was made.
        replaced: what stood for the value before adds were skipped: other variables may still hold it.
        skipped: number of adds that the function has left out.
    """

    def __init__(self, stream: Stream, entry: Entry | None, source: object = None) -> None:
        self.stream = stream
        self.entry, self.start, self.first = entry, stream.position, stream.position
        self.trunk, self.source = stream.layout.trunk, source
        self.values: list[Tensor] = []
        self.before: list[tuple[int | None, bool]] = []
        self.norm: nn.Module | None = None
        self.normed: Tensor | None = None
        self.qkv: QKVInputs | None = None
        self.apart = False
        self.given = self.unrecorded = self.unclear = False
        self.called = isinstance(stream.held, Reading)
        self.parts: list[tuple[Tensor, tuple[Tensor, ...]]] = []
        self.parallel: list[tuple[Tensor, int | None]] = []
        self.replaced: list[Tensor] = []
        self.skipped = 0

    @property
    def not_started(self) -> bool:
        """Whether no add was made although the function holds the whole trunk: then the trunk does not start here.

        A recursive function may get the trunk's output in its last call, and return it.
        """
        if self.entry is None or not isinstance(self.source, Tensor) or self.stream.position != self.skipped:
            return False
        return self.entry.adds.get(0) == len(self.stream.layout.units)

    @property
    def overwritten(self) -> bool:
        """Whether the value was written to or detached in place after it was read."""
        held, matters = self.stream.held, True
        if isinstance(held, Post):  # writes matter only to a sum that is also what the next branch reads
            matters = held.reading is not None and held.sum is held.reading.parts[0]
        for value, (before, recorded) in zip(self.values, self.before, strict=True):
            if (matters and is_written(value, before)) or (recorded and not value.requires_grad):
                return True
            matters = not isinstance(held, Post)  # a copy of such a sum is the model's own
        return bool(self.parallel) and any(is_written(part, before) for part, before in self.parallel)

    def also(self, value: Tensor) -> None:
        """Add a cast or clone of the value to the tensors that stand for it."""
        self.values.append(value)
        self.before.append((noted(value), value.requires_grad))

    def normed_by(self, norm: object, value: object) -> Tensor | None:
        """The output of ``norm`` for the value, if it was computed together with the read."""
        before = self.before[0][0]
        same = self.norm is norm and value is self.values[0] and (before is None or not is_written(value, before))
        return self.normed if same else None

    def switched_on(self) -> bool:
        """Whether autograd is on, and was off when the stream began; the other way round raises UnsupportedCall.

        Megatron switches it on for its adds alone; `Depth.leave` checks that it is off again at the end.
        """
        if torch.is_grad_enabled() == self.stream.shared.recorded:
            return False
        if self.stream.shared.recorded:
            self.stream.check_recorded()
        self.unrecorded = True
        return True

    def read(self, norm: nn.Module | None = None) -> Tensor:
        """Read the value; with a norm, its output is computed together with it."""
        if uncounted():
            with outside_inference_mode():
                return self.read(norm)
        stream = self.stream
        position, sites, entry = stream.position, stream.layout.sites, self.entry
        in_post = isinstance(stream.held, Post)  # statistics of a mere sum may be computed under no_grad
        if not in_post and torch.is_grad_enabled() != stream.shared.recorded and self.switched_on():
            with torch.no_grad():
                return self.read(norm)
        self.norm = self.normed = self.qkv = None
        self.parts, self.parallel, self.replaced = [], [], []
        if norm is not None and position == 0 and stream.placement is None:
            check_norm(norm, self.trunk)
        if in_post:
            value = stream.value()
        elif position == len(sites):
            value = stream.finish()
        elif entry is not None and position == entry.cut_at:
            value = stream.unread()
        elif position == 0 and entry is not None and entry.read_below and stream.shared.input is not None:
            value = stream.shared.input
        elif norm is not None and not sites[position].reads_qkv:
            value, self.normed, self.stream = stream.read_normed(norm)
            self.norm = norm
        else:
            read, self.stream = stream.read()
            self.qkv = read if isinstance(read, QKVInputs) else None
            self.apart = isinstance(stream.held, Reading)  # the function that passed it on had read it
            value = read.residual if isinstance(read, QKVInputs) else read
        value = value if in_post else counted(value)  # the model's own operations have made such a sum
        wraps = stream.placement is not None and stream.wraps
        before = noted(value) if in_post or wraps else stream.shared.know(value)
        self.values, self.before = [value], [(before, value.requires_grad)]
        return value


only_inlined(Live)  # so that writes are counted behind a graph break
